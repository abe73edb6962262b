"""Several ranks write one checkpoint: boxes of one tensor on each, and a rank that dies, is full, or sees no folder."""

from __future__ import annotations

import errno
import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.comm.mesh import Mesh
from meshwright.parallel.flat import Piece
from meshwright.parallel.placement import Placement
from meshwright.spec.boxes import Box
from meshwright.spec.errors import RunError
from meshwright.train import checkpoint, folders, tensorfile
from meshwright.train.checkpoint import Newest, Saver
from meshwright.train.manifest import Entry, Manifest
from meshwright.train.parts import Part, SaveParts, parts_of

SHAPE, CUTS = (7, 5), (0, 17, 18, 35)
WHOLE = torch.arange(35.0).view(SHAPE)


def run_of(rank: int, value: torch.Tensor = WHOLE) -> list[Part]:
    """What `rank` of three holds of the 7 × 5 tensor: elements from CUTS[rank] to CUTS[rank + 1], in its shard."""
    start, stop = CUTS[rank : rank + 2]
    placement = Placement("w", SHAPE, True, ("w",))
    shard = torch.full((stop - start + 4,), float("nan"))
    shard[2:-2] = value.flatten()[start:stop]
    return list(parts_of("model", Piece(placement, start, stop, 2), shard))


def save_runs(mesh, folder, step, fails=None):
    one = Saver(folder, mesh, run_of(mesh.rank), keep=2)
    one.save(step, {"step": step})
    ended = one.wait()
    return None if ended.error is None else str(ended.error)


def test_a_matrix_split_within_a_row(ranks, tmp_path):
    """Boxes that are no rows, several of one tensor on one rank: none is lost, none stands for another."""
    assert ranks.run(3, save_runs, tmp_path, 1) == [None] * 3
    where = folders.path(tmp_path, 1)
    assert [sorted(load_file(where / f"rank-0000{rank}.safetensors")) for rank in range(3)] == [
        ["model/w@0,0", "model/w@3,0"], ["model/w@3,2"], ["model/w@3,3", "model/w@4,0"],
    ]  # fmt: skip
    found, _ = checkpoint.load(where)
    assert torch.equal(found["model/w"], WHOLE)
    for rank in range(3):  # and back into such runs
        parts = run_of(rank, torch.zeros(SHAPE))
        checkpoint.read(where, parts)
        for part, expected in zip(parts, run_of(rank), strict=True):
            assert torch.equal(part.tensor, expected.tensor)


def test_there_is_no_pickle(ranks, tmp_path):
    """Every byte is of the tensors, of their names, or JSON; what unpickles anywhere is refused by the interpreter."""
    ranks.run(3, save_runs, tmp_path, 1)
    where = folders.path(tmp_path, 1)
    assert sorted(os.listdir(where)) == ["manifest.json", *(f"rank-0000{rank}.safetensors" for rank in range(3))]
    for file in where.glob("*.safetensors"):
        content = file.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        about = json.loads(content[8:header])
        assert len(content) - header == max(entry["data_offsets"][1] for entry in about.values())
    assert json.loads((where / "manifest.json").read_text())["version"] == 1
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load", "loads", "Unpickler"):
            patch.setattr(pickle, name, None)
        patch.setattr(torch, "load", None)
        checkpoint.load(where)


def test_a_box_that_a_planner_loses_is_noticed(ranks, tmp_path):
    """Keyed by name alone, one box of two would overwrite the other: the checkpoint is refused and not put in place."""
    ends = ranks.run(3, save_keyed_by_name, tmp_path)
    assert all("model/w is not whole: 18 of 35 elements are there" in end for end in ends), ends
    assert folders.steps(tmp_path) == [] and os.listdir(tmp_path) == []


def save_keyed_by_name(mesh, folder):
    SaveParts.create_local_plan = lambda self: type(plan := create(self))(plan.items[-1:])
    return save_runs(mesh, folder, 1)


create = SaveParts.create_local_plan


def die_at(rank, folder, who, fatal):
    if rank != who:
        return
    seen = 0

    def deadly(event, args):
        nonlocal seen
        if event in ("open", "shutil.rmtree") or event.startswith("os."):
            words = str(args)
            if str(folder) in words or (args and isinstance(args[0], int)):
                seen += 1
                if seen == fatal:
                    os._exit(9)

    sys.addaudithook(deadly)


def save_and_die(mesh, folder, step, who, fatal):
    one = Saver(folder, mesh, run_of(mesh.rank, WHOLE + step), keep=1)
    die_at(mesh.rank, folder, who, fatal)
    one.save(step, {"step": step})
    ended = one.wait()
    return None if ended.error is None else str(ended.error)


def save_alone(folder, step):
    saver = Saver(folder, Mesh.single(torch.device("cpu")), [Part.whole("model/w", WHOLE + step)], keep=1)
    saver.save(step, {"step": step})
    assert saver.wait().error is None


@pytest.mark.timeout(400)
@pytest.mark.parametrize("who", [0, 2])
def test_death_of_one_ranks_writer_at_every_file_operation(ranks, tmp_path, who):
    """The other ranks end too; what is there is the old or the new one, whole; and the next save succeeds."""
    steps = []
    # Every operation of one rank alone is in test_checkpoint_whole.py; here of the coordinator's every third.
    for fatal in range(1, 60, 3 if who == 0 else 1):
        folder = tmp_path / str(fatal)
        save_alone(folder, 10)
        ends = ranks.attempt(3, save_and_die, folder, 20, who, fatal)
        died = ends[who].exit == 9
        assert died or all(end.ok and end.value is None for end in ends), ends
        found = checkpoint.newest(folder)
        assert not found.skipped
        tensors, meta = checkpoint.load(folders.path(folder, found.step))
        assert meta["step"] == found.step and torch.equal(tensors["model/w"], WHOLE + found.step)
        assert (folder / "latest").read_text().strip() in ("step-00000010", f"step-{found.step:08d}")
        steps.append(found.step)
        if not died:
            break
        save_alone(folder, 30)
        assert sorted(os.listdir(folder)) == ["latest", "step-00000030"]
    assert steps[-1] == 20 and steps == sorted(steps) and steps.count(10) >= (3 if who == 0 else 1)


def save_full(mesh, folder, step, who, call, nth):
    """The disk of `who` is full at its nth call."""
    plain, calls = getattr(tensorfile.os if call == "fsync" else tensorfile, call), iter(range(1, 99))

    def full(*args):
        if next(calls) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(*args)

    if mesh.rank == who:
        setattr(tensorfile.os if call == "fsync" else tensorfile, call, full)
    return save_runs(mesh, folder, step)


@pytest.mark.parametrize(("call", "nth"), [("_put", 1), ("_put", 2), ("_put", 3), ("fsync", 1)])
@pytest.mark.parametrize("who", [0, 2])
def test_a_disk_that_is_full_for_one_rank_fails_the_save_on_all(ranks, tmp_path, who, call, nth):
    ranks.run(3, save_runs, tmp_path, 10)
    for error in ranks.run(3, save_full, tmp_path, 20, who, call, nth):
        assert error.startswith(f"{tmp_path}/step-00000020 could not be written: ") and "No space left" in error
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000010"]
    assert checkpoint.newest(tmp_path) == Newest(10, ())


def save_elsewhere(mesh, here, there):
    """Rank 1 is on a machine with a folder of its own by that name."""
    os.chdir(there if mesh.rank == 1 else here)
    os.makedirs("checkpoints", exist_ok=True)
    return save_runs(mesh, Path("checkpoints"), 1)


def test_a_rank_that_does_not_see_the_folder(ranks, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    for error in ranks.run(3, save_elsewhere, here, there):
        assert "is not seen by rank 1: all machines must share the folder" in error
    assert [list((folder / "checkpoints").iterdir()) for folder in (here, there)] == [[], []]


def test_whoever_reads_must_find_every_element_once(tmp_path):
    """A manifest with a gap or an overlap is refused, whatever its checksum says."""
    saver = Saver(tmp_path, Mesh.single(torch.device("cpu")), [Part.whole("w", WHOLE)], keep=1, background=False)
    saver.save(1, {})
    where = saver.wait().where
    whole = Manifest.read(where)
    (box,) = whole.tensors["w"].boxes
    twice = (box, box)
    less = (type(box)(Box((0, 0), (6, 5)), box.file, box.key, box.stored),)
    for boxes, words in ((twice, "overlap"), (less, "30 of 35 elements")):
        entry = Entry(torch.float32, SHAPE, boxes)
        Manifest(whole.meta, whole.files, {"w": entry}).write(where / "manifest.json")
        with pytest.raises(RunError, match=f"w is not whole: .*{words}"):
            checkpoint.load(where)
    lost = Manifest(whole.meta, {}, whole.tensors)
    lost.write(where / "manifest.json")
    with pytest.raises(RunError, match=r"boxes in rank-00000.safetensors, which is not listed"):
        checkpoint.load(where)
