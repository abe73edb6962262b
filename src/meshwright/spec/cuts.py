"""How one dimension of a tensor is dealt out over the ranks of an axis.

Fused tensors are several side by side (q, k and v of one matrix); each of these blocks is cut by itself, and a rank
holds its parts of all of them one after the other. A dimension that does not divide is filled up: all ranks hold
tensors of one shape, the last ones with elements behind the end of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.spec.boxes import Box


class Run(NamedTuple):
    """`length` places of the local dimension from `local` on are those of the whole one from `start` on."""

    local: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Dimension `dim`, cut over `axis` into `ways` parts, of which this rank holds number `index`.

    blocks: sizes along the dimension of the fused tensors; (n,) where nothing is fused. copies: so many neighbouring
    ranks hold the same part, so that the axis has ways × copies ranks; `copy` is this rank's place among them.
    """

    axis: str
    dim: int
    blocks: tuple[int, ...]
    ways: int
    index: int = 0
    copies: int = 1
    copy: int = 0

    @property
    def width(self) -> int:
        """Places along the dimension that each rank holds, filled up."""
        return sum(-(-block // self.ways) for block in self.blocks)

    @property
    def runs(self) -> tuple[Run, ...]:
        """Where this rank's part lies in the whole; what no run names is filled up."""
        found, local, start = [], 0, 0
        for block in self.blocks:
            each = -(-block // self.ways)
            length = min(each, max(block - self.index * each, 0))
            if length:
                found.append(Run(local, start + self.index * each, length))
            local, start = local + each, start + block
        return tuple(found)

    def at(self, coordinate: int) -> Cut:
        """The cut as the rank at `coordinate` of the axis has it."""
        return replace(self, index=coordinate // self.copies, copy=coordinate % self.copies)


def local_shape(shape: Sequence[int], cuts: Sequence[Cut]) -> tuple[int, ...]:
    """The shape of the part that a rank holds of a tensor of `shape`."""
    local = list(shape)
    for cut in cuts:
        local[cut.dim] = cut.width
    return tuple(local)


def in_whole(box: Box, cuts: Sequence[Cut]) -> Iterator[tuple[Box, Box]]:
    """The boxes of the whole tensor that `box` of the local one stands for, each with its own box within the local.

    None where all of it is filled up.
    """
    pairs = [(box, box)]
    for cut in cuts:
        pairs = [found for pair in pairs for found in _along(cut, *pair)]
    yield from pairs


def _along(cut: Cut, local: Box, whole: Box) -> Iterator[tuple[Box, Box]]:
    low, high = local.offsets[cut.dim], local.offsets[cut.dim] + local.sizes[cut.dim]
    for run in cut.runs:
        first, last = max(low, run.local), min(high, run.local + run.length)
        if first < last:
            yield (
                _with(local, cut.dim, first, last - first),
                _with(whole, cut.dim, run.start + first - run.local, last - first),
            )


def _with(box: Box, dim: int, offset: int, size: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = offset, size
    return Box(tuple(offsets), tuple(sizes))
