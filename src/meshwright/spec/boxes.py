"""Boxes: the rectangular parts of a tensor that ranks hold and checkpoints store.

A ZeRO shard is a run of a flat buffer and ends anywhere in a parameter, so what it holds of one is no box but a few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """The elements [o, o + s) along each dimension. A tensor without dimensions has one box, of no dimensions."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """What both hold, or None."""
        starts = [max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True)]
        stops = [
            min(a + s, b + t) for a, s, b, t in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(tuple(starts), sizes) if all(size > 0 for size in sizes) else None

    def seen_from(self, other: Box) -> Box:
        """The same elements, by their place in `other`, which holds them."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up elements [start, stop) of a tensor in C order, in that order; at most 2·dimensions − 1.

    A run begins with the end of a row, goes on with whole rows and ends with the beginning of one.
    """
    assert 0 <= start <= stop <= math.prod(shape), (shape, start, stop)
    if start == stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, into = divmod(start, row)
    last, beyond = divmod(stop, row)
    if first == last:
        yield from _within(first, shape, into, beyond)
        return
    if into:
        yield from _within(first, shape, into, row)
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if beyond:
        yield from _within(last, shape, 0, beyond)


def _within(row: int, shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    for inner in boxes_of_run(shape[1:], start, stop):
        yield Box((row, *inner.offsets), (1, *inner.sizes))


def uncovered(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """None where `boxes` hold every element of a tensor of `shape` exactly once; else what is wrong, in words."""
    for box in boxes:
        inside = len(box.offsets) == len(shape) == len(box.sizes) and all(
            o >= 0 and s > 0 and o + s <= n for o, s, n in zip(box.offsets, box.sizes, shape, strict=True)
        )
        if not inside:
            return f"the box at {list(box.offsets)} of {list(box.sizes)} lies outside of {list(shape)}"
    # Sorted along the longest dimension, a box can only meet those that begin before it ends.
    axis = max(range(len(shape)), key=lambda d: shape[d], default=None)
    ordered = sorted(boxes, key=lambda box: box.offsets[axis] if axis is not None else 0)
    open_: list[Box] = []
    for box in ordered:
        if axis is None:
            open_ = [*open_, box]
            continue
        open_ = [b for b in open_ if b.offsets[axis] + b.sizes[axis] > box.offsets[axis]]
        met = next((b for b in open_ if b.overlap(box)), None)
        if met is not None:
            return f"the boxes at {list(met.offsets)} and {list(box.offsets)} overlap"
        open_.append(box)
    found, wanted = sum(box.numel for box in boxes), math.prod(shape)
    return None if found == wanted else f"{found:,} of {wanted:,} elements are there"
