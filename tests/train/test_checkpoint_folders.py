"""Which checkpoints are kept, which is pointed to, and what becomes of former ones. One rank."""

from __future__ import annotations

import errno
import os
import re
import time

import pytest
import torch
from tests.train.saving import TENSORS, content, names, save, saver

from meshwright.spec.errors import UserError
from meshwright.train import checkpoint, folders, tensorfile
from meshwright.train.checkpoint import Newest


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


def test_a_former_one_stays_until_its_successor_is_on_the_disk(tmp_path, monkeypatch):
    """The folder could not be flushed after the renames of a second save: a loss of power may undo either of them."""
    save(tmp_path, 10, keep=1)
    done, refused = [], {"fsync": True}
    fsync, rename = os.fsync, os.rename

    def flushed(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):
            done.append("flush")
            if refused["fsync"]:
                raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    def renamed(here, there):
        done.append(here.name)
        rename(here, there)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    assert save(tmp_path, 10, keep=1)
    former = "former-step-00000010"
    assert names(tmp_path) == [former, "step-00000010"]
    with pytest.raises(checkpoint.CheckpointError, match="Input/output error"):
        save(tmp_path, 20, keep=1)
    assert names(tmp_path) == [former, "step-00000010"] and former not in done
    refused["fsync"], done[:] = False, []
    save(tmp_path, 20, keep=1)
    assert done[:2] == ["flush", former]
    assert names(tmp_path) == ["step-00000020"]


def test_a_former_one_is_set_aside_like_any_other(tmp_path):
    """A saver died between the two renames of a second save."""
    save(tmp_path, 10)
    os.rename(tmp_path / "step-00000010", tmp_path / "former-step-00000010")
    assert checkpoint.newest(tmp_path).step == 10
    assert folders.set_aside(tmp_path, after=0) == [10]
    assert names(tmp_path) == ["superseded-step-00000010"]


def test_of_a_link_only_the_link_is_removed(tmp_path):
    """Somebody has moved checkpoints to a larger disk, and a killed saver had begun to remove one."""
    folder, other = tmp_path / "checkpoints", tmp_path / "other disk"
    other.mkdir()
    for step in (10, 20):
        os.rename(save(folder, step), other / str(step))
        os.symlink(other / str(step), folders.place(folder, step))
    assert set(content(folder, 10)) == set(TENSORS)
    save(folder, 10, keep=5)
    assert not folders.place(folder, 10).is_symlink()
    os.symlink(other, folder / f".saving-{os.getpid()}-old-step-00000005")
    save(folder, 30, keep=1)
    assert names(folder) == ["step-00000030"]
    assert all(sorted(os.listdir(other / step)) == ["manifest.json", "rank-00000.safetensors"] for step in ("10", "20"))


def test_what_cannot_be_set_aside_is_a_mistake_in_words(tmp_path, monkeypatch):
    save(tmp_path, 10)

    def refused(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(UserError, match=re.escape(f"set aside in {tmp_path} (Read-only file system); let it be")):
        folders.set_aside(tmp_path, after=5)
    assert names(tmp_path) == ["step-00000010"]


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
