"""Traces of all ranks as one file that ui.perfetto.dev and chrome://tracing open (the Trace Event Format).

A process for each rank. Its first track is what it computes, its second what it waits for, and those behind it the
collectives under way, each on the first track that is free. A forward or backward is drawn from when its message was
there; the wait before it stands on the second track.
"""

from __future__ import annotations

import contextlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.comm.trace import UNDER_WAY, RankTrace, Span

COMPUTING, WAITING, COMMUNICATION = 0, 1, 2
TRACKS = ("computing", "waiting", "communication")
Event = dict[str, Any]


def write(path: Path, ranks: Sequence[RankTrace]) -> None:
    """Write the file, whole or not at all. Raises OSError."""
    draft = path.with_name(f"{path.name}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            json.dump({"traceEvents": [e for one in ranks for e in events(one)], "displayTimeUnit": "ms"}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def name(one: RankTrace) -> str:
    """ "rank 3: pp 1, dp 0"."""
    place = ", ".join(f"{axis} {at}" for axis, at in one.coords.items())
    return f"rank {one.rank}: {place}" if place else f"rank {one.rank}"


def events(one: RankTrace) -> Iterator[Event]:
    """Those of one rank."""
    yield _about("process_name", one.rank, 0, name=name(one))
    yield _about("process_sort_index", one.rank, 0, sort_index=one.rank)
    several = any(span.args.get("stage") for span in one.spans)
    free: list[float] = []  # when each track of communication is
    messages = [span.end for span in one.spans if span.category == "wait" and span.args.get("op") in ("send", "recv")]
    for track in range(COMMUNICATION):
        yield from _track(one.rank, track)
    for span in one.spans:
        begin, track = span.begin, COMPUTING
        if span.category == UNDER_WAY:
            lane = next((place for place, end in enumerate(free) if end <= begin), len(free))
            track = COMMUNICATION + lane
            if lane == len(free):
                free.append(0.0)
                yield from _track(one.rank, track)
            free[lane] = span.end
        elif span.category in ("issue", "wait"):
            track = WAITING
        elif span.category == "action":
            begin = max([begin, *messages[: bisect_right(messages, span.end)][-1:]])
        start, end = _microseconds(begin), _microseconds(span.end)
        yield {
            "ph": "X",
            "name": _words(span, several),
            "cat": span.category,
            "pid": one.rank,
            "tid": track,
            "ts": start,
            "dur": round(end - start, 3),
            "args": {key: value for key, value in span.args.items() if value is not None},
        }


def _words(span: Span, several: bool) -> str:
    if span.category == "issue":
        return f"issue {span.name}"
    micro = span.args.get("micro")
    if span.category != "action" or micro is None:
        return span.name
    return f"{span.name} {micro}" + (f", stage {span.args['stage']}" if several else "")


def _track(rank: int, track: int) -> Iterator[Event]:
    lane = track - COMMUNICATION
    words = TRACKS[min(track, COMMUNICATION)] + (f" {lane + 1}" if lane > 0 else "")
    yield _about("thread_name", rank, track, name=words)
    yield _about("thread_sort_index", rank, track, sort_index=track)


def _about(what: str, rank: int, track: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": args}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
