from __future__ import annotations

import threading

import pytest

from meshwright.comm.ledger import Ledger
from meshwright.spec.traffic import TrafficKey, TrafficRow, wire_bytes


def test_equal_keys_share_a_row() -> None:
    ledger = Ledger()
    for payload in (100, 60):
        ledger.record("all_reduce", "dp", "zero.reduce", "backward", None, 4, payload)
    ledger.record("all_reduce", "dp", "zero.reduce", "backward", 0, 4, 8)
    assert ledger.rows() == [
        TrafficRow(TrafficKey("all_reduce", "dp", "zero.reduce", "backward", None), 2, 160, 2 * 160 * 3 / 4),
        TrafficRow(TrafficKey("all_reduce", "dp", "zero.reduce", "backward", 0), 1, 8, 12.0),
    ]


@pytest.mark.parametrize("field", range(5))
def test_every_field_tells_rows_apart(field: int) -> None:
    first = ["all_reduce", "dp", "zero.reduce", "backward", None]
    other = list(first)
    other[field] = ["all_gather", "tp", "tp.reduce", "forward", 3][field]
    ledger = Ledger()
    for key in (first, other):
        ledger.record(*key, 2, 8)  # type: ignore[arg-type]
    assert [row.count for row in ledger.rows()] == [1, 1]


def test_wire_is_the_formula_of_the_sum() -> None:
    # Thirds are no binary fractions: summed one by one they would differ from the formula in the last bit.
    ledger = Ledger()
    for _ in range(1000):
        ledger.record("all_gather", "dp", "r", "forward", None, 3, 10)
    assert ledger.rows()[0].wire == wire_bytes("all_gather", 3, 10_000)


def test_all_to_all_counts_what_was_sent() -> None:
    ledger = Ledger()
    ledger.record("all_to_all", "dp", "r", "forward", None, 4, 100, 30)
    ledger.record("all_to_all", "dp", "r", "forward", None, 4, 100, 0)
    assert ledger.rows()[0].wire == 30.0


def test_take_clears_and_records_count_on() -> None:
    ledger = Ledger()
    ledger.record("send", "pp", "r", "forward", 0, 2, 5)
    ledger.blocked(1.5)
    assert [row.wire for row in ledger.take()] == [5.0]
    assert (ledger.rows(), ledger.blocked_seconds, ledger.records) == ([], 0.0, 1)


def test_threads_lose_nothing() -> None:
    ledger = Ledger()

    def work() -> None:
        for _ in range(20_000):
            ledger.record("recv", "pp", "r", "forward", None, 2, 1)
            ledger.blocked(0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (ledger.rows()[0].count, ledger.records, ledger.blocked_seconds) == (80_000, 80_000, 40_000.0)
