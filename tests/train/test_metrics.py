"""metrics.jsonl and the event files: whole, without repeats, and never the end of a run."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.train.metrics import Metrics


def lines(folder: Path) -> list[dict[str, Any]]:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=no_constant) for line in text.splitlines()]


def record(folder: Path, start: int, stop: int, value: float = 1.0) -> None:
    with Metrics(folder, enabled=True, start=start) as metrics:
        for step in range(start + 1, stop + 1):
            metrics.write(step, "train", {"loss": value})


def events(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars(tag)]


def test_lines(tmp_path: Path) -> None:
    with Metrics(tmp_path / "run", enabled=True, start=0) as metrics:
        metrics.write(1, "train", {"loss": 2.5, "tokens": 3, "flops": None})
        metrics.write(1, "validation", {"loss": float("nan"), "norm": float("inf")})
        assert lines(tmp_path / "run") == [  # flushed: there before the run ends
            {"step": 1, "split": "train", "loss": 2.5, "tokens": 3, "flops": None},
            {"step": 1, "split": "validation", "loss": None, "norm": None},
        ]


def test_resuming_drops_later_lines(tmp_path: Path) -> None:
    record(tmp_path, 0, 5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "split": "train", "lo')
    record(tmp_path, 3, 6, value=2.0)
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [
        (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0),
    ]  # fmt: skip
    assert events(tmp_path, "train/loss") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]
    assert not list(tmp_path.glob("*.tmp"))


def test_resuming_without_a_file(tmp_path: Path) -> None:
    record(tmp_path, 3, 4)
    assert [line["step"] for line in lines(tmp_path)] == [4]


def test_garbage_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1}\n[]\n{"a": 1}\n\xff\n{"step": "x"}\n{"step": 2}\n{"step": 3}'
    )
    record(tmp_path, 5, 5)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_fresh_run_keeps_the_old_file(tmp_path: Path) -> None:
    record(tmp_path, 0, 3)
    record(tmp_path, 0, 1, value=7.0)
    assert [line["loss"] for line in lines(tmp_path)] == [7.0]
    assert len((tmp_path / "metrics.jsonl.old").read_text().splitlines()) == 3


def test_disabled_touches_nothing(tmp_path: Path) -> None:
    with Metrics(tmp_path / "run", enabled=False, start=0) as metrics:
        metrics.write(1, "train", {"loss": 1.0})
    assert not (tmp_path / "run").exists()


class Full(io.FileIO):
    """A file on a disk with room for 9 more bytes, then for none, until `room` is made."""

    left: int | None = 9

    def write(self, content: bytes) -> int:
        if self.left is None:
            return super().write(content)
        if not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(content[: self.left])
        self.left = 0
        return written


def test_a_full_disk_warns_once_and_leaves_whole_lines(tmp_path: Path) -> None:
    told: list[str] = []
    with Metrics(tmp_path, enabled=True, start=0, warn=told.append) as metrics:
        metrics.write(1, "train", {"loss": 1.0})
        metrics._lines.close()
        metrics._lines = Full(tmp_path / "metrics.jsonl", "a")
        metrics.write(2, "train", {"loss": 1.0})
        metrics.write(3, "train", {"loss": 1.0})
        metrics._lines.left = None
        metrics.write(4, "train", {"loss": 1.0})
    file = tmp_path / "metrics.jsonl"
    assert told == [f"warning: {file} cannot be written, metrics are incomplete: no space left on device"]
    assert [line["step"] for line in lines(tmp_path)] == [1, 4]
    assert [step for step, _ in events(tmp_path, "train/loss")] == [1, 2, 3, 4]  # the other file goes on


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.warns(RuntimeWarning, match="incomplete") as told,
        Metrics(tmp_path / "file", enabled=True, start=0) as metrics,
    ):
        metrics.write(1, "train", {"loss": 1.0})
    assert len(told) == 1
