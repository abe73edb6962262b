"""Checkpoints are whole or absent, whatever dies, fills up or rots. One rank; two are in test_checkpoint_ranks.py."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import textwrap
import time

import pytest
import torch
from safetensors.torch import load_file

from meshwright.comm.mesh import Mesh
from meshwright.spec.errors import RunError
from meshwright.train import checkpoint, folders, manifestfile, storage, tensorfile
from meshwright.train.checkpoint import Newest, Saver
from meshwright.train.parts import Part

TENSORS = {"model/a": torch.arange(6.0).view(2, 3), "exp_avg/a": torch.ones(3, dtype=torch.float64)}


def saver(folder, tensors=TENSORS, **options):
    parts = [Part.whole(name, tensor) for name, tensor in tensors.items()]
    return Saver(folder, Mesh.single(torch.device("cpu")), parts, **{"keep": 2, "background": False, **options})


def save(folder, step, tensors=TENSORS, **options):
    """Save and return where; raise what it ended with."""
    one = saver(folder, tensors, **options)
    one.save(step, {"step": step})
    ended = one.wait()
    if ended.error is not None:
        raise ended.error
    return ended.where


def content(folder, step):
    return checkpoint.load(folders.path(folder, step))[0]


def names(folder):
    return sorted(entry for entry in os.listdir(folder) if entry != folders.LATEST)


@pytest.mark.parametrize("background", [True, False])
def test_round_trip(tmp_path, background):
    flat = torch.arange(10.0)
    views = TENSORS | {"model/view": flat[2:8].view(2, 3), "model/turned": flat[:4].view(2, 2).t(), "n": flat[3]}
    where = save(tmp_path, 50, views, background=background)
    found, meta = checkpoint.load(where)
    assert meta == {"step": 50}
    assert set(found) == set(views)
    for name, tensor in views.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_what_is_saved_is_what_was_there_when_it_was_asked_for(tmp_path, monkeypatch):
    """The copy, not what training has made of the tensors since; the next save uses the same buffers."""
    write = tensorfile.write

    def late(*args):
        time.sleep(0.3)
        return write(*args)

    monkeypatch.setattr(tensorfile, "write", late)
    weights = torch.zeros(5)
    one = saver(tmp_path, {"w": weights}, background=True, keep=3)
    began = time.perf_counter()
    assert one.save(1, {}) is None
    assert one.poll() is None and time.perf_counter() - began < 0.3
    one.copied()
    weights.fill_(7)
    first = one.save(2, {})
    staged = one._staged[0].tensor.data_ptr()
    one.copied()
    weights.fill_(9)
    second = one.wait()
    assert (first.step, second.step, first.error, second.error) == (1, 2, None, None)
    assert first.seconds > 0.3 and first.stall > 0.2, "the second waited for the first to end"
    assert content(tmp_path, 1)["w"].tolist() == [0] * 5 and content(tmp_path, 2)["w"].tolist() == [7] * 5
    one.save(3, {}, background=False)
    assert one.poll().step == 3 and one._staged[0].tensor.data_ptr() == staged
    assert content(tmp_path, 3)["w"].tolist() == [9] * 5
    assert one.poll() is None and one.wait() is None


def test_what_is_being_copied_is_waited_for_before_it_changes(tmp_path, monkeypatch):
    copy = Saver._copy

    def slowly(self):
        time.sleep(0.2)
        copy(self)

    monkeypatch.setattr(Saver, "_copy", slowly)
    weights = torch.zeros(5)
    one = saver(tmp_path, {"w": weights}, background=True)
    began = time.perf_counter()
    one.save(1, {})
    assert time.perf_counter() - began < 0.2, "training goes on"
    one.copied()
    assert time.perf_counter() - began > 0.2
    weights.fill_(7)
    ended = one.wait()
    assert ended.stall > 0.1 and content(tmp_path, 1)["w"].tolist() == [0] * 5
    one.copied()  # nothing is under way


def test_who_waits_in_any_case_needs_no_copy(tmp_path):
    one = saver(tmp_path, background=True)
    one.save(1, {}, background=False)
    assert one.wait().error is None and one._staged is None


def test_keeps_the_newest(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
        assert (tmp_path / "latest").read_text() == f"step-000000{step}\n"
    assert folders.steps(tmp_path) == [30, 40]
    assert names(tmp_path) == ["step-00000030", "step-00000040"]


def test_every_so_many_are_kept_beside_the_newest(tmp_path):
    for step in range(10, 100, 10):
        save(tmp_path, step, keep=2, keep_every=30)
    assert folders.steps(tmp_path) == [30, 60, 80, 90]
    save(tmp_path, 100, keep=1, keep_every=0)
    assert folders.steps(tmp_path) == [100]


def test_the_pointer_moves_when_the_checkpoint_is_in_place_and_old_ones_go_last(tmp_path, monkeypatch):
    """While a slow writer works nothing has changed; then one thing after the other."""
    save(tmp_path, 10, keep=1)
    seen = []

    def state():
        return (tmp_path / "latest").read_text().strip()[-2:], [s for s in folders.steps(tmp_path)]

    def told(function, name):
        def wrapped(*args, **kwargs):
            seen.append((name, *state()))
            return function(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(os, "rename", told(os.rename, "rename"))
    monkeypatch.setattr(folders, "prune", told(folders.prune, "prune"))
    write = tensorfile.write

    def slowly(*args):
        for _ in range(3):
            time.sleep(0.1)
            seen.append(("writing", *state()))
        return write(*args)

    monkeypatch.setattr(tensorfile, "write", slowly)
    one = saver(tmp_path, keep=1, background=True)
    one.save(20, {})
    assert state() == ("10", [10])
    assert one.wait().error is None
    assert seen == [
        *[("writing", "10", [10])] * 3,
        ("rename", "10", [10]),  # the folder
        ("rename", "10", [10, 20]),  # the pointer
        ("prune", "20", [10, 20]),
        ("rename", "20", [10, 20]),  # the old one, out of sight
    ]
    assert state() == ("20", [20])


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 10, {"model/a": torch.zeros(1)})
    assert torch.equal(content(tmp_path, 10)["model/a"], torch.zeros(1))


@pytest.mark.parametrize("call", ["os.rename", "os.fsync"])
def test_a_failed_second_save_of_a_step_keeps_the_first(tmp_path, monkeypatch, call):
    save(tmp_path, 10, keep=1)
    plain = getattr(os, call.removeprefix("os."))
    failed = 0
    for nth in range(1, 9):
        calls = iter(range(1, 100))

        def failing(*args, nth=nth, calls=calls):
            if next(calls) == nth:
                raise OSError(errno.EIO, "Input/output error")
            return plain(*args)

        with monkeypatch.context() as patch:
            patch.setattr(call, failing)
            try:
                save(tmp_path, 10, keep=1)
            except checkpoint.CheckpointError:
                failed += 1
        assert checkpoint.newest(tmp_path) == Newest(10, ())
        assert set(content(tmp_path, 10)) == set(TENSORS)
    assert failed >= 3
    save(tmp_path, 10, keep=1)
    assert names(tmp_path) == ["step-00000010"]


def test_a_former_one_is_set_aside_like_any_other(tmp_path):
    """A saver died between the two renames of a second save."""
    save(tmp_path, 10)
    os.rename(tmp_path / "step-00000010", tmp_path / "former-step-00000010")
    assert checkpoint.newest(tmp_path).step == 10
    assert folders.set_aside(tmp_path, after=0) == [10]
    assert names(tmp_path) == ["superseded-step-00000010"]


def test_only_what_the_dead_left_is_cleared(tmp_path):
    """Two runs that share a folder by mistake do not take each other's files away."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    for process in (child, os.getppid(), os.getpid()):
        (tmp_path / f".saving-{process}-step-00000010").mkdir()
        (tmp_path / f".saving-{process}-latest").touch()
    save(tmp_path, 20)
    theirs = [f".saving-{os.getppid()}-latest", f".saving-{os.getppid()}-step-00000010"]
    assert names(tmp_path) == [*theirs, "step-00000020"]


def test_superseded_ones_are_set_aside_and_not_lost(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, keep=3)
    assert folders.set_aside(tmp_path, after=10) == [20, 30]
    assert folders.steps(tmp_path) == [10]
    save(tmp_path, 20, keep=3)
    assert folders.set_aside(tmp_path, after=10) == [20]
    assert names(tmp_path) == [
        "step-00000010", "superseded-step-00000020", "superseded-step-00000020-2", "superseded-step-00000030",
    ]  # fmt: skip


def test_nothing_saved(tmp_path):
    assert checkpoint.newest(tmp_path / "none") == Newest(None, ())


def test_one_of_an_older_release_is_named_as_such(tmp_path):
    old = tmp_path / "step-00000010"
    old.mkdir()
    (old / "meta.json").write_text("{}")
    (old / "tensors.safetensors").write_bytes(b"")
    found = checkpoint.newest(tmp_path)
    assert found == Newest(None, (f"{old} is of an older release; this one does not read its format",))
    with pytest.raises(RunError, match="of an older release"):
        checkpoint.load(old)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model/a", "exp_avg/a"])
def test_what_is_not_finite_pushes_nothing_out(tmp_path, name, bad):
    save(tmp_path, 10, keep=1)
    worthless = {key: tensor.clone() for key, tensor in TENSORS.items()}
    worthless[name].view(-1)[-2] = bad
    worthless |= {"count": torch.ones(1, dtype=torch.int64)}
    for step in (10, 20):
        with pytest.raises(checkpoint.NotFinite, match=f"^{name} is not finite$"):
            save(tmp_path, step, worthless, keep=1)
        assert names(tmp_path) == ["step-00000010"]
        assert checkpoint.newest(tmp_path) == Newest(10, ())


def test_large_numbers_are_finite_though_their_sum_is_not(tmp_path):
    large = {"w": torch.full((5,), 3e38), "half": torch.full((9,), 6e4, dtype=torch.float16)}
    save(tmp_path, 10, large)
    assert torch.equal(content(tmp_path, 10)["w"], large["w"])
    large["half"][7] = float("-inf")
    with pytest.raises(checkpoint.NotFinite, match=r"^half is not finite$"):
        save(tmp_path, 20, large)


def test_everything_is_on_the_disk_before_a_checkpoint_is_in_place(tmp_path, monkeypatch):
    """Files whole, then the folder that lists them, then the rename, then the folder that it changed; the pointer."""
    done = []
    fsync, rename = os.fsync, os.rename

    def where(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            return "checkpoints" if path == str(tmp_path) else "aside"
        return os.path.basename(path).replace(str(os.getpid()), "PID")

    def recorded(descriptor):
        about = os.fstat(descriptor)
        done.append((where(descriptor), about.st_size if not os.path.isdir(f"/proc/self/fd/{descriptor}") else None))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(os, "rename", lambda here, there: (done.append(("rename", None)), rename(here, there)))
    target = save(tmp_path, 10)
    assert done[0] == ("rank-00000.safetensors", (target / "rank-00000.safetensors").stat().st_size)
    together = {
        ("manifest.json", (target / "manifest.json").stat().st_size),
        (".saving-PID-latest", (tmp_path / "latest").stat().st_size),
        ("aside", None),
    }
    assert set(done[1:4]) == together
    assert done[4:] == [
        ("rename", None),
        ("checkpoints", None),
        ("rename", None),
    ]


def truncate(file):
    os.truncate(file, os.path.getsize(file) - 1)


def flip(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, os.remove], ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json"])
def test_damage_is_named_and_what_a_look_finds_passed_over(tmp_path, damage, name):
    save(tmp_path, 10)
    damaged = save(tmp_path, 20) / name
    damage(damaged)
    if damage is flip and name == "manifest.json":
        damaged.write_text(json.dumps(["no", "checkpoint"]))
    with pytest.raises(RunError, match=name) as told:
        checkpoint.load(damaged.parent)
    assert str(told.value).startswith(str(damaged)) and "char" not in str(told.value)
    found = checkpoint.newest(tmp_path)
    if damage is flip and name != "manifest.json":
        assert found.step == 20, "checksums are taken when it is read; the ranks then go on to the next, see test_loop"
        assert checkpoint.newest(tmp_path, before=20) == Newest(10, ())
    else:
        assert found.step == 10 and str(damaged) in found.skipped[0]


def test_no_flipped_byte_of_the_tensors_goes_unseen(tmp_path):
    where = save(tmp_path, 10)
    file = where / "rank-00000.safetensors"
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")  # what comes before is for other programs; we go by the manifest
    assert load_file(file).keys() == {"model/a@0,0", "exp_avg/a@0"}
    for place in range(begin, len(whole)):
        for bit in (1, 4, 128):
            content = bytearray(whole)
            content[place] ^= bit
            file.write_bytes(content)
            with pytest.raises(RunError, match="checksum"):
                checkpoint.load(where)


def test_no_flipped_bit_of_the_manifest_goes_unseen(tmp_path):
    file = save(tmp_path, 10) / "manifest.json"
    whole = file.read_bytes()
    for place in range(len(whole)):
        for bit in (1, 4, 128):
            content = bytearray(whole)
            content[place] ^= bit
            file.write_bytes(content)
            with pytest.raises(RunError):
                checkpoint.load(file.parent)


@pytest.mark.parametrize("content", ["5", "null", "[]", "{}", '"format crc32"', "\udc80", '{"crc32": 1}'])
def test_a_manifest_that_is_none(tmp_path, content):
    file = save(tmp_path, 10) / "manifest.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    assert checkpoint.newest(tmp_path).step is None


def test_a_manifest_of_a_later_version_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.manifest, "VERSION", 2)
    where = save(tmp_path, 10)
    monkeypatch.undo()
    with pytest.raises(RunError, match="of version 2 of the format; this release reads 1"):
        checkpoint.load(where)


DYING = """
    import os, sys
    from pathlib import Path
    import torch
    from test_checkpoint import saver

    folder, step, fatal = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    seen = 0
    def deadly(event, args):
        global seen
        if event in ("open", "shutil.rmtree") or event.startswith("os."):
            if str(folder) in str(args) or args and isinstance(args[0], int):
                seen += 1
                if seen == fatal:
                    os._exit(9)
    one = saver(folder, {"w": torch.full((3,), 20.0)}, keep=1)
    sys.addaudithook(deadly)
    one.save(step, {"step": step})
    assert one.wait().error is None
"""


@pytest.mark.parametrize("step", [20, 10], ids=["another step", "the same step"])
def test_death_at_every_file_operation(tmp_path, step):
    """A saver dies at its first, second, … operation: the old or the new one loads, and a later save succeeds."""
    folder = tmp_path / "checkpoints"
    outcomes = []
    for fatal in range(1, 100):
        shutil.rmtree(folder, ignore_errors=True)
        save(folder, 10, {"w": torch.full((3,), 10.0)}, keep=1)
        done = forked(DYING, folder, step, fatal)
        found = checkpoint.newest(folder)
        assert found.step in (10, step) and not found.skipped, (fatal, found)
        tensors, meta = checkpoint.load(folders.path(folder, found.step))
        value = float(tensors["w"][0])
        assert meta["step"] == found.step and value in (10.0, 20.0)
        assert step == 10 or value == found.step
        pointer = (folder / "latest").read_text().strip()
        assert pointer in (f"step-{10:08d}", f"step-{step:08d}") and (step == 10 or pointer <= f"step-{found.step:08d}")
        save(folder, 30, keep=1)
        assert names(folder) == ["step-00000030"]
        outcomes.append(value)
        if done == 0:
            break
    assert done == 0 and outcomes[-1] == 20 and 10 in outcomes and len(outcomes) > 8
    assert outcomes == sorted(outcomes)


def forked(source, *words):
    """Run a script in a fork of this process: torch is loaded already. Returns 0, or 9 where it died."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sys.argv = ["script", *map(str, words)]
            sys.modules["test_checkpoint"] = sys.modules[__name__]
            exec(compile(textwrap.dedent(source), "script", "exec"), {"__name__": "__main__"})
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), code
    return code


FULL = [
    "tensorfile._put",
    "tensorfile._reserve",
    "os.fsync",
    "os.fdatasync",
    "os.rename",
    "manifestfile.write",
    "os.mkdir",
]


@pytest.mark.parametrize("call", FULL)
def test_a_full_disk_keeps_the_old_one_and_leaves_nothing(tmp_path, monkeypatch, call):
    """Each call in turn, and each time it is made."""
    monkeypatch.setattr(tensorfile, "_FLUSH_EVERY", 8)
    target = {"tensorfile": tensorfile, "os": os, "manifestfile": manifestfile}[call.partition(".")[0]]
    name = call.partition(".")[2]
    plain = getattr(target, name)
    failed = 0
    for nth in range(1, 30):
        saved = False
        shutil.rmtree(tmp_path)
        save(tmp_path, 10)
        calls = iter(range(1, 1000))

        def full(*args, nth=nth, calls=calls, **kwargs):
            if next(calls) == nth:
                raise OSError(errno.ENOSPC, "No space left on device")
            return plain(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(target, name, full)
            try:
                save(tmp_path, 20)
                saved = True
            except checkpoint.CheckpointError as error:
                assert "No space left" in str(error) and str(tmp_path / "step-00000020") in str(error)
                failed += 1
        if next(calls) <= nth:
            break
        newest = checkpoint.newest(tmp_path)
        # Past the rename it is in place, and so it is told; a folder that is there is made in vain.
        assert newest.step == 20 if saved else 10
        assert set(names(tmp_path)) <= {"step-00000010", "step-00000020"}
        save(tmp_path, 30)
        assert folders.steps(tmp_path)[-1] == 30
    assert failed == {"tensorfile._put": 3, "os.fsync": 4, "os.fdatasync": 2}.get(call, 1)


@pytest.mark.parametrize(
    ("call", "nth", "said"),
    [
        ("os.fsync", 5, "{folder} could not be flushed, so that a loss of power may undo it: Input/output error"),
        ("os.rename", 2, "{folder}/latest does not name it: Input/output error"),
        ("os.rename", 3, "{folder}/step-00000010 could not be removed"),
    ],
    ids=["flush", "pointer", "prune"],
)
def test_what_fails_after_a_checkpoint_is_in_place_is_told_as_that(tmp_path, monkeypatch, call, nth, said):
    save(tmp_path, 10)
    plain, calls = getattr(os, call.removeprefix("os.")), iter(range(1, 100))

    def failing(*args):
        if next(calls) == nth:
            raise OSError(errno.EIO, "Input/output error")
        return plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(call, failing)
        one = saver(tmp_path, keep=1)
        one.save(20, {"step": 20})
        ended = one.wait()
    assert (ended.error, ended.but) == (
        None,
        f"{tmp_path}/step-00000020 is in place, but {said.format(folder=tmp_path)}",
    )
    assert checkpoint.newest(tmp_path) == Newest(20, ()) and set(content(tmp_path, 20)) == set(TENSORS)
    assert not list(tmp_path.glob(".saving-*"))
    save(tmp_path, 30, keep=1)
    assert names(tmp_path) == ["step-00000030"]
