"""Where in a pipeline most is held: of ranks and stages that are alike one, with what it has in flight.

Stages come in few kinds: the first has the embedding, the last the head, and those between differ by a block at most.
Of ranks whose stages are alike the first has most micro-batches in flight. So of 64 stages four or five say how much
any rank holds. What is in flight follows from the rule of the schedule; tests hold it against the walk of its lists
(predict/flight.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.predict.plan.space import Pipe
from meshwright.schedule.messages import AHEAD
from meshwright.spec.stages import Stage
from meshwright.spec.traffic import SENT_AT_ONCE

Array = NDArray[np.float64]


class Kind(NamedTuple):
    """A stage by what it has: blocks, and the embedding or the head."""

    blocks: int
    first: bool
    last: bool

    @property
    def whole(self) -> bool:
        return self.first and self.last


@dataclass(frozen=True)
class Place:
    """A stage of pipeline rank `rank`, its chunk number `chunk`, among all stages of the rank."""

    pipe: Pipe
    pp: int
    rank: int
    chunk: int
    stage: Kind
    rank_stages: tuple[Kind, ...]

    @property
    def others(self) -> tuple[Kind, ...]:
        """The rank's other stages."""
        return self.rank_stages[: self.chunk] + self.rank_stages[self.chunk + 1 :]


def places(pipe: Pipe, pp: int, stages: Sequence[Stage]) -> list[Place]:
    """Those of a pipeline with these stages, stage s on rank s mod pp, that may hold most."""
    found: dict[tuple[tuple[Kind, ...], Kind], Place] = {}
    seen: set[tuple[Kind, ...]] = set()
    for rank in range(pp):
        mine = tuple(Kind(len(stage.blocks), stage.first, stage.last) for stage in stages[rank::pp])
        if mine in seen:
            continue
        seen.add(mine)
        for chunk, stage in enumerate(mine):  # of alike chunks the last, whose backward begins while most are in flight
            found[mine, stage] = Place(pipe, pp, rank, chunk, stage, mine)
    return list(found.values())


class Flying(NamedTuple):
    """What is in flight beside a backward on a place where that is most, by the number of micro-batches of a step.

    others: micro-batches, one that is on two stages counted twice. messages, spare: hidden states that are received
    and not used or sent and not let go: so many at least, and so many more at most. begun, spare_begun: the same of
    micro-batches whose tokens are there.
    """

    others: Array
    messages: Array
    spare: Array
    begun: Array
    spare_begun: Array


def flying(place: Place, micros: Array) -> Flying:
    """That on `place` of steps of so many micro-batches each."""
    none = np.zeros_like(micros)
    if place.pp == 1:
        return Flying(none, none, none, none + 1, none)
    # How early receives are posted is the generators' affair: by AHEAD one or two more are there than is counted here.
    some, two, early = np.minimum(micros - 1, 1), np.minimum(micros, 2), none + AHEAD
    if place.pipe.schedule == "gpipe":
        return Flying(micros - 1, none if place.stage.last else some + two, early, micros, none)
    if place.pipe.schedule == "1f1b":
        width = np.minimum(micros, place.pp - place.rank)
        if place.stage.last:
            messages = np.minimum(micros - 1, 3)
        else:
            returned = none if place.stage.first else np.minimum(micros - width, 2)
            messages = some + two + returned
        return Flying(width - 1, messages, early, width, np.minimum(early, micros - width))
    return _interleaved(place, micros)


def _interleaved(place: Place, micros: Array) -> Flying:
    """See schedule/interleaved.py: the first backward of a chunk comes behind those of a group on each later chunk.

    Behind two rounds of groups each stage has sent two messages each way; in shorter steps nobody counts them here.
    """
    chunks, pp = place.pipe.chunks, place.pp
    group = np.ceil(micros / np.maximum(micros // pp, 1))
    ahead = 2 * (pp - place.rank - 1) + (chunks - 1) * group
    before = (chunks - 1 - place.chunk) * group
    others = np.minimum(chunks * micros - before, ahead + 1) - 1
    ways = sum((not stage.first) + (not stage.last) for stage in place.rank_stages)
    steady = chunks * micros - ahead - 1 >= 2 * chunks * group
    # Groups that are not of pp shift the lists of neighbours against each other by a few messages.
    loose = 2.0 * (micros % pp > 0)
    sent = float(SENT_AT_ONCE * ways)
    least = np.where(steady, np.maximum(sent - loose, 0), 0.0)
    begun = np.ceil((others + 1) / chunks)
    spare = np.asarray(sent + AHEAD + 1 + loose - least, dtype=np.float64)
    return Flying(others, least, spare, begun, micros - begun)
