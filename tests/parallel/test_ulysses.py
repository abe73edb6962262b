"""Attention by heads, and a ring of that: against attention of the whole, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from meshwright.spec.errors import UserError
from parallel.sequences import Case, all_differences, assert_as_near_as_torch, assert_whole, influence

ORDERS = ("contiguous", "zigzag", "striped")


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_ulysses_is_the_whole(ranks, cp):
    """With key-value heads that divide, that several ranks hold copies of, and as many as query heads."""
    by_ranks = {1: [(4, 2)], 2: [(4, 2), (4, 1), (6, 6)], 3: [(6, 3), (3, 1)], 4: [(8, 4), (8, 2), (4, 1), (4, 4)]}
    cases = [
        Case("ulysses", order, causal, heads=heads, kv_heads=kv_heads, batch=batch)
        for order, causal, batch in itertools.product(ORDERS, (True, False), (1, 2))
        for heads, kv_heads in by_ranks[cp]
    ]
    assert_whole(ranks, cp, cases)


def test_usp_is_the_whole(ranks):
    cases = [
        Case("usp", order, causal, inner=2, heads=heads, kv_heads=kv_heads, batch=batch)
        for order, causal, batch in itertools.product(ORDERS, (True, False), (1, 2))
        for heads, kv_heads in ((4, 2), (4, 1), (6, 6))
    ]
    assert_whole(ranks, 4, cases)


def test_usp_of_three_by_two_and_two_by_three(ranks):
    cases = [Case("usp", order, inner=3, heads=6, kv_heads=3, batch=1) for order in ORDERS]
    cases += [Case("usp", order, inner=2, heads=4, kv_heads=1, batch=1) for order in ORDERS]
    assert_whole(ranks, 6, cases)


def test_windows_and_documents(ranks):
    ids, others = (
        tuple(sum(start <= p for start in starts) for p in range(24)) for starts in ((0, 4, 6, 12, 13, 23), (0, 9, 10))
    )
    kinds = [Case("ulysses", heads=4), *(Case("usp", order, inner=2) for order in ORDERS)]
    cases = [
        Case(kind.method, kind.order, inner=kind.inner, window=window, documents=documents)
        for kind in kinds
        for window, documents in (*((w, None) for w in (1, 2, 3, 5, 6, 7, 12, 23, 99)), (None, ids), (4, ids))
    ]
    cases += [Case("usp", order, False, inner=2, documents=(ids, others)) for order in ORDERS]
    assert_whole(ranks, 4, cases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_numbers(ranks, dtype):
    cases = [Case("ulysses", length=256, dtype=dtype), Case("usp", length=256, dtype=dtype, inner=2)]
    assert_as_near_as_torch(ranks, 4, [*cases, Case("ulysses", length=256, dtype=dtype, kv_heads=1)])


def test_a_token_changes_what_comes_behind_it_and_nothing_else(ranks):
    kinds = (("ulysses", 1), ("usp", 2))
    cases = [Case(method, order, inner=inner, batch=1) for method, inner in kinds for order in ORDERS]
    for changed in ranks.run(4, influence, cases, [0, 2, 3, 5, 6, 11, 12, 20, 21, 23], axes={"cp": 4}):
        for case, each in zip(cases, changed, strict=True):
            assert each == {position: list(range(position, 24)) for position in each}, case


def refused(mesh, cases: list[Case]) -> list[str]:
    found = []
    for case in cases:
        try:
            all_differences(mesh, [case])
            found.append("")
        except UserError as exc:
            found.append(str(exc))
    return found


def test_heads_that_do_not_divide_are_refused_with_what_would_work(ranks):
    cases = [
        Case("ulysses", heads=6, kv_heads=2),
        Case("ulysses", heads=12, kv_heads=3),
        Case("usp", inner=2, heads=3, kv_heads=3),
        Case("usp", inner=4),
        Case("usp", inner=3),
        Case("ring", causal=False, window=4),
    ]
    for found in ranks.run(4, refused, cases, axes={"cp": 4}):
        assert found == [
            "cp: ulysses: 4 ranks do not divide 6 heads; use 1 or 2 or 6 ranks, or cp_method=ring",
            "cp: ulysses: 4 ranks do not divide the 3 key-value heads of 12; use 1 or 3 or 6 or 12 ranks, "
            "or cp_method=ring",
            "cp: usp: 2 ranks do not divide 3 heads; use 1 or 3 ranks, or cp_method=ring",
            "cp: usp: 4 ranks with a ring of them do not make cp=4; use one of 2",
            "cp: usp: inner=3 does not divide cp=4",
            "cp: a window of 4 is of earlier keys; use causal=True, or no window",
        ]
