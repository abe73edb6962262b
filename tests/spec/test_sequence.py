"""Who holds which positions, and which calls of the kernel follow: against every pair, one by one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from meshwright.spec.sequence import (
    Block,
    Order,
    blocks,
    check_length,
    positions,
    ring_blocks,
    spans,
    visible_pairs,
)

ORDERS: tuple[Order, ...] = ("contiguous", "zigzag", "striped")


def seen(block: Block) -> Iterator[tuple[int, int]]:
    """The (query, key) places that a call computes, `masked` ones counted whole."""
    for i, j in itertools.product(range(*block.queries), range(*block.keys)):
        if block.mode != "causal" or j - block.keys[0] <= i - block.queries[0]:
            yield i, j


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_position_has_one_rank_and_parts_are_equal_and_ascend(ranks: int, order: Order):
    parts = [positions(24, ranks, rank, order) for rank in range(ranks)]
    assert sorted(itertools.chain(*parts)) == list(range(24))
    assert {len(part) for part in parts} == {24 // ranks}
    assert all(part == sorted(part) for part in parts)


def test_eight_positions_over_two_ranks():
    assert [positions(8, 2, rank, "contiguous") for rank in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [positions(8, 2, rank, "zigzag") for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [positions(8, 2, rank, "striped") for rank in (0, 1)] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_documents_are_cut_each_by_itself():
    parts = [positions(8, 2, rank, "zigzag", documents=(0, 4, 8)) for rank in (0, 1)]
    assert parts == [[0, 3, 4, 7], [1, 2, 5, 6]]
    with pytest.raises(ValueError, match=r"sequence of 3 cannot be cut .* use 4"):
        spans(8, 2, 0, "zigzag", documents=(0, 3, 8))
    with pytest.raises(ValueError, match="must ascend from 0"):
        spans(8, 2, 0, "zigzag", documents=(0, 4))


@pytest.mark.parametrize(
    ("length", "ranks", "order", "good"),
    [
        (2999, 4, "zigzag", 3000),
        (7, 4, "zigzag", 8),
        (7, 4, "contiguous", 8),
        (12, 4, "zigzag", 16),
        (0, 4, "striped", 4),
    ],
)
def test_a_length_that_does_not_divide_is_refused_with_the_next_that_does(length, ranks, order, good):
    with pytest.raises(ValueError, match=f"sequence of {length} cannot .*cp={ranks} .*use {good}$"):
        check_length(length, ranks, order)
    check_length(good, ranks, order)


def test_one_rank_takes_any_length():
    for order in ORDERS:
        check_length(7, 1, order)
        assert spans(7, 1, 0, order) == [range(7)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 6, 7, 11, 12, 13, 24, 100])
def test_the_calls_compute_every_visible_pair_once(ranks: int, order: Order, window: int | None):
    """And nothing else, but for pairs of masked calls, of which every query and every key has something to do."""
    for rank in range(ranks):
        mine, pairs = positions(24, ranks, rank, order), 0
        for source in range(ranks):
            theirs = positions(24, ranks, source, order)
            found = ring_blocks(24, ranks, rank, source, order, window=window)
            expected = {
                (i, j)
                for i, j in itertools.product(range(len(mine)), range(len(theirs)))
                if theirs[j] <= mine[i] and (window is None or mine[i] - theirs[j] < window)
            }
            times = Counter(pair for block in found for pair in seen(block))
            assert set(times) >= expected and set(times.values()) <= {1}
            for block in found:
                real = set(seen(block)) & expected
                if block.mode != "masked":
                    assert real == set(seen(block)), block
                assert {i for i, _ in real} == set(range(*block.queries)), block
                assert {j for _, j in real} == set(range(*block.keys)), block
            pairs += len(expected)
        assert pairs == visible_pairs(spans(24, ranks, rank, order), 24, window=window)


def test_each_rank_pair_takes_one_call_in_every_order():
    """The diagonal is one causal call, whatever the order; zigzag needs half of the queries, or half of the keys."""
    assert ring_blocks(16, 2, 1, 1, "zigzag") == [Block((0, 8), (0, 8), "causal")]
    assert ring_blocks(16, 2, 1, 0, "zigzag") == [Block((0, 8), (0, 4), "full")]
    assert ring_blocks(16, 2, 0, 1, "zigzag") == [Block((4, 8), (0, 8), "full")]
    assert ring_blocks(16, 2, 1, 0, "striped") == [Block((0, 8), (0, 8), "causal")]
    assert ring_blocks(16, 2, 0, 1, "striped") == [Block((1, 8), (0, 7), "causal")]
    assert ring_blocks(16, 2, 1, 0, "contiguous") == [Block((0, 8), (0, 8), "full")]
    assert ring_blocks(16, 2, 0, 1, "contiguous") == []
    assert ring_blocks(16, 2, 0, 1, "zigzag", causal=False) == [Block((0, 8), (0, 8), "full")]


def test_documents_that_are_cut_by_themselves_need_no_masks():
    """The calls of each are those of a sequence of its length, and nobody sees another's."""
    for rank, source in itertools.product(range(2), range(2)):
        found = ring_blocks(24, 2, rank, source, "zigzag", documents=(0, 8, 24))
        first, second = (ring_blocks(length, 2, rank, source, "zigzag") for length in (8, 16))
        moved = [Block((b.queries[0] + 4, b.queries[1] + 4), (b.keys[0] + 4, b.keys[1] + 4), b.mode) for b in second]
        assert found == [*first, *moved]


def test_keys_of_all_ranks_in_their_own_order_are_a_prefix_and_a_diagonal():
    assert blocks([range(8, 12)], [range(16)]) == [Block((0, 4), (0, 8), "full"), Block((0, 4), (8, 12), "causal")]


def test_a_window_belongs_to_causal_attention():
    with pytest.raises(ValueError, match="window of 4 is of earlier keys"):
        ring_blocks(16, 2, 0, 1, "zigzag", causal=False, window=4)


def work(length: int, ranks: int, order: Order, causal: bool = True) -> list[int]:
    """Of each rank, in pairs that are seen."""
    return [visible_pairs(spans(length, ranks, rank, order), length, causal=causal) for rank in range(ranks)]


def computed(length: int, ranks: int, order: Order) -> list[int]:
    """Of each rank, in pairs of its calls, causal ones counted whole."""
    calls = {
        rank: [ring_blocks(length, ranks, rank, source, order) for source in range(ranks)] for rank in range(ranks)
    }
    return [sum(block.pairs for blocks in found for block in blocks) for found in calls.values()]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zigzag_and_striped_are_even_and_contiguous_is_not(ranks: int):
    length = 64 * ranks
    part = length // ranks
    assert work(length, ranks, "contiguous") == [part * (part * r + (part + 1) / 2) for r in range(ranks)]
    assert len(set(work(length, ranks, "zigzag"))) == 1
    assert len(set(computed(length, ranks, "zigzag"))) == 1
    striped = work(length, ranks, "striped")
    assert max(striped) - min(striped) == part * (ranks - 1)
    assert computed(length, ranks, "contiguous") == [part * part * (r + 1) for r in range(ranks)]
    for order in ORDERS:
        assert sum(work(length, ranks, order)) == length * (length + 1) // 2
        assert work(length, ranks, order, causal=False) == [length * part] * ranks
