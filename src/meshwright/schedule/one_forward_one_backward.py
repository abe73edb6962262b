"""1F1B: one forward, one backward, in turn (PipeDream-Flush, Narayanan et al. 2020; Megatron-LM, 2021).

A stage goes backward with a micro-batch as soon as it can: it first takes as many forward as there are stages behind
it, then alternates, and at the end takes the rest backward. It waits as long as GPipe, and holds min(m, p − s)
micro-batches on stage s, however many there are.
"""

from __future__ import annotations

from fractions import Fraction

from meshwright.schedule import gpipe
from meshwright.schedule.actions import Action


def order(ranks: int, micros: int) -> list[list[Action]]:
    """What each rank computes, in order."""
    return [_of_stage(stage, min(ranks - stage - 1, micros), micros) for stage in range(ranks)]


def _of_stage(stage: int, ahead: int, micros: int) -> list[Action]:
    """ahead: micro-batches that go forward before the first alternation."""
    actions = [Action("forward", stage, micro) for micro in range(ahead)]
    for micro in range(micros - ahead):
        actions.append(Action("forward", stage, ahead + micro))
        actions.append(Action("backward", stage, micro))
    actions += [Action("backward", stage, micro) for micro in range(micros - ahead, micros)]
    return actions


def bubble(ranks: int, micros: int) -> Fraction:
    """The part of the time in which ranks wait, for equal stages: that of GPipe, (p − 1)/(m + p − 1)."""
    return gpipe.bubble(ranks, micros)
