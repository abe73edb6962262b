"""Checkpoints are whole or absent, whatever dies, fills up or rots."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from meshwright.spec.errors import RunError
from meshwright.train import checkpoint

TENSORS = {"model/a": torch.arange(6.0).view(2, 3), "exp_avg/a": torch.ones(3, dtype=torch.float64)}


def save(folder, step, keep=2, tensors=TENSORS):
    return checkpoint.save(folder, step, tensors, {"step": step}, keep)


def test_round_trip(tmp_path):
    flat = torch.arange(10.0)
    views = TENSORS | {"model/view": flat[2:8].view(2, 3), "model/turned": flat[:4].view(2, 2).t()}
    where = save(tmp_path, 50, tensors=views)
    found, meta = checkpoint.load(where)
    assert meta == {"step": 50}
    assert set(found) == set(views)
    for name, tensor in views.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_keeps_the_newest(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    assert checkpoint.steps(tmp_path) == [30, 40]
    assert sorted(os.listdir(tmp_path)) == ["step-00000030", "step-00000040"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 10, tensors={"model/a": torch.zeros(1)})
    assert torch.equal(checkpoint.load(checkpoint.path(tmp_path, 10))[0]["model/a"], torch.zeros(1))


@pytest.mark.parametrize("call", ["os.rename", "os.fsync"])
def test_a_failed_second_save_of_a_step_keeps_the_first(tmp_path, monkeypatch, call):
    save(tmp_path, 10, keep=1)
    plain = getattr(os, call.removeprefix("os."))
    for nth in range(1, 9):
        calls = iter(range(1, 100))

        def failing(*args, nth=nth, calls=calls):
            if next(calls) == nth:
                raise OSError(errno.EIO, "Input/output error")
            return plain(*args)

        with monkeypatch.context() as patch:
            patch.setattr(f"meshwright.train.checkpoint.{call}", failing)
            with contextlib.suppress(checkpoint.CheckpointError):
                save(tmp_path, 10, keep=1)
        assert checkpoint.newest(tmp_path) == checkpoint.Newest(10, ())
        assert set(checkpoint.load(checkpoint.path(tmp_path, 10))[0]) == set(TENSORS)
    save(tmp_path, 10, keep=1)
    assert os.listdir(tmp_path) == ["step-00000010"]


def test_a_former_one_is_set_aside_like_any_other(tmp_path):
    """A saver died between the two renames of a second save."""
    save(tmp_path, 10)
    os.rename(tmp_path / "step-00000010", tmp_path / "former-step-00000010")
    assert checkpoint.newest(tmp_path).step == 10
    assert checkpoint.set_aside(tmp_path, after=0) == [10]
    assert os.listdir(tmp_path) == ["superseded-step-00000010"]


def test_only_what_the_dead_left_is_cleared(tmp_path):
    """Two runs that share a folder by mistake do not take each other's files away."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    for process in (child, os.getppid(), os.getpid()):
        (tmp_path / f".saving-{process}-step-00000010").mkdir()
    save(tmp_path, 20)
    assert sorted(os.listdir(tmp_path)) == [f".saving-{os.getppid()}-step-00000010", "step-00000020"]


def test_superseded_ones_are_set_aside_and_not_lost(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, keep=3)
    assert checkpoint.set_aside(tmp_path, after=10) == [20, 30]
    assert checkpoint.steps(tmp_path) == [10]
    save(tmp_path, 20, keep=3)
    assert checkpoint.set_aside(tmp_path, after=10) == [20]
    assert sorted(os.listdir(tmp_path)) == [
        "step-00000010", "superseded-step-00000020", "superseded-step-00000020-2", "superseded-step-00000030",
    ]  # fmt: skip


def test_nothing_saved(tmp_path):
    assert checkpoint.newest(tmp_path / "none") == checkpoint.Newest(None, ())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model/a", "exp_avg/a"])
def test_what_is_not_finite_pushes_nothing_out(tmp_path, name, bad):
    save(tmp_path, 10, keep=1)
    worthless = {key: tensor.clone() for key, tensor in TENSORS.items()}
    worthless[name].view(-1)[-2] = bad
    worthless |= {"empty": torch.empty(0), "count": torch.ones(1, dtype=torch.int64)}
    for step in (10, 20):
        with pytest.raises(checkpoint.NotFinite, match=f"^{name} is not finite$"):
            save(tmp_path, step, keep=1, tensors=worthless)
        assert os.listdir(tmp_path) == ["step-00000010"]
        assert checkpoint.newest(tmp_path) == checkpoint.Newest(10, ())


def test_everything_is_on_the_disk_before_a_checkpoint_is_in_place(tmp_path, monkeypatch):
    """Files whole, then the folder that lists them, then the rename, then the folder that it changed."""
    done = []
    fsync, rename = os.fsync, os.rename

    def where(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        return "checkpoints" if path == str(tmp_path) else "aside" if os.path.isdir(path) else os.path.basename(path)

    def recorded(descriptor):
        about = os.fstat(descriptor)
        done.append((where(descriptor), about.st_size if not os.path.isdir(f"/proc/self/fd/{descriptor}") else None))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(os, "rename", lambda here, there: (done.append(("rename", None)), rename(here, there)))
    target = save(tmp_path, 10)
    assert done == [
        ("tensors.safetensors", (target / "tensors.safetensors").stat().st_size),
        ("meta.json", (target / "meta.json").stat().st_size),
        ("aside", None),
        ("rename", None),
        ("checkpoints", None),
    ]


def truncate(file):
    os.truncate(file, os.path.getsize(file) - 1)


def flip(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, os.remove], ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", ["tensors.safetensors", "meta.json"])
def test_damage_is_named_and_passed_over(tmp_path, damage, name):
    save(tmp_path, 10)
    damaged = save(tmp_path, 20) / name
    damage(damaged)
    if damage is flip and name == "meta.json":
        damaged.write_text(json.dumps(["no", "checkpoint"]))
    with pytest.raises(RunError, match=name) as told:
        checkpoint.load(damaged.parent)
    assert str(told.value).startswith(str(damaged)) and "char" not in str(told.value)
    found = checkpoint.newest(tmp_path)
    assert found.step == 10 and str(damaged) in found.skipped[0]


def test_no_flipped_bit_of_meta_goes_unseen(tmp_path):
    file = save(tmp_path, 10) / "meta.json"
    whole = file.read_bytes()
    for place in range(len(whole)):
        for bit in (1, 4, 128):
            content = bytearray(whole)
            content[place] ^= bit
            file.write_bytes(content)
            with pytest.raises(RunError):
                checkpoint.load(file.parent)


@pytest.mark.parametrize("content", ["5", "null", "[]", "{}", '"meta bytes crc32"', "\udc80"])
def test_a_meta_that_is_none(tmp_path, content):
    file = save(tmp_path, 10) / "meta.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    assert checkpoint.newest(tmp_path).step is None


DYING = """
    import os, sys
    from pathlib import Path
    import torch
    from meshwright.train import checkpoint

    folder, step, fatal = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    seen = 0
    def deadly(event, args):
        global seen
        if event in ("open", "shutil.rmtree") or event.startswith("os."):
            if str(folder) in str(args) or args and isinstance(args[0], int):
                seen += 1
                if seen == fatal:
                    os._exit(9)
    sys.addaudithook(deadly)
    checkpoint.save(folder, step, {"w": torch.full((3,), 20.0)}, {"step": step}, keep=1)
    print(seen)
"""


@pytest.mark.parametrize("step", [20, 10], ids=["another step", "the same step"])
def test_death_at_every_file_operation(tmp_path, step):
    """A saver dies at its first, second, … operation: the old or the new one loads, and a later save succeeds."""
    script = tmp_path / "dying.py"
    script.write_text(textwrap.dedent(DYING))
    folder = tmp_path / "checkpoints"
    outcomes = []
    for fatal in range(1, 100):
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        save(folder, 10, keep=1, tensors={"w": torch.full((3,), 10.0)})
        done = forked(script, folder, step, fatal)
        found = checkpoint.newest(folder)
        assert found.step in (10, step) and not found.skipped, (fatal, found)
        tensors, meta = checkpoint.load(checkpoint.path(folder, found.step))
        value = float(tensors["w"][0])
        assert meta["step"] == found.step and value in (10.0, 20.0)
        assert step == 10 or value == found.step
        save(folder, 30, keep=1)
        assert os.listdir(folder) == ["step-00000030"]
        outcomes.append(value)
        if done == 0:
            break
    assert done == 0 and outcomes[-1] == 20 and 10 in outcomes and len(outcomes) > 8
    assert outcomes == sorted(outcomes)


def forked(script, folder, step, fatal):
    """Run the script in a fork of this process: torch is loaded already."""
    child = os.fork()
    if child == 0:
        sys.argv = [str(script), str(folder), str(step), str(fatal)]
        code = 1
        try:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), code
    return code


@pytest.mark.parametrize("call", ["tensorfile.write", "os.fsync", "os.rename", "json.dump"])
def test_a_full_disk_keeps_the_old_one_and_leaves_nothing(tmp_path, monkeypatch, call):
    save(tmp_path, 10)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"meshwright.train.checkpoint.{call}", full)
        with pytest.raises(checkpoint.CheckpointError, match="No space left"):
            save(tmp_path, 20)
    assert os.listdir(tmp_path) == ["step-00000010"]
    assert checkpoint.newest(tmp_path).step == 10
    save(tmp_path, 20)
