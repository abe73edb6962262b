"""A closed form for the least that a pipeline's step takes, for many layouts at once.

A search orders layouts by it, and simulates from the least on, until no bound is below the best that it has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshwright.predict.cost.links import Array, Numbers


class Stages(NamedTuple):
    """Seconds of each stage of a pipeline, by stage along the last axis.

    forward, backward: of a micro-batch. send: of a message to a neighbour. reduce: what is left to reduce behind the
    last backward. step: of the rank whose first stage it is.
    """

    forward: Array
    backward: Array
    send: Array
    reduce: Array
    step: Array


def bound(stages: Stages, ranks: Sequence[int], micros: Numbers) -> Array:
    """Seconds that no schedule of whole backwards goes below; ranks: which has each stage.

    A rank computes nothing before a micro-batch has come through the stages before its first; then all micro-batches go
    through all that it has; and behind its last backward that micro-batch goes back through the stages before. The same
    holds for each stage alone. Where gradients are reduced behind a stage's last backward, the step waits for that too.
    """
    forward, send = stages.forward, stages.send
    number = len(ranks)
    crosses = [one != other for one, other in pairwise(ranks)]
    alone = forward + stages.backward
    least = np.zeros(np.broadcast_shapes(forward.shape[:-1], np.shape(micros)))
    there = np.zeros(forward.shape[:-1])  # until a micro-batch comes to the stage
    seen: set[int] = set()
    for stage in range(number):
        mine = [other for other in range(number) if ranks[other] == ranks[stage]]
        work = alone[..., stage] if ranks[stage] in seen else sum(alone[..., other] for other in mine)
        seen.add(ranks[stage])
        least = np.maximum(least, _behind(stages, crosses, stage, there + micros * work))
        if stage < number - 1:
            there = there + forward[..., stage] + send[..., stage] * crosses[stage]
    total: Array = least + stages.step.max(axis=-1)
    return total


def _behind(stages: Stages, crosses: Sequence[bool], stage: int, at: Array) -> Array:
    """Seconds until everything is reduced, where the last backward of `stage` ends `at`."""
    least = at + stages.reduce[..., stage]
    for earlier in range(stage - 1, -1, -1):
        at = at + stages.send[..., earlier + 1] * crosses[earlier] + stages.backward[..., earlier]
        least = np.maximum(least, at + stages.reduce[..., earlier])
    return least
