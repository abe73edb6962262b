"""Which collectives one optimizer step issues, in the very rows that a run's ledger records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from meshwright.predict.params import units
from meshwright.predict.states import DTYPE_BYTES, padded, reduce_bytes, shards
from meshwright.spec.batch import micro_steps
from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec
from meshwright.spec.traffic import Operation, Phase, TrafficKey, TrafficRow, wire_bytes

METRICS_BYTES = 3 * 8  # loss sum, valid tokens, stop flag: float64 in every precision, so that counts stay exact
MOST_MICROS = 10_000  # micro-batches with rows of their own
NORM_BYTES = 8  # the sum of the squared gradients, float64


def traffic(run: RunSpec, layout: Layout) -> tuple[TrafficRow, ...]:
    """The rows of one step for a resolved `layout`; the same on every rank, whatever its part of the batch.

    A single data rank sends nothing.
    """
    rows = [*_zero(run, layout), _row("all_reduce", "dp", layout.data_ranks, "step.metrics", "step", [METRICS_BYTES])]
    return tuple(row for row in rows if row is not None)


def _zero(run: RunSpec, layout: Layout) -> Iterator[TrafficRow | None]:
    """Gradients of each unit, and its parameters: see the table in parallel/zero.py.

    Stages 0 and 1 reduce once a step, however many micro-batches it has; 2 and 3 in each. At stage 3 the last unit of
    forward stays for backward, a tied one from its first use on, and backward never reads an embedding.
    """
    ranks, micros = layout.data_ranks, micro_steps(run.batch.sequences, layout.data_ranks, run.batch.micro)
    if layout.zero >= 2 and micros > MOST_MICROS:
        raise UserError(
            f"batch: {micros:,} micro-batches a step, each with reductions of its own at zero={layout.zero}; "
            f"at most {MOST_MICROS:,}: use a larger batch.micro, or fewer batch.sequences"
        )
    sizes = list(padded(run, layout).values())
    parameters = [size * DTYPE_BYTES[run.precision] for size in sizes]
    gradients = [size * reduce_bytes(run) for size in sizes]
    cut = shards(layout)
    inner = "dp" if cut == ranks else "dp.inner"
    if layout.zero == 0:
        yield _row("all_reduce", "dp", ranks, "zero.reduce", "backward", gradients)
    elif layout.zero == 1:
        yield _row("reduce_scatter", inner, cut, "zero.reduce", "backward", gradients)
    else:
        for micro in range(micros):
            yield _row("reduce_scatter", inner, cut, "zero.reduce", "backward", gradients, micro)
    if layout.zero and cut < ranks:
        shard = [size // cut * reduce_bytes(run) for size in sizes]
        yield _row("all_reduce", "dp.outer", ranks // cut, "zero.replicas", "backward", shard)
    if layout.zero in (1, 2):
        yield _row("all_gather", inner, cut, "zero.gather", "step", parameters)
    elif layout.zero == 3:
        *earlier, _ = zip(units(run.model).values(), parameters, strict=True)
        again = [size for unit, size in earlier if not (unit.tied or unit.lookup)]
        by_step = layout.zero_gather == "step"
        for micro in range(1 if by_step else micros):
            yield _row("all_gather", inner, cut, "zero.gather", "forward", parameters, micro)
            if not by_step:
                yield _row("all_gather", inner, cut, "zero.gather", "backward", again, micro)
    if layout.zero:
        yield _row("all_reduce", "dp", ranks, "step.norm", "step", [NORM_BYTES])


def total_wire(rows: Iterable[TrafficRow]) -> float:
    """Bytes one rank sends, all rows together."""
    return sum(row.wire for row in rows)


def _row(
    operation: Operation,
    axis: str,
    ranks: int,
    reason: str,
    phase: Phase,
    payloads: Sequence[int],
    micro: int | None = None,
) -> TrafficRow | None:
    if ranks == 1 or not payloads:
        return None
    key = TrafficKey(operation, axis, reason, phase, micro)
    # The formula of the sum, not the sum of the formula's values: the ledger does the same, and rounds the same.
    return TrafficRow(key, len(payloads), sum(payloads), wire_bytes(operation, ranks, sum(payloads)))
