"""The pipeline that is none: one micro-batch at a time goes through all stages and back.

Layers are spread over ranks because no rank can hold them all, and one rank computes while the others wait for it. A
stage holds one micro-batch. It is what the other schedules are compared with (Huang et al. 2018, figure 2b).
"""

from __future__ import annotations

from fractions import Fraction

from meshwright.schedule.actions import Action


def order(ranks: int, micros: int) -> list[list[Action]]:
    """What each rank computes, in order."""
    return [
        [Action(kind, rank, micro) for micro in range(micros) for kind in ("forward", "backward")]
        for rank in range(ranks)
    ]


def bubble(ranks: int) -> Fraction:
    """The part of the time in which ranks wait, for equal stages: (p − 1)/p."""
    return Fraction(ranks - 1, ranks)
