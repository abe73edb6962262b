"""What a difference is called."""

from __future__ import annotations

import pytest

from meshwright.verify.compare import Comparison, diagnose


def scaled(ratio: float, cosine: float = 1.0) -> list[Comparison]:
    return [Comparison("gradient", "w", 0, 1, 0.5, ratio, cosine, since=1, since_ranks=(0, 1))]


@pytest.mark.parametrize(
    ("ratio", "factors", "words"),
    [
        (2.0, {"dp": 2, "micro-batches": 3}, "dp = 2"),
        (1 / 3, {"dp": 2, "micro-batches": 3}, "1 / micro-batches = 1/3"),
        (3.0, {"dp": 3, "micro-batches": 3}, "dp = 3 or micro-batches = 3"),  # which of them, nobody can tell
    ],
)
def test_a_wrong_scale_is_named_by_all_that_it_may_be(ratio, factors, words):
    assert diagnose(scaled(ratio), factors, ranks=2)[1] == f"1 of them are scaled by exactly {words}"


@pytest.mark.parametrize("comparison", [*scaled(1.0), *scaled(2.1), *scaled(2.0, cosine=0.9)])
def test_nothing_is_named_that_does_not_fit(comparison):
    assert len(diagnose([comparison], {"dp": 2, "micro-batches": 1}, ranks=2)) == 1
