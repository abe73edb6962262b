"""GPipe: all micro-batches go forward, then all go backward (Huang et al. 2018, figure 2c).

Ranks wait while the pipeline fills and while it drains, (p − 1)/(m + p − 1) of the time, so micro-batches should be
many; but each stage holds all m of them. The paper therefore computes activations again and keeps each micro-batch's
stage input alone.

Its figure takes micro-batches backward in reverse. Ascending takes as long and holds as much, and gradients are then
summed in the order in which the other schedules sum them, so that all agree bit for bit.
"""

from __future__ import annotations

from fractions import Fraction

from meshwright.schedule.actions import Action


def order(ranks: int, micros: int) -> list[list[Action]]:
    """What each rank computes, in order."""
    return [
        [Action(kind, rank, micro) for kind in ("forward", "backward") for micro in range(micros)]
        for rank in range(ranks)
    ]


def bubble(ranks: int, micros: int) -> Fraction:
    """The part of the time in which ranks wait, for equal stages: (p − 1)/(m + p − 1)."""
    return Fraction(ranks - 1, micros + ranks - 1)
