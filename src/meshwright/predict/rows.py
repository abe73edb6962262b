"""One row of predicted traffic, from the payloads of its collectives."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.spec.traffic import Operation, Phase, TrafficKey, TrafficRow, wire_bytes


def row(
    operation: Operation,
    axis: str,
    ranks: int,
    reason: str,
    phase: Phase,
    payloads: Sequence[int],
    micro: int | None = None,
) -> TrafficRow | None:
    """None for a single rank, which sends nothing, and for no payloads."""
    if ranks == 1 or not payloads:
        return None
    key = TrafficKey(operation, axis, reason, phase, micro)
    # The formula of the sum, not the sum of the formula's values: the ledger does the same, and rounds the same.
    return TrafficRow(key, len(payloads), sum(payloads), wire_bytes(operation, ranks, sum(payloads)))
