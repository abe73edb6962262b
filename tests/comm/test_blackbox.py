from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.comm.blackbox import BlackBox, box_path, read
from meshwright.spec.errors import UserError

WRITER = """
import os, sys
from meshwright.comm.blackbox import BlackBox
box = BlackBox.from_environment(3)
box.step = 41
box.enter("all_gather", "dp", "zero.gather"); box.leave()
box.step = 42
box.enter("all_reduce", "dp+cp", "zero.reduce")
print(os.getpid(), flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["os._exit(7)", "os.kill(os.getpid(), 9)", "os.abort()"])
def test_outlives_its_writer(tmp_path: Path, end: str) -> None:
    writer = subprocess.run(
        [sys.executable, "-c", WRITER.format(end=end)],
        env=os.environ | {"MESHWRIGHT_BLACKBOX": str(tmp_path)},
        stdout=subprocess.PIPE,
        check=False,
    )
    assert writer.returncode in (7, -signal.SIGKILL, -signal.SIGABRT)
    record = read(box_path(tmp_path, 3))
    assert record is not None
    assert (record.pid, record.rank, record.step, record.sequence) == (int(writer.stdout), 3, 42, 2)
    assert (record.state, record.op, record.axis, record.reason) == ("in", "all_reduce", "dp+cp", "zero.reduce")


def test_states(tmp_path: Path) -> None:
    path = tmp_path / "box"
    box = BlackBox(path, rank=1)
    assert (read(path).state, read(path).reason, read(path).note) == ("new", "", "")
    first = box.enter("all_reduce", "dp", "a")
    second = box.enter("send", "pp", "b")
    assert (first, second, read(path).state, read(path).op) == (1, 2, "in", "send")
    box.leave()
    assert (read(path).state, read(path).reason) == ("done", "b")
    box.enter_again(first, "all_reduce", "dp", "a")  # waiting for an earlier one
    assert (read(path).sequence, read(path).state, read(path).reason, box.sequence) == (1, "in", "a", 2)


def test_a_note_holds_until_the_next_collective(tmp_path: Path) -> None:
    path = tmp_path / "box"
    box = BlackBox(path)
    box.note("loading data")
    assert read(path).note == "loading data"
    box.enter("broadcast", "world", "run")
    assert read(path).note == ""
    box.note("forward")
    assert read(path).note == "forward"


def test_work_without_communication_can_be_seen_to_advance(tmp_path: Path) -> None:
    path = tmp_path / "box"
    box = BlackBox(path)
    assert read(path).ticks == 0
    box.note("saving a checkpoint")
    box.tick()
    box.tick()
    assert (read(path).ticks, read(path).note) == (3, "saving a checkpoint")


def test_long_texts_are_cut_between_fields(tmp_path: Path) -> None:
    path = tmp_path / "box"
    box = BlackBox(path)
    box.enter("o" * 99, "a" * 99, "ü" * 99)
    record = read(path)
    assert (record.op, record.axis, record.reason) == ("o" * 24, "a" * 32, "ü" * 52)


def test_truncated_file_reads_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "box"
    box = BlackBox(path, rank=5)
    box.step = 9
    box.enter("all_reduce", "dp", "zero.reduce")
    whole = path.read_bytes()
    cut = tmp_path / "cut"
    for size in range(len(whole) + 1):
        cut.write_bytes(whole[:size])
        record = read(cut)
        assert (record is None) == (size < 8)
        if size >= 24:
            assert (record.rank, record.step) == (5, 9)


def test_nothing_readable_is_none(tmp_path: Path) -> None:
    assert read(tmp_path / "missing") is None
    (tmp_path / "other").write_bytes(b"x" * 500)
    assert read(tmp_path / "other") is None


def test_anonymous_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHWRIGHT_BLACKBOX", raising=False)
    assert BlackBox.from_environment(0).enter("send", "pp", "r") == 1


def test_missing_folder_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHWRIGHT_BLACKBOX", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"MESHWRIGHT_BLACKBOX: .*nowhere.* cannot be written"):
        BlackBox.from_environment(0)
