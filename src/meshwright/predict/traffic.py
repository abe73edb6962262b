"""Which collectives one optimizer step issues, in the very rows that a run's ledger records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from meshwright.predict import context
from meshwright.predict.context import Attention
from meshwright.predict.messages import pipeline_traffic
from meshwright.predict.micros import sequences_computed
from meshwright.predict.params import units
from meshwright.predict.rows import row
from meshwright.predict.stages import stages_on
from meshwright.predict.states import DTYPE_BYTES, padded, reduce_bytes, shards
from meshwright.predict.tensor import tensor_traffic
from meshwright.spec.batch import micro_steps
from meshwright.spec.errors import UserError
from meshwright.spec.layout import STATE_AXES, Axis, Layout
from meshwright.spec.run import RunSpec
from meshwright.spec.stages import Stage
from meshwright.spec.traffic import TrafficRow

METRICS_BYTES = 3 * 8  # loss sum, valid tokens, stop flag: float64 in every precision, so that counts stay exact
MOST_MICROS = 10_000  # micro-batches with rows of their own
EVERYONE: tuple[Axis, ...] = (*STATE_AXES, "tp", "pp")
"""All axes, in the order in which the group of all ranks is called by them."""
NORM_BYTES = 8  # the sum of the squared gradients, float64


def traffic(run: RunSpec, layout: Layout, rank: int = 0) -> tuple[TrafficRow, ...]:
    """The rows of one step on `rank`, its number in the world, for a resolved `layout`.

    The same on every rank where tp=1, cp=1 and pp=1, whatever its part of the batch. Else what tensor, context and
    pipeline ranks send depends on their micro-batches, and the ranks of one data coordinate and of one place in the
    pipeline have the same. A single rank sends nothing.
    """
    everyone, ranks = name_of(layout, EVERYONE), layout.world
    rows = [*_zero(run, layout, rank), *tensor_traffic(run, layout, rank), *_context(run, layout, rank)]
    rows += pipeline_traffic(run, layout, rank)
    if layout.zero or layout.tp > 1 or layout.pp > 1:
        rows.append(row("all_reduce", everyone, ranks, "step.norm", "step", [NORM_BYTES]))
    rows.append(row("all_reduce", everyone, ranks, "step.metrics", "step", [METRICS_BYTES]))
    return tuple(found for found in rows if found is not None)


def name_of(layout: Layout, axes: Sequence[Axis]) -> str:
    """What the ranks along `axes` are called: "dp+cp", or "dp" where cp=1."""
    return "+".join(axis for axis in axes if layout.size(axis) > 1)


def _zero(run: RunSpec, layout: Layout, rank: int) -> Iterator[TrafficRow | None]:
    """Gradients of each unit, and its parameters: see the table in parallel/zero.py.

    Stages 0 and 1 reduce once a step, however many micro-batches it has; 2 and 3 in each. At stage 3 the last unit of
    forward stays for backward, a tied one from its first use on, and backward never reads an embedding. In a pipeline
    none stays, since other micro-batches come in between.
    """
    ranks, micros = layout.state_ranks, micro_steps(run.batch.sequences, layout.data_ranks, run.batch.micro)
    _refuse_too_many(layout, micros)
    stages = stages_on(run, layout, rank)
    sizes = [size for stage in stages for size in padded(run, layout, stage).values()]
    parameters = [size * DTYPE_BYTES[run.precision] for size in sizes]
    gradients = [size * reduce_bytes(run) for size in sizes]
    cut = shards(layout)
    every = name_of(layout, STATE_AXES)
    inner = every if cut == ranks else f"{every}.inner"
    if layout.zero == 0:
        yield row("all_reduce", every, ranks, "zero.reduce", "backward", gradients)
    elif layout.zero == 1:
        yield row("reduce_scatter", inner, cut, "zero.reduce", "backward", gradients)
    else:
        for micro in range(micros):
            yield row("reduce_scatter", inner, cut, "zero.reduce", "backward", gradients, micro)
    if layout.zero and cut < ranks:
        shard = [size // cut * reduce_bytes(run) for size in sizes]
        yield row("all_reduce", f"{every}.outer", ranks // cut, "zero.replicas", "backward", shard)
    if layout.zero in (1, 2):
        yield row("all_gather", inner, cut, "zero.gather", "step", parameters)
    elif layout.zero == 3:
        again = [size for stage in stages for size in _gathered_again(run, layout, stage)]
        by_step = layout.zero_gather == "step"
        for micro in range(1 if by_step else micros):
            yield row("all_gather", inner, cut, "zero.gather", "forward", parameters, micro)
            if not by_step:
                yield row("all_gather", inner, cut, "zero.gather", "backward", again, micro)


def _gathered_again(run: RunSpec, layout: Layout, stage: Stage) -> Iterator[int]:
    """Bytes of each unit of `stage` that a micro-batch's backward gathers, having been freed in forward."""
    held = units(run.model, layout.join, layout, stage)
    sizes = padded(run, layout, stage)
    *_, last = held
    for name, unit in held.items():
        stays = stage.whole and (unit.tied or name == last)
        if not (stays or unit.lookup):
            yield sizes[name] * DTYPE_BYTES[run.precision]


def _refuse_too_many(layout: Layout, micros: int) -> None:
    """Raise UserError for more micro-batches than may have rows of their own, where they have some."""
    each = [f"zero={layout.zero}"] * (layout.zero >= 2)
    each += [f"{axis}={layout.size(axis)}" for axis in ("tp", "cp", "pp") if layout.size(axis) > 1]
    if each and micros > MOST_MICROS:
        raise UserError(
            f"batch: {micros:,} micro-batches a step, each with messages of its own at {each[0]}; "
            f"at most {MOST_MICROS:,}: use a larger batch.micro, or fewer batch.sequences"
        )


def _context(run: RunSpec, layout: Layout, rank: int) -> Iterator[TrafficRow]:
    """Attention over context ranks, in every micro-batch."""
    if layout.cp == 1:
        return
    layers = sum(len(stage.blocks) for stage in stages_on(run, layout, rank))
    again = layers if layout.recompute != "none" and "attention" not in layout.kept_operators else 0
    for micro, (batch, length) in enumerate(sequences_computed(run, layout, rank)):
        if batch:
            size = DTYPE_BYTES[run.precision]
            it = Attention.of(run.model, layout, batch=batch, seq=length, dtype_bytes=size)
            yield from context.traffic(it, layers, micro, again)


def total_wire(rows: Iterable[TrafficRow]) -> float:
    """Bytes one rank sends, all rows together."""
    return sum(each.wire for each in rows)
