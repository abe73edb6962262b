"""One row of traffic: what `predict` foretells and what the ledger of a run records, in the same words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Operation = Literal[
    "broadcast",
    "scatter",
    "gather",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "shift",
    "send",
    "recv",
]
Phase = Literal["forward", "recompute", "backward", "step"]
SMALL_SUM = 1 << 17  # bytes; see lent_to_sum
SENT_TOGETHER = 1 << 18
"""Bytes of messages that are let go together on the CPU: to look after a smaller one takes longer than to send it."""
SENT_AT_ONCE = 2
"""Messages of one way that an accelerator has under way before it waits for the oldest."""


@dataclass(frozen=True, slots=True)
class TrafficKey:
    """What tells one row of the ledger from another."""

    operation: Operation
    axis: str  # "dp", or several joined by "+" for a group over more than one axis; "world" for all ranks
    reason: str  # dotted: "zero.reduce", "step.metrics"
    phase: Phase
    micro: int | None  # micro-batch, or None for what happens once a step


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """One row: `count` collectives of the key's kind, their payload, and what one rank puts on the wire for them."""

    key: TrafficKey
    count: int
    payload: int  # bytes of the whole (unsharded) tensor, summed over the collectives
    wire: float  # bytes one rank sends


def wire_bytes(operation: Operation, ranks: int, payload: int) -> float:
    """Bytes one rank sends for a collective of `payload` bytes (the whole tensor's) by the ring formulas.

    The ring's all-reduce is a reduce-scatter and an all-gather, each sending (n-1)/n of the payload
    (Patarasuk and Yuan 2009). Rooted operations count the average rank's share, (n-1)/n of the payload; a send
    counts in full at the sender, a receive nothing; in a shift everybody sends.
    """
    if operation in ("send", "shift"):
        return float(payload)
    if operation == "recv":
        return 0.0
    part = payload * (ranks - 1) / ranks
    return 2 * part if operation == "all_reduce" else part


def lent_to_sum(ranks: int, payload: int) -> int:
    """Bytes that a rank on the CPU borrows to add up all ranks' parts of an awaited sum by itself; 0 where it does not.

    Two ranks are as fast by Gloo's ring, and so are more than SMALL_SUM bytes, of which ranks − 1 copies would go out.
    """
    return ranks * payload if ranks > 2 and payload <= SMALL_SUM else 0
