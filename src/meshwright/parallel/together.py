"""Several sharded stages of one rank, seen as one: what an optimizer, a checkpoint or a proof asks of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from meshwright.parallel.flat import Piece, Unit
from meshwright.parallel.placement import Placement
from meshwright.parallel.zero import Sharded


class ShardedStages:
    """The units of `stages`, in the order of forward; all of them laid out over the same ranks with the same options.

    Each call is that of every stage in turn; see Sharded. Steps and passes are a stage's own.
    """

    def __init__(self, stages: Sequence[Sharded]) -> None:
        self.stages = tuple(stages)
        self._first = self.stages[0]
        self._of = {unit: stage for stage in self.stages for unit in stage.units}

    @property
    def units(self) -> list[Unit]:
        return list(self._of)

    @property
    def stage(self) -> int:
        """That of ZeRO."""
        return self._first.stage

    @property
    def device(self) -> torch.device:
        return self._first.device

    @property
    def every_rank_computes(self) -> bool:
        return self._first.every_rank_computes

    @property
    def copies(self) -> tuple[int, int]:
        return self._first.copies

    @property
    def placements(self) -> dict[str, Placement]:
        return {name: placement for stage in self.stages for name, placement in stage.placements.items()}

    def begin(self) -> None:
        for stage in self.stages:
            stage.begin()

    def finish(self) -> Iterator[Unit]:
        # All of them now, so that a wrong order of calls shows before the first unit is looked at.
        sums = [stage.finish() for stage in self.stages]
        return (unit for of_stage in sums for unit in of_stage)

    def publish(self, unit: Unit) -> None:
        self._of[unit].publish(unit)

    def settle(self) -> None:
        for stage in self.stages:
            stage.settle()

    def fill(self, value: Callable[[Piece, Tensor], None]) -> None:
        for stage in self.stages:
            stage.fill(value)

    def whole(self, shard: Callable[[Unit], Tensor | None], what: str) -> Iterator[tuple[Placement, Tensor]]:
        for stage in self.stages:
            yield from stage.whole(shard, what)

    def named_parameters(self) -> Iterator[tuple[Placement, Tensor]]:
        for stage in self.stages:
            yield from stage.named_parameters()

    def named_gradients(self) -> Iterator[tuple[Placement, Tensor]]:
        for stage in self.stages:
            yield from stage.named_gradients()

    def storages(self) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {}
        for stage in self.stages:
            for name, tensors in stage.storages().items():
                found.setdefault(name, []).extend(tensors)
        return found
