"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.spec.errors import UserError
from meshwright.train.lock import locked

HOLD = """
import pathlib, subprocess, sys
from meshwright.train.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)  # as a rank that outlives its launcher
    print(child.pid, flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_told_who_holds_it(tmp_path: Path) -> None:
    said = rf"out: another run is in .*run: process {os.getpid()} on \S+; wait for its end, stop it, or name another"
    with locked(tmp_path / "run"), pytest.raises(UserError, match=said), locked(tmp_path / "run"):
        pass
    with locked(tmp_path / "run"):
        pass


def test_the_lock_of_a_killed_run_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(UserError, match=f"process {holder.pid} on"), locked(tmp_path / "run"):
                pass
            holder.kill()
            holder.wait()
            assert (tmp_path / "run" / ".lock").exists()
            with locked(tmp_path / "run"):
                assert re.match(rf"process {os.getpid()} on \S+\n$", (tmp_path / "run" / ".lock").read_text())
        finally:
            os.kill(child, 9)


def test_what_was_made_and_is_empty_is_removed(tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "b"):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with locked(tmp_path / "mine"):
        pass
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    with locked(tmp_path / "a" / "b"):
        (tmp_path / "a" / "kept").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "kept", "mine"]


def test_a_file_that_was_removed_meanwhile_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking, the former holder ends: the file that was opened is of no folder any more."""
    real, removed = fcntl.flock, []

    def late(file: int, how: int) -> None:
        if not removed:
            removed.append(file)
            os.unlink(tmp_path / ".lock")
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path), pytest.raises(UserError, match="another run"), locked(tmp_path):
        pass
    assert removed


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with locked(tmp_path), locked(tmp_path):
        (tmp_path / "kept").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"out: .* cannot be written"), locked(tmp_path / "file" / "run"):
        pass
