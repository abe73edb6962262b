"""How a dimension is dealt out: parts cover the whole once, whatever is fused, filled up or held twice."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.boxes import Box, boxes_of_run, uncovered
from meshwright.spec.cuts import Cut, Run, in_whole, local_shape


def everything(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def values(whole: np.ndarray, box: Box) -> np.ndarray:
    return whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]


def part(whole: np.ndarray, cuts: list[Cut]) -> np.ndarray:
    """This rank's part, −1 where it is filled up."""
    local = np.full(local_shape(whole.shape, cuts), -1)
    for inner, outer in in_whole(everything(local.shape), cuts):
        target = values(local, inner)
        assert (target == -1).all()
        target[...] = values(whole, outer)
    return local


def test_a_dimension_that_divides():
    cut = Cut("tp", 1, (6,), 3, index=1)
    assert local_shape((4, 6), [cut]) == (4, 2)
    assert cut.runs == (Run(0, 2, 2),)
    assert list(in_whole(everything((4, 2)), [cut])) == [(Box((0, 0), (4, 2)), Box((0, 2), (4, 2)))]


def test_fused_tensors_are_cut_each_by_itself():
    """q of 8, k of 4 and v of 4 side by side: a rank holds its half of all three, one after the other."""
    whole = np.arange(16)
    parts = [part(whole, [Cut("tp", 0, (8, 4, 4), 2, index=index)]).tolist() for index in (0, 1)]
    assert parts == [[0, 1, 2, 3, 8, 9, 12, 13], [4, 5, 6, 7, 10, 11, 14, 15]]


def test_what_does_not_divide_is_filled_up_behind_each_block():
    whole = np.arange(8)
    parts = [part(whole, [Cut("tp", 0, (5, 3), 2, index=index)]).tolist() for index in (0, 1)]
    assert parts == [[0, 1, 2, 5, 6], [3, 4, -1, 7, -1]]


def test_a_rank_may_hold_nothing_of_the_whole():
    cut = Cut("tp", 0, (3,), 4)
    assert [cut.at(rank).runs for rank in range(4)] == [(Run(0, rank, 1),) for rank in range(3)] + [()]
    assert cut.width == 1
    assert list(in_whole(Box((0, 0), (1, 5)), [cut.at(3)])) == []


def test_neighbours_hold_copies():
    cut = Cut("tp", 0, (4,), 2, copies=2)
    assert [(c.index, c.copy) for c in map(cut.at, range(4))] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert cut.at(2).runs == cut.at(3).runs == (Run(0, 2, 2),)


def test_a_box_within_a_part_is_only_what_it_names():
    """Rows 1 and 2 of a part that has q's and k's row, and one that is filled up, behind each other."""
    cut = Cut("tp", 0, (3, 1), 2, index=1)  # holds [row 2, filled up, filled up]
    assert cut.runs == (Run(0, 2, 1),)
    assert list(in_whole(Box((0, 1), (3, 2)), [cut])) == [(Box((0, 1), (1, 2)), Box((2, 1), (1, 2)))]
    assert list(in_whole(Box((1, 0), (2, 5)), [cut])) == []


CUTS = st.builds(
    lambda blocks, ways, copies: Cut("tp", 0, tuple(blocks), ways, copies=copies),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 3),
)


@given(CUTS, st.integers(0, 1), st.integers(1, 3))
def test_parts_of_all_ranks_cover_the_whole_once(cut, dim, other):
    shape = (sum(cut.blocks), other) if dim == 0 else (other, sum(cut.blocks))
    cut = Cut(cut.axis, dim, cut.blocks, cut.ways, copies=cut.copies)
    ranks = [cut.at(rank) for rank in range(cut.ways * cut.copies)]
    shapes = {local_shape(shape, [mine]) for mine in ranks}
    assert len(shapes) == 1  # all ranks hold tensors of one shape
    (local,) = shapes
    firsts = [mine for mine in ranks if mine.copy == 0]
    assert len(firsts) == cut.ways
    assert uncovered(shape, [whole for mine in firsts for _, whole in in_whole(everything(local), [mine])]) is None
    for mine in ranks:  # copies hold what the first holds
        assert mine.runs == firsts[mine.index].runs


@given(CUTS, st.integers(1, 3), st.data())
def test_any_run_of_a_part_is_found_in_the_whole(cut, columns, data):
    """As a ZeRO shard takes it: elements of the part in C order, from anywhere to anywhere."""
    mine = cut.at(data.draw(st.integers(0, cut.ways * cut.copies - 1)))
    whole = np.arange(sum(cut.blocks) * columns).reshape(-1, columns)
    local = part(whole, [mine])
    start = data.draw(st.integers(0, local.size))
    stop = data.draw(st.integers(start, local.size))
    found = np.full_like(local, -1)
    for box in boxes_of_run(local.shape, start, stop):
        for inner, outer in in_whole(box, [mine]):
            assert inner.sizes == outer.sizes
            values(found, inner)[...] = values(whole, outer)
    expected = np.full(local.size, -1)
    expected[start:stop] = local.flatten()[start:stop]
    assert (found.flatten() == expected).all()


@given(CUTS, CUTS)
def test_two_cuts_of_one_tensor(rows, columns):
    columns = Cut("ep", 1, columns.blocks, columns.ways, copies=columns.copies)
    shape = (sum(rows.blocks), sum(columns.blocks))
    boxes = []
    for i in range(rows.ways):
        for j in range(columns.ways):
            cuts = [rows.at(i * rows.copies), columns.at(j * columns.copies)]
            boxes += [whole for _, whole in in_whole(everything(local_shape(shape, cuts)), cuts)]
    assert uncovered(shape, boxes) is None


@pytest.mark.parametrize(("blocks", "ways", "width"), [((101,), 4, 26), ((6, 2, 2), 2, 5), ((1, 1), 3, 2)])
def test_width(blocks, ways, width):
    cut = Cut("tp", 0, blocks, ways)
    assert cut.width == width
    assert local_shape((math.prod((7,)), sum(blocks)), [Cut("tp", 1, blocks, ways)]) == (7, width)
