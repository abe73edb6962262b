"""The ledger: what one rank has communicated, by operation, axis, reason, phase and micro-batch.

Its rows are compared with the prediction's, so they say the same things in the same words (`spec.traffic`). Payloads
are added as integers and the ring formulas are applied to the sums, so equal traffic gives equal rows, bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.spec.traffic import Operation, Phase, TrafficKey, TrafficRow, wire_bytes

_Key = tuple[Operation, str, str, Phase, int | None, int]


class Ledger:
    """Counts collectives as they are issued. Safe to use from several threads (CUDA runs backward on its own)."""

    def __init__(self) -> None:
        self._rows: dict[_Key, list[int]] = {}  # [count, payload, bytes sent where they were counted one by one]
        self._lock = threading.Lock()
        self.records = 0
        """Collectives recorded since the ledger was made; not reset by `clear`."""
        self.blocked_seconds = 0.0
        """Host seconds spent in issuing and awaiting collectives; reset by `clear`."""

    def record(
        self,
        operation: Operation,
        axis: str,
        reason: str,
        phase: Phase,
        micro: int | None,
        ranks: int,
        payload: int,
        sent: int = 0,
    ) -> None:
        """Add one collective of `payload` bytes (the whole tensor's) over `ranks` ranks.

        `sent` is for all_to_all, whose splits may be uneven: the bytes this rank really sends to others.
        """
        key = (operation, axis, reason, phase, micro, ranks)
        with self._lock:
            row = self._rows.get(key)
            if row is None:
                self._rows[key] = [1, payload, sent]
            else:
                row[0] += 1
                row[1] += payload
                row[2] += sent
            self.records += 1

    def blocked(self, seconds: float) -> None:
        """Add host seconds during which this rank did nothing but communicate."""
        with self._lock:
            self.blocked_seconds += seconds

    def rows(self) -> list[TrafficRow]:
        """What was recorded since the last `clear`, in order of first occurrence."""
        with self._lock:
            items = [(key, tuple(row)) for key, row in self._rows.items()]
        return [
            TrafficRow(
                TrafficKey(operation, axis, reason, phase, micro),
                count,
                payload,
                float(sent) if operation == "all_to_all" else wire_bytes(operation, ranks, payload),
            )
            for (operation, axis, reason, phase, micro, ranks), (count, payload, sent) in items
        ]

    def clear(self) -> None:
        """Forget rows and blocked seconds."""
        with self._lock:
            self._rows.clear()
            self.blocked_seconds = 0.0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave no trace of what is communicated within: it serves a proof, and is not of the run."""
        with self._lock:
            kept = {key: list(row) for key, row in self._rows.items()}
            blocked = self.blocked_seconds
        try:
            yield
        finally:
            with self._lock:
                self._rows, self.blocked_seconds = kept, blocked

    def take(self) -> list[TrafficRow]:
        """`rows` and then `clear`."""
        rows = self.rows()
        self.clear()
        return rows
