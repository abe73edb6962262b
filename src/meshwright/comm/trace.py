"""A trace: what a rank's host did in some steps, and when, as spans of time; and how the ranks bring theirs together.

    =============  ===========================================================  ======================================
    category       what it is                                                   args
    =============  ===========================================================  ======================================
    step           a training step, which holds all others but those under way  step
    action         of the pipeline's schedule                                   stage, micro
    recompute      a region's forward once more, within a backward
    data           making a micro-batch's tokens
    optimizer      the gradients' norm; the update
    issue, wait    the host is blocked by a collective, named after its reason  op, axis, bytes, phase, micro
    under way      that collective, from its issue to the end of its wait       the same
    =============  ===========================================================  ======================================

What the host does is one thing after another, so these spans nest, whatever thread they come from; collectives under
way lie across. On an accelerator the host waits for the current stream at the end of each span, which so takes as long
as what was started in it: a step that is traced hides less than others.

The clock is the machine's (`time.perf_counter`), which all its processes share. Those of several machines are put
beside each other by the wall clock of each machine's first rank.
"""

from __future__ import annotations

import json
import socket
import time
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from meshwright.comm.check import Call
from meshwright.spec.traffic import Phase

if TYPE_CHECKING:
    from meshwright.comm.mesh import Mesh

Args = dict[str, Any]
clock = time.perf_counter
UNDER_WAY = "under way"
_REASON = "trace.collect"
_NOTHING = nullcontext()


class Span(NamedTuple):
    """Seconds from `begin` to `end`, of one clock for all spans of a list."""

    category: str
    name: str
    begin: float
    end: float
    args: Args

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Tracing:
    """Where a rank's trace is while it is taken, else None: one for a mesh, known to all who add to it."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now: Trace | None = None

    def span(
        self, category: str, name: str, stage: int | None = None, micro: int | None = None
    ) -> AbstractContextManager[object]:
        """Around what is to be seen in a trace; does nothing while none is taken."""
        trace = self.now
        return _NOTHING if trace is None else _Open(trace, category, name, {"stage": stage, "micro": micro})


class Trace:
    """Spans of this rank, added when they end. Safe to use from several threads (CUDA runs backward on its own)."""

    def __init__(self, device: torch.device) -> None:
        self.offset = time.time() - clock()
        """Of the wall clock from this one, in seconds."""
        self._waits_for_device = device.type != "cpu"
        self._spans: list[Span] = []
        self._issued: dict[int, tuple[str, float, Args]] = {}
        self._began = 0.0

    def begin_step(self) -> None:
        self._began = clock()

    def end_step(self, step: int) -> None:
        """The step that began last, `step` of the run from 1, is over."""
        self.add("step", f"step {step}", self._began, {"step": step})

    def add(self, category: str, name: str, begin: float, args: Args) -> None:
        """A span from `begin` until now."""
        if self._waits_for_device:
            torch.accelerator.current_stream().synchronize()
        self._spans.append(Span(category, name, begin, clock(), args))

    def issued(
        self, sequence: int, call: Call, axis: str, phase: Phase | None, micro: int | None, payload: int, begin: float
    ) -> None:
        """Collective `sequence` is under way; issuing it began at `begin`."""
        args: Args = {"op": call.op, "axis": axis, "bytes": payload, "phase": phase, "micro": micro}
        self._spans.append(Span("issue", call.reason, begin, clock(), args))
        self._issued[sequence] = call.reason, begin, args

    def waited(self, sequence: int, call: Call, axis: str, begin: float) -> None:
        """The wait for it, since `begin`, is over."""
        known = self._issued.get(sequence)
        self.add("wait", call.reason, begin, {"op": call.op, "axis": axis} if known is None else known[2])
        self.ended(sequence)

    def ended(self, sequence: int) -> None:
        """It is over. Nothing happens if that is known, or if it was issued while nothing was recorded."""
        known = self._issued.pop(sequence, None)
        if known is not None:
            reason, begin, args = known
            self._spans.append(Span(UNDER_WAY, reason, begin, clock(), args))

    def spans(self) -> list[Span]:
        """All of them by their beginning, those around others first. What nobody has waited for yet ends with the step
        that it was issued in."""
        steps = [span for span in self._spans if span.category == "step"]
        now = clock()
        left = [
            Span(UNDER_WAY, reason, begin, next((s.end for s in steps if s.begin <= begin <= s.end), now), args)
            for reason, begin, args in list(self._issued.values())
        ]
        return sorted([*self._spans, *left], key=lambda span: (span.begin, -span.end))


class _Open:
    """A span that has begun."""

    __slots__ = ("_args", "_begin", "_category", "_name", "_trace")

    def __init__(self, trace: Trace, category: str, name: str, args: Args) -> None:
        self._trace, self._category, self._name, self._args = trace, category, name, args

    def __enter__(self) -> None:
        self._begin = clock()

    def __exit__(self, *_: object) -> None:
        self._trace.add(self._category, self._name, self._begin, self._args)


# -- all ranks' ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankTrace:
    """What one rank has recorded. coords: its place on each axis of several ranks, outermost axis first. Seconds since
    the first span of all ranks."""

    rank: int
    coords: dict[str, int]
    spans: Sequence[Span]

    @property
    def steps(self) -> list[Span]:
        return [span for span in self.spans if span.category == "step"]


def collect(trace: Trace, mesh: Mesh) -> list[RankTrace] | None:
    """The traces of all ranks, on rank 0; None on the others. All ranks together; goes over no disk, nor into the
    ledger."""
    coords = {axis: mesh.coords[axis] for axis in reversed(mesh.sizes) if mesh.sizes[axis] > 1}
    about = {"machine": _machine(), "offset": trace.offset, "coords": coords, "spans": trace.spans()}
    told = _gather(mesh, zlib.compress(json.dumps(about).encode(), 1))
    if told is None:
        return None
    every = [json.loads(zlib.decompress(data)) for data in told]
    ahead: dict[str, float] = {}  # of the clock of rank 0, by machine
    for one in every:
        ahead.setdefault(one["machine"], one["offset"] - trace.offset)
    zero = min((ahead[one["machine"]] + span[2] for one in every for span in one["spans"][:1]), default=0.0)
    return [
        RankTrace(rank, one["coords"], _moved(one["spans"], ahead[one["machine"]], zero))
        for rank, one in enumerate(every)
    ]


def _moved(spans: Sequence[Sequence[Any]], by: float, zero: float) -> list[Span]:
    return [
        Span(category, name, begin + by - zero, end + by - zero, args) for category, name, begin, end, args in spans
    ]


def _gather(mesh: Mesh, data: bytes) -> list[bytes] | None:
    """Every rank's `data`, on rank 0."""
    world = mesh.world_group
    with mesh.ledger.aside():
        mine = torch.tensor([len(data)], device=mesh.device)
        sizes = torch.empty(world.size, dtype=mine.dtype, device=mesh.device)
        world.all_gather(sizes, mine, reason=_REASON, phase="step").wait()
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        padded = padded.to(mesh.device)
        parts = [torch.empty_like(padded) for _ in range(world.size)] if world.rank == 0 else None
        world.gather(parts, padded, 0, reason=_REASON, phase="step").wait()
    if parts is None:
        return None
    return [part.cpu().numpy()[:size].tobytes() for part, size in zip(parts, sizes.tolist(), strict=True)]


def _machine() -> str:
    """The same for processes that share a clock, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
