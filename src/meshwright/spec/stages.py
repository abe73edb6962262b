"""How a model's blocks are cut into pipeline stages: contiguous runs, the embedding before the first, the head behind
the last.

Pure: numbers of blocks and costs in, runs of blocks out. What a block costs is in predict/stages.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `index`: blocks [start, stop) of the model. first: the embedding is before them; last: the head behind."""

    index: int
    start: int
    stop: int
    first: bool
    last: bool

    @property
    def blocks(self) -> range:
        return range(self.start, self.stop)

    @property
    def whole(self) -> bool:
        """Whether it is all of the model."""
        return self.first and self.last

    def __str__(self) -> str:
        """ "stage 2, blocks 8 to 15"."""
        run = f"block {self.start}" if len(self.blocks) == 1 else f"blocks {self.start} to {self.stop - 1}"
        return f"stage {self.index}, {run}"


def stages(counts: Sequence[int]) -> tuple[Stage, ...]:
    """The stages that have so many blocks each, from the embedding to the head."""
    ends = list(accumulate(counts))
    last = len(counts) - 1
    return tuple(
        Stage(index, end - count, end, index == 0, index == last)
        for index, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


@cache
def balanced(costs: tuple[float, ...], parts: int, *, before: float = 0.0, after: float = 0.0) -> tuple[int, ...]:
    """Numbers of blocks of `parts` stages, one block each at least, so that the dearest stage is as cheap as can be.

    costs: of each block; before: of the embedding, which the first stage has too; after: of the head. Of the cuts whose
    dearest stage costs the same, one with the least sum of squares, and then with the shortest first stages, which
    hold the most micro-batches. At least as many blocks as parts.
    """
    number = len(costs)
    assert 1 <= parts <= number, (parts, number)
    ends = [0.0, *accumulate(costs)]

    def cost(start: int, stop: int) -> float:
        return ends[stop] - ends[start] + before * (start == 0) + after * (stop == number)

    # The dearest stage is one of these runs.
    candidates = sorted({cost(start, stop) for start in range(number) for stop in range(start + 1, number + 1)})
    slack = 1 + 1e-12  # sums in another order differ by rounding
    most = (
        candidates[bisect_left(candidates, True, key=lambda cap: _fewest(cost, number, cap * slack) <= parts)] * slack
    )
    # best[start]: sum of squares and numbers of blocks of the stages that are left, from block `start` on.
    best: dict[int, tuple[float, tuple[int, ...]]] = {number: (0.0, ())}
    for left in range(1, parts + 1):
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start in range(number):
            for stop in range(start + 1, number + 1):
                mine = cost(start, stop)
                if mine > most:
                    break
                if stop in best and len(best[stop][1]) == left - 1:
                    squares, counts = best[stop]
                    option = (squares + mine * mine, (stop - start, *counts))
                    if start not in found or _better(option, found[start]):
                        found[start] = option
        best = found
    return best[0][1]


def _better(option: tuple[float, tuple[int, ...]], known: tuple[float, tuple[int, ...]]) -> bool:
    if abs(option[0] - known[0]) > 1e-9 * max(known[0], 1e-300):
        return option[0] < known[0]
    return option[1] < known[1]


def _fewest(cost: object, number: int, cap: float) -> float:
    """Stages that are needed where none may cost more than `cap`; infinity where a block alone does."""
    assert callable(cost)
    start, used = 0, 0
    while start < number:
        stop = start
        while stop < number and cost(start, stop + 1) <= cap:
            stop += 1
        if stop == start:
            return float("inf")
        start, used = stop, used + 1
    return used
