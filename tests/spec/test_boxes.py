"""Runs of a tensor as boxes, and boxes that cover a tensor once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.boxes import Box, boxes_of_run, uncovered

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def elements(shape: tuple[int, ...], boxes: list[Box]) -> list[int]:
    """Flat indices that the boxes hold, box after box."""
    grid = np.arange(math.prod(shape)).reshape(shape)
    found: list[int] = []
    for box in boxes:
        cut = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        found += grid[cut].flatten().tolist()
    return found


def test_a_matrix_split_within_a_row():
    shape = (7, 5)
    parts = [list(boxes_of_run(shape, *run)) for run in ((0, 17), (17, 18), (18, 35))]
    assert parts == [
        [Box((0, 0), (3, 5)), Box((3, 0), (1, 2))],
        [Box((3, 2), (1, 1))],
        [Box((3, 3), (1, 2)), Box((4, 0), (3, 5))],
    ]
    assert uncovered(shape, [box for part in parts for box in part]) is None


@given(SHAPES, st.data())
def test_a_run_is_its_boxes_in_order(shape, data):
    start = data.draw(st.integers(0, math.prod(shape)))
    stop = data.draw(st.integers(start, math.prod(shape)))
    boxes = list(boxes_of_run(shape, start, stop))
    assert elements(shape, boxes) == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@given(SHAPES, st.data())
def test_cuts_anywhere_cover_and_a_missing_or_doubled_box_does_not(shape, data):
    total = math.prod(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=3)))
    boxes = [b for run in zip([0, *cuts], [*cuts, total], strict=True) for b in boxes_of_run(shape, *run)]
    assert uncovered(shape, data.draw(st.permutations(boxes))) is None
    chosen = data.draw(st.sampled_from(boxes))
    without = [box for box in boxes if box is not chosen]
    assert "elements are there" in uncovered(shape, without)
    assert uncovered(shape, [*boxes, chosen]) is not None
    # as many elements as there should be, but one twice
    if len(boxes) > 1 and len({box.numel for box in boxes}) < len(boxes):
        twin = next(b for b in boxes if any(c.numel == b.numel and c != b for c in boxes))
        other = next(c for c in boxes if c.numel == twin.numel and c != twin)
        assert "overlap" in uncovered(shape, [twin if box == other else box for box in boxes])


@pytest.mark.parametrize(
    "box", [Box((0, 4), (1, 2)), Box((-1, 0), (1, 1)), Box((0,), (1,)), Box((0, 0), (0, 5)), Box((7, 0), (1, 1))]
)
def test_a_box_outside_is_named(box):
    assert "outside" in uncovered((7, 5), [box])


@given(SHAPES, st.data())
def test_overlaps(shape, data):
    def draw() -> Box:
        starts = [data.draw(st.integers(0, n - 1)) for n in shape]
        return Box(tuple(starts), tuple(data.draw(st.integers(1, n - s)) for s, n in zip(starts, shape, strict=True)))

    a, b = draw(), draw()
    both = set(elements(shape, [a])) & set(elements(shape, [b]))
    found = a.overlap(b)
    assert (set(elements(shape, [found])) if found is not None else set()) == both


@given(SHAPES, st.data())
def test_a_box_seen_from_one_that_holds_it(shape, data):
    """Cut out of the outer box, it is the elements that it is of the whole."""

    def within(outer: Box) -> Box:
        spans = [
            (low, data.draw(st.integers(low + 1, size)) - low)
            for size in outer.sizes
            for low in [data.draw(st.integers(0, size - 1))]
        ]
        moved = tuple(o + low for o, (low, _) in zip(outer.offsets, spans, strict=True))
        return Box(moved, tuple(size for _, size in spans))

    outer = within(Box((0,) * len(shape), shape))
    inner = within(outer)
    held = elements(shape, [outer])
    assert [held[i] for i in elements(outer.sizes, [inner.seen_from(outer)])] == elements(shape, [inner])
