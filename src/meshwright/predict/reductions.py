"""What the reduction of gradients holds beside the gradients themselves: whole gradients on their way, and copies.

At stages 2 and 3 a unit's whole gradients are lent from its first gradient in backward until its reduction is over;
at 0 and 1 a reduction in another dtype has a copy in that. On the CPU a reduce-scatter is an all-to-all into one more
copy, and what was lent once is kept for the next time, so that it is there in the whole step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.predict.states import gradient_bytes, padded, reduce_bytes, shards
from meshwright.spec.batch import micro_steps
from meshwright.spec.layout import Layout
from meshwright.spec.run import UNDER_WAY, RunSpec
from meshwright.spec.stages import Stage


def kept(
    run: RunSpec, layout: Layout, others: Sequence[Sequence[int]] = (), stages: Sequence[Stage | None] = (None,)
) -> int:
    """Bytes of the buffers that a rank on the CPU keeps for reductions, once a few steps have gone by.

    others: those that layers lend and give back, by what is out at once: one of the hidden states where sequence
    parallelism scatters them, and attention's over context ranks. stages: the rank's, each of which reduces by itself
    and lends from the same pool; None: the whole model.
    """
    pool = _Pool()
    micros = micro_steps(run.batch.sequences, layout.data_ranks, run.batch.micro) if layout.zero >= 2 else 1
    orders = [(wholes(run, layout, stage), waiting(run, layout, stage)) for stage in reversed(stages)]
    for _ in range(3):
        under_way: list[deque[list[int]]] = [deque() for _ in orders]
        for _ in range(min(micros, 2)):
            for (order, early), mine in zip(orders, under_way, strict=True):
                while mine:  # backward begins by ending what the last one left
                    pool.give(mine.popleft())
                waits = [pool.take(early)] if early else []
                for place, size in enumerate(order):
                    for together in others:
                        pool.give([pool.take(need) for need in together])
                    lent = waits if waits and place == len(order) - 1 else None
                    _reduce(run, layout, size, pool, mine, lent)
        for mine in under_way:
            while mine:
                pool.give(mine.popleft())
    return sum(pool.free)


def on_their_way(run: RunSpec, layout: Layout, order: Sequence[int], place: int | None) -> int:
    """Bytes lent on an accelerator while backward is in the unit at `place` of `order`, the `wholes`.

    None: before its first gradient, where the last micro-batch's last reductions may still be under way.
    """
    if place is None:
        again = layout.zero >= 2 and micro_steps(run.batch.sequences, layout.data_ranks, run.batch.micro) > 1
        return sum(order[-UNDER_WAY:]) if again else 0
    if layout.zero < 2 and reduce_bytes(run) == gradient_bytes(run):
        return 0
    return sum(order[max(place - UNDER_WAY, 0) : place + (layout.zero >= 2)])


def wholes(run: RunSpec, layout: Layout, stage: Stage | None = None) -> list[int]:
    """Bytes of each unit's whole gradients in the dtype of the reduction, in the order of backward; of a pipeline's
    `stage`, or of the whole model."""
    return [size * reduce_bytes(run) for size in reversed(padded(run, layout, stage).values())]


def waiting(run: RunSpec, layout: Layout, stage: Stage | None) -> int:
    """Bytes of whole gradients that are lent from a stage's head on, for a unit whose turn to be reduced is the last:
    those of a tied table on a pipeline's last stage, at ZeRO 2 and 3."""
    if layout.zero < 2 or stage is None or stage.whole or not (stage.last and run.model.is_tied):
        return 0
    return wholes(run, layout, stage)[-1]


def _reduce(
    run: RunSpec, layout: Layout, size: int, pool: _Pool, under_way: deque[list[int]], lent: list[int] | None
) -> None:
    """One reduction as parallel/reducer.py goes about it. lent: where its whole gradients are there already."""
    if lent is None:
        lent = [pool.take(size)] if layout.zero >= 2 else []
    scatters = layout.zero > 0 and shards(layout) > 1
    narrows = layout.zero < 2 and reduce_bytes(run) != gradient_bytes(run)
    if not (lent or scatters or narrows):
        return
    while len(under_way) >= UNDER_WAY:
        pool.give(under_way.popleft())
    if narrows:
        lent.append(pool.take(size))
    if scatters:
        lent.insert(0, pool.take(size))  # given back first
    under_way.append(lent)


@dataclass
class _Pool:
    """The rule by which comm/scratch.py lends: the smallest buffer that fits, else a new one for the largest."""

    free: list[int] = field(default_factory=list)

    def take(self, need: int) -> int:
        self.free.sort()
        for index, size in enumerate(self.free):
            if size >= need:
                return self.free.pop(index)
        if self.free:
            self.free.pop()
        return need

    def give(self, sizes: list[int]) -> None:
        self.free += sizes
