"""A timeline as a trace, for https://ui.perfetto.dev or chrome://tracing. A unit of time is a millisecond there.

Each rank is a process. One of its threads computes; what runs beside it must not share a thread, so each channel that
the rank sends over has one, and its reductions have. Numbers start from 1: Perfetto takes 0 for an idle processor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.cli.timelines import label
from meshwright.schedule.actions import Schedule, partner, words
from meshwright.schedule.timeline import Span, Timeline
from meshwright.spec.errors import UserError

UNIT = 1000  # microseconds, which times in a trace are in


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the trace of a timeline, one event a line. Raises UserError where it cannot be written."""
    content = trace(timeline)
    events = ",\n".join(map(json.dumps, content.pop("traceEvents")))
    head = json.dumps(content)[:-1]
    try:
        path.write_text(f'{head}, "traceEvents": [\n{events}\n]}}\n', encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--out {path}: cannot be written ({error.strerror}); name a file in a folder that is"
        ) from None


def trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as data."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {"schedule": timeline.schedule.name, "unit of time": "1 ms"},
        "traceEvents": list(_events(timeline)),
    }


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    schedule = timeline.schedule
    for rank in range(schedule.pipeline_ranks):
        yield _named("process_name", rank, 1, f"rank {rank}")
        threads = {"computing": 1}
        for span in (*timeline.ranks[rank], *timeline.beside[rank]):
            name = _thread(schedule, span)
            thread = threads.setdefault(name, len(threads) + 1)
            yield _event(schedule, rank, thread, span)
        for name, thread in threads.items():
            yield _named("thread_name", rank, thread, name)


def _thread(schedule: Schedule, span: Span) -> str:
    action = span.action
    if action.kind == "reduce":
        return "reductions"
    if action.kind not in ("send_activations", "send_gradients"):
        return "computing"
    return f"{action.kind.partition('_')[2]} to rank {schedule.stages[partner(action).stage]}"


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank + 1, "tid": thread, "args": {"name": name}}


def _event(schedule: Schedule, rank: int, thread: int, span: Span) -> dict[str, Any]:
    action, start, end = span
    return {
        "ph": "X",
        "name": label(schedule, rank, action),
        "cat": action.kind,
        "pid": rank + 1,
        "tid": thread,
        "ts": start * UNIT,
        "dur": (end - start) * UNIT,
        "args": {"action": words(action), "stage": action.stage, "micro_batch": action.micro},
    }
