"""The ways to recompute side by side: what each keeps, holds and computes again, and what fits with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from meshwright.predict.activations import total
from meshwright.predict.flight import kept_at_once
from meshwright.predict.memory import Device, Memory, memory
from meshwright.predict.report import executed
from meshwright.predict.stages import stages_of
from meshwright.spec.batch import micro_steps
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec

COMPARED: tuple[dict[str, Any], ...] = (
    {"recompute": "none"},
    {"recompute": "full"},
    {"recompute": "full", "recompute_every": "sqrt"},
    {"recompute": "selective"},
    {"recompute": "selective", "recompute_keep": ("linear", "attention")},
)
"""Fields of the layout, a dict for each way; a run that has another is compared with these."""

_FIELDS = ("recompute", "recompute_every", "recompute_keep")


@dataclass(frozen=True)
class Fit:
    """Whether a rank holds a run. Sizes in bytes.

    largest_micro: the largest batch.micro with which it fits, 0 where none does; batch.sequences grows with it where
    the ranks would not have as many. In a pipeline there are always as many micro-batches as the run has.
    """

    capacity: int
    fits: bool
    largest_micro: int


@dataclass(frozen=True)
class Mode:
    """One way to recompute, for the rank that holds most. Sizes in bytes.

    every: blocks of a region. kept: activations between forward and backward. peak: all that the rank holds at its
    fullest moment, states included. recompute_share: FLOPs computed again, as a part of forward and backward.
    this_run: whether it is what the run asks for.
    """

    layout: Layout
    every: int
    kept: int
    peak: int
    states: int
    recompute_share: float
    this_run: bool
    fit: Fit | None

    def to_dict(self) -> dict[str, Any]:
        """In dicts, lists, strings and numbers, for JSON."""
        asked = self.layout.model_dump(mode="json", include=set(_FIELDS))
        figures = ("every", "kept", "peak", "states", "recompute_share", "this_run")
        fit = None if self.fit is None else asdict(self.fit)
        return asked | {name: getattr(self, name) for name in figures} | {"fit": fit}


def modes(run: RunSpec, layout: Layout, device: Device | None = None, capacity: int | None = None) -> list[Mode]:
    """Those of COMPARED that the run may have, and its own where it is none of them, for a resolved `layout`.

    capacity: bytes of a device. device: as for `memory`.
    """
    ways = [Layout.model_validate(_without(layout) | fields) for fields in COMPARED]
    ways = [way for way in ways if _allowed(run, way)]
    ways += [layout] if layout not in ways else []
    return [_mode(run, way, device, capacity, this_run=way == layout) for way in ways]


def fit(run: RunSpec, layout: Layout, capacity: int, device: Device | None = None) -> Fit:
    """Whether `run`, laid out so, fits devices of `capacity` bytes."""
    held = largest(run, layout, device).total
    return Fit(capacity, held <= capacity, largest_micro(run, layout, capacity, device))


def largest_micro(run: RunSpec, layout: Layout, capacity: int, device: Device | None = None) -> int:
    """The largest batch.micro with which the ranks that have the largest part of the batch hold at most `capacity`
    bytes; 0 for none."""
    micros = micro_steps(run.batch.sequences, layout.data_ranks, run.batch.micro)

    def fits(micro: int) -> bool:
        if layout.pp > 1:  # their number says how many are in flight, and whether the schedule can be had
            sequences = micro * micros * layout.data_ranks
        else:
            sequences = max(run.batch.sequences, micro * layout.data_ranks)
        batch = run.batch.model_copy(update={"micro": micro, "sequences": sequences})
        return largest(run.model_copy(update={"batch": batch}), layout, device).total <= capacity

    # What is held grows with the micro-batch, but for one step: from where a part of the batch is a single one,
    # nothing waits for a second.
    single = -(-run.batch.sequences // layout.data_ranks)
    if fits(single):
        low, high = single, 2 * single
        while fits(high):
            low, high = high, 2 * high
    else:
        low, high = 0, single
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest(run: RunSpec, layout: Layout, device: Device | None = None) -> Memory:
    """Of the ranks that have the largest part of the batch, the one that holds most."""
    ranks = (layout.rank_at({"pp": place}) for place in range(layout.pp))
    return max((memory(run, layout, rank, device) for rank in ranks), key=lambda held: held.total)


def _mode(run: RunSpec, layout: Layout, device: Device | None, capacity: int | None, *, this_run: bool) -> Mode:
    held = largest(run, layout, device)
    blocks = max(len(stage.blocks) for stage in stages_of(run.model, layout, run.data.seq_len))
    return Mode(
        layout=layout,
        every=layout.region(blocks),
        kept=total(kept_at_once(run, layout, held.rank, cpu=held.device == "cpu")),
        peak=held.total,
        states=held.states,
        recompute_share=executed(run, layout, device).recompute_share,
        this_run=this_run,
        fit=None if capacity is None else fit(run, layout, capacity, device),
    )


def _allowed(run: RunSpec, layout: Layout) -> bool:
    try:
        RunSpec.model_validate(run.model_dump() | {"layout": layout})
    except ValidationError:
        return False
    return True


def _without(layout: Layout) -> dict[str, Any]:
    """The layout's fields but for those of recompute."""
    return layout.model_dump(exclude=set(_FIELDS))
