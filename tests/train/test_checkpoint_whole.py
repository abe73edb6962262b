"""Checkpoints are whole or absent, whatever dies or fills up. One rank; two are in test_checkpoint_ranks.py."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from tests.train.saving import TENSORS, content, names, save, saver

from meshwright.spec.errors import RunError
from meshwright.train import checkpoint, folders, tensorfile
from meshwright.train.checkpoint import Newest


@pytest.mark.parametrize("step", [20, 10], ids=["another step", "the same step"])
def test_each_thing_is_on_the_disk_before_the_next_relies_on_it(tmp_path, monkeypatch, step):
    """Files whole, then the folder that lists them, then its rename; what that changed, then the pointer; what that
    changed, and only then the removal of what the pointer named before."""
    save(tmp_path, 10, keep=1)
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

    def renamed(here, there):
        done.append((f"{here.name} → {there.name}".replace(str(os.getpid()), "PID"), None))
        rename(here, there)

    monkeypatch.setattr(os, "rename", renamed)
    target = save(tmp_path, step, keep=1)
    assert done[0] == ("rank-00000.safetensors", (target / "rank-00000.safetensors").stat().st_size)
    together = {
        ("manifest.json", (target / "manifest.json").stat().st_size),
        (".saving-PID-latest", (tmp_path / "latest").stat().st_size),
        ("aside", None),
    }
    assert set(done[1:4]) == together
    old = "former-step-00000010" if step == 10 else "step-00000010"
    assert [what for what, _ in done[4:]] == [
        *(["step-00000010 → former-step-00000010"] if step == 10 else []),
        f".saving-PID-{target.name} → {target.name}",
        "checkpoints",
        ".saving-PID-latest → latest",
        "checkpoints",
        f"{old} → .saving-PID-old-{old}",
    ]


DYING = """
    import os, sys
    from pathlib import Path
    import torch
    from tests.train.saving import saver

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
    "os.mkdir",
    "Path.write_text",
]


@pytest.mark.parametrize("call", FULL)
def test_a_full_disk_keeps_the_old_one_and_leaves_nothing(tmp_path, monkeypatch, call):
    """Each call in turn, and each time it is made."""
    monkeypatch.setattr(tensorfile, "_FLUSH_EVERY", 8)
    target = {"tensorfile": tensorfile, "os": os, "Path": Path}[call.partition(".")[0]]
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
    # Both the manifest and the pointer are text.
    assert failed == {"tensorfile._put": 3, "os.fsync": 4, "os.fdatasync": 2, "Path.write_text": 2}.get(call, 1)


@pytest.mark.parametrize(
    ("call", "nth", "said"),
    [
        ("os.fsync", 5, "{folder} could not be flushed, so that a loss of power may undo it: Input/output error"),
        ("os.rename", 2, "{folder}/latest does not name it: Input/output error"),
        (
            "os.fsync",
            6,
            "{folder} could not be flushed, so that after a loss of power latest may name the one before: "
            "Input/output error",
        ),
        ("os.rename", 3, "{folder}/step-00000010 could not be removed"),
    ],
    ids=["flush", "pointer", "pointer's flush", "prune"],
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
    assert folders.steps(tmp_path) == [10, 20], "nothing is removed that the pointer may name"
    assert not list(tmp_path.glob(".saving-*"))
    save(tmp_path, 30, keep=1)
    assert names(tmp_path) == ["step-00000030"]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_that_is_not_as_long_as_what_was_written_makes_no_checkpoint(tmp_path, monkeypatch, change):
    """A shared folder may show another rank's file as it was, or a disk may lose its end."""
    save(tmp_path, 1)
    written = tensorfile.write

    def otherwise(path, *args):
        found = written(path, *args)
        os.truncate(path, os.path.getsize(path) + change)
        return found

    monkeypatch.setattr(tensorfile, "write", otherwise)
    with pytest.raises(RunError, match=r"rank-00000\.safetensors is not as long as what was written"):
        save(tmp_path, 2)
    assert checkpoint.newest(tmp_path) == Newest(1, ()) and names(tmp_path) == ["step-00000001"]
