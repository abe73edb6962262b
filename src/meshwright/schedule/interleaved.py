"""Interleaved 1F1B: each rank has v stages that are far apart (Narayanan et al. 2021, section 2.2 and figure 4).

Stage s is on rank s mod p, so a micro-batch goes around all ranks v times. A stage has 1/v of the layers, so the
pipeline fills and drains in 1/v of the time; v times as many messages pay for it, and a rank holds more activations.

Micro-batches go forward in groups: a group passes a rank's first stage, then its second, while the next rank is one
micro-batch behind; backward goes the same way through the stages in reverse. A rank takes 2(p − r − 1) + (v − 1)·g
forward before it alternates, g the largest group. Half of the first term would do where messages take no time; with
all of it a message is on its way while a rank computes something else, and waiting grows with its time far more slowly.

The paper's groups are of p, and its micro-batches a multiple of p. All the order needs is that no group is smaller:
then the first micro-batch of a group has come around when the last has passed. So m micro-batches are dealt out evenly
to ⌊m/p⌋ groups, which are the paper's where p divides m, and the bubble is the paper's for every m ≥ p. (A last group
of m mod p would leave ranks waiting for it, with p = 4, v = 2, m = 9 for more than twice as long.) Fewer micro-batches
than ranks are one group, and each way around takes p all the same.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise, zip_longest

from meshwright.schedule.actions import Action


def order(ranks: int, micros: int, chunks: int) -> list[list[Action]]:
    """What each rank computes, in order."""
    groups = _groups(ranks, micros)
    forward = [(chunk, micro) for group in groups for chunk in range(chunks) for micro in group]
    backward = [(chunk, micro) for group in groups for chunk in reversed(range(chunks)) for micro in group]
    return [
        _of_rank(
            [Action("forward", chunk * ranks + rank, micro) for chunk, micro in forward],
            [Action("backward", chunk * ranks + rank, micro) for chunk, micro in backward],
            ahead=2 * (ranks - rank - 1) + (chunks - 1) * len(groups[0]),
        )
        for rank in range(ranks)
    ]


def _groups(ranks: int, micros: int) -> list[range]:
    """Micro-batches in groups of `ranks` or a few more, the larger ones first."""
    number = max(micros // ranks, 1)
    each, more = divmod(micros, number)
    starts = [group * each + min(group, more) for group in range(number + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _of_rank(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """`ahead` of the forwards, then one forward and one backward in turn, then the other backwards."""
    actions = forward[:ahead]
    for pair in zip_longest(forward[ahead:], backward):
        actions += [action for action in pair if action is not None]
    return actions


def bubble(ranks: int, micros: int, chunks: int) -> Fraction:
    """The part of the time in which ranks wait, for equal stages: (p − 1)/(v·m + p − 1), as in the paper, for m ≥ p.

    With fewer micro-batches than ranks the first goes around v times, and the others follow it: m·v of m − 1 + v·p.
    """
    busy = chunks * micros
    return 1 - Fraction(busy, max(busy + ranks, chunks * ranks + micros) - 1)
