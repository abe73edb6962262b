"""Which collectives one optimizer step issues, in the very rows that a run's ledger records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from meshwright.predict import context
from meshwright.predict.context import Attention
from meshwright.predict.params import units
from meshwright.predict.rows import row
from meshwright.predict.states import DTYPE_BYTES, padded, reduce_bytes, shards
from meshwright.predict.tensor import sequences_computed, tensor_traffic
from meshwright.spec.batch import micro_steps
from meshwright.spec.errors import UserError
from meshwright.spec.layout import STATE_AXES, Axis, Layout
from meshwright.spec.run import RunSpec
from meshwright.spec.traffic import TrafficRow

METRICS_BYTES = 3 * 8  # loss sum, valid tokens, stop flag: float64 in every precision, so that counts stay exact
MOST_MICROS = 10_000  # micro-batches with rows of their own
NORM_BYTES = 8  # the sum of the squared gradients, float64


def traffic(run: RunSpec, layout: Layout, rank: int = 0) -> tuple[TrafficRow, ...]:
    """The rows of one step on `rank`, its number in the world, for a resolved `layout`.

    The same on every rank where tp=1 and cp=1, whatever its part of the batch. Else what tensor and context ranks send
    depends on their micro-batches, and the ranks of one data coordinate have the same. A single rank sends nothing.
    """
    everyone, ranks = name_of(layout, (*STATE_AXES, "tp")), layout.state_ranks * layout.tp
    rows = [*_zero(run, layout), *tensor_traffic(run, layout, rank), *_context(run, layout, rank)]
    if layout.zero or layout.tp > 1:
        rows.append(row("all_reduce", everyone, ranks, "step.norm", "step", [NORM_BYTES]))
    rows.append(row("all_reduce", everyone, ranks, "step.metrics", "step", [METRICS_BYTES]))
    return tuple(found for found in rows if found is not None)


def name_of(layout: Layout, axes: Sequence[Axis]) -> str:
    """What the ranks along `axes` are called: "dp+cp", or "dp" where cp=1."""
    return "+".join(axis for axis in axes if layout.size(axis) > 1)


def _zero(run: RunSpec, layout: Layout) -> Iterator[TrafficRow | None]:
    """Gradients of each unit, and its parameters: see the table in parallel/zero.py.

    Stages 0 and 1 reduce once a step, however many micro-batches it has; 2 and 3 in each. At stage 3 the last unit of
    forward stays for backward, a tied one from its first use on, and backward never reads an embedding.
    """
    ranks, micros = layout.state_ranks, micro_steps(run.batch.sequences, layout.data_ranks, run.batch.micro)
    each = [f"zero={layout.zero}"] * (layout.zero >= 2)
    each += [f"{axis}={ranks}" for axis, ranks in (("tp", layout.tp), ("cp", layout.cp)) if ranks > 1]
    if each and micros > MOST_MICROS:
        raise UserError(
            f"batch: {micros:,} micro-batches a step, each with messages of its own at {each[0]}; "
            f"at most {MOST_MICROS:,}: use a larger batch.micro, or fewer batch.sequences"
        )
    sizes = list(padded(run, layout).values())
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
        *earlier, _ = zip(units(run.model, layout=layout).values(), parameters, strict=True)
        again = [size for unit, size in earlier if not (unit.tied or unit.lookup)]
        by_step = layout.zero_gather == "step"
        for micro in range(1 if by_step else micros):
            yield row("all_gather", inner, cut, "zero.gather", "forward", parameters, micro)
            if not by_step:
                yield row("all_gather", inner, cut, "zero.gather", "backward", again, micro)


def _context(run: RunSpec, layout: Layout, rank: int) -> Iterator[TrafficRow]:
    """Attention over context ranks, in every micro-batch."""
    if layout.cp == 1:
        return
    again = layout.recompute != "none" and "attention" not in layout.kept_operators
    for micro, (batch, length) in enumerate(sequences_computed(run, layout, rank)):
        if batch:
            size = DTYPE_BYTES[run.precision]
            it = Attention.of(run.model, layout, batch=batch, seq=length, dtype_bytes=size)
            yield from context.traffic(it, run.model.layers, micro, run.model.layers if again else 0)


def total_wire(rows: Iterable[TrafficRow]) -> float:
    """Bytes one rank sends, all rows together."""
    return sum(each.wire for each in rows)
