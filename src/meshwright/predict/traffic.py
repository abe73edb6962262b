"""Which collectives one optimizer step issues, in the very rows that a run's ledger records."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.predict.memory import DTYPE_BYTES
from meshwright.predict.params import unit_counts
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec
from meshwright.spec.traffic import TrafficKey, TrafficRow, wire_bytes

METRICS_BYTES = 3 * 8  # loss sum, valid tokens, stop flag: float64 in every precision, so that counts stay exact


def traffic(run: RunSpec, layout: Layout) -> tuple[TrafficRow, ...]:
    """The rows of one step for a resolved `layout`; the same on every rank, whatever its part of the batch.

    Gradients are reduced once a step, however many micro-batches it has: each unit's flat buffer as a whole. A
    single data rank sends nothing.
    """
    ranks = layout.data_ranks
    if ranks == 1:
        return ()
    size = DTYPE_BYTES[run.precision]
    reduce = TrafficKey("all_reduce", "dp", "zero.reduce", "backward", None)
    metrics = TrafficKey("all_reduce", "dp", "step.metrics", "step", None)
    return (
        _row(reduce, ranks, (n * size for n in unit_counts(run.model).values())),
        _row(metrics, ranks, (METRICS_BYTES,)),
    )


def total_wire(rows: Iterable[TrafficRow]) -> float:
    """Bytes one rank sends, all rows together."""
    return sum(row.wire for row in rows)


def _row(key: TrafficKey, ranks: int, payloads: Iterable[int]) -> TrafficRow:
    sizes = list(payloads)
    # The formula of the sum, not the sum of the formula's values: the ledger does the same, and rounds the same.
    return TrafficRow(key, len(sizes), sum(sizes), wire_bytes(key.operation, ranks, sum(sizes)))
