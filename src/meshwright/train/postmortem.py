"""What the launcher says about a run that failed: which rank was first, what it was doing, who waited for whom.

The evidence is what a dead rank leaves: its exit status, its error file, its black box and its log.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.comm.blackbox import Record, box_path, read
from meshwright.spec.exits import WRONG_INPUT

TAIL_LINES = 12

_ECHO_SIGNALS = (signal.SIGABRT, signal.SIGTERM, signal.SIGINT)
"""Signals by which a rank may die because of another's failure; any other (SIGKILL, SIGSEGV) has a cause of its own."""


@dataclass(frozen=True)
class Evidence:
    """Where the ranks of one launch leave their traces."""

    logs: Path
    """Logs and error files: inside the run's folder, kept when the run fails."""
    boxes: Path
    """Black boxes: memory-mapped, so on a local disk; removed with the launcher."""

    def of_start(self, number: int) -> Evidence:
        """Where the ranks of start `number` (from 0) leave theirs: not among those of the starts before."""
        if not number:
            return self
        started = Evidence(self.logs / f"restart-{number}", self.boxes / f"restart-{number}")
        for folder in (started.logs, started.boxes):
            folder.mkdir(parents=True, exist_ok=True)
        return started

    def error_file(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.error.json"

    def log(self, rank: int) -> Path | None:
        """The file with the rank's output; None for rank 0, whose output is the command's own."""
        return self.logs / f"rank{rank}.log" if rank else None

    def error(self, rank: int) -> dict[str, Any]:
        """What the rank recorded with `record_failure`, or {}."""
        try:
            recorded = json.loads(self.error_file(rank).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return recorded.get("meshwright", {}) if isinstance(recorded, dict) else {}

    def box(self, rank: int) -> Record | None:
        """What the rank was doing last; None if it never came so far as to open its box."""
        return read(box_path(self.boxes, rank))

    def tail(self, rank: int) -> list[str]:
        path = self.log(rank)
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path else []
        except OSError:
            return []
        return [line for line in lines if line.strip()][-TAIL_LINES:]


@dataclass(frozen=True)
class Failure:
    """The end of one rank that did not end in order."""

    rank: int
    code: int | None
    """Exit status, negative for a signal; None for a rank that recorded an error and has not left yet."""
    seen: float
    """When its end was noticed, seconds since the epoch."""
    error: Mapping[str, Any] = field(default_factory=dict)

    @property
    def by_signal(self) -> int | None:
        return -self.code if self.code is not None and self.code < 0 else None

    @property
    def wrong_input(self) -> bool:
        return self.error.get("kind") == "user" or (not self.error and self.code == WRONG_INPUT)

    @property
    def for_good(self) -> bool:
        """Whether ranks that are started again would fail in the same way."""
        return self.wrong_input or self.error.get("kind") == "again"

    @property
    def echo(self) -> bool:
        """Whether it only says that another rank is gone."""
        return bool(self.error.get("lost_peer"))

    def order(self) -> tuple[int, float]:
        """Sorts the first failure first: by how surely it has a cause of its own, then by time."""
        if self.by_signal and self.by_signal not in _ECHO_SIGNALS:
            return 0, self.seen
        if self.error:
            return (3 if self.echo else 1), float(self.error.get("time", self.seen))
        return 2, self.seen


@dataclass(frozen=True)
class Failed:
    """A failed run, as it was when the first failure was noticed: before the other ranks were ended."""

    failures: Sequence[Failure]
    boxes: Mapping[int, Record | None]
    finished: frozenset[int]
    """Ranks that had ended in order before."""

    @property
    def first(self) -> Failure:
        return min(self.failures, key=Failure.order)

    def tell(self, evidence: Evidence, *, debug: bool = False) -> str:
        """The report, without a trailing newline. Writes the traceback of an unexpected error beside the logs."""
        first = self.first
        if first.wrong_input and first.error and not debug:
            return f"meshwright: error: {first.error['message']}"
        step = first.error.get("step")
        lines = [f"meshwright: rank {first.rank} {_end(first)} {doing(self.boxes.get(first.rank), step=step)}"]
        lines += [f"  {line}" for line in str(first.error.get("message", "")).splitlines()]
        lines += self._others(first)
        trace = first.error.get("traceback")
        if trace and debug:
            lines += ["", *trace.rstrip().splitlines()]
        elif trace and first.error.get("kind") == "bug":
            path = evidence.logs / f"rank{first.rank}.traceback.txt"
            with contextlib.suppress(OSError):  # a full disk must not hide the report
                path.write_text(trace, encoding="utf-8")
                lines.append(f"  traceback: {path}")
        if tail := evidence.tail(first.rank):
            lines += [f"  last lines of {evidence.log(first.rank)}:", *(f"    {line}" for line in tail)]
        elif evidence.logs.is_dir() and any(p.stat().st_size and p.suffix != ".json" for p in evidence.logs.iterdir()):
            # What is empty, and the ranks' own notes of their ends, are taken away with the folder.
            lines.append(f"  logs: {evidence.logs}")
        return "\n".join(lines)

    def _others(self, first: Failure) -> list[str]:
        said: dict[str, list[int]] = {}
        own_cause = {f.rank: f for f in self.failures if f is not first and f.error and not f.echo}
        for rank, box in self.boxes.items():
            if rank == first.rank:
                continue
            if rank in self.finished:
                what = "had finished"
            elif rank in own_cause:
                what = f"failed too: {own_cause[rank].error['message']}"
            else:
                what = doing(box, other=True)
            said.setdefault(what, []).append(rank)
        return [f"  {_ranks(ranks)} {_agree(what, len(ranks))}" for what, ranks in said.items()]


def doing(box: Record | None, *, step: int | None = None, other: bool = False) -> str:
    """What a rank was doing, to go on from "rank 1 was killed": "at step 7 while in all_reduce zero.reduce (dp)".

    `other`: to go on from "rank 0", or from "ranks 0–3" after `_agree`: "{was} waiting in … at step 7".
    """
    if box is None:
        return "{was} starting" if other else "while it was starting"
    at = f"at step {box.step if step is None else step}"
    what = f"{box.op} {box.reason} ({box.axis})"
    if box.state == "in":
        return f"{{was}} waiting in {what} {at}" if other else f"{at} while in {what}"
    place = box.note or (f"after {what}" if box.state == "done" else "before its first collective")
    return f"{{was}} {at}, {place}" if other else f"{at}, {place}"


def _end(failure: Failure) -> str:
    if failure.by_signal:
        try:
            return f"was killed by {signal.Signals(failure.by_signal).name}"
        except ValueError:
            return f"was killed by signal {failure.by_signal}"
    if failure.error or failure.code is None:
        return "failed"
    return f"exited with code {failure.code}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return "ranks " + ", ".join("–".join(map(str, span)) for span in spans)


def _agree(what: str, count: int) -> str:
    return what.replace("{was}", "was" if count == 1 else "were", 1)
