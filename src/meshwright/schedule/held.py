"""What a rank holds at most as it works off its list: micro-batches on its stages, and buffers of messages.

Forward adds a micro-batch to its stage, and backward takes it away: where it is in two parts, that for the weights.
A rank with several stages seldom holds most of each at once, so what is wanted is all its counts at the moments at
which it is fullest, which is before a backward that follows a forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from meshwright.schedule.actions import Schedule


class Posted(NamedTuple):
    """Receives that are posted and whose message is not used yet."""

    activations: int
    gradients: int


class Held(NamedTuple):
    """Micro-batches on each of a rank's stages at its fullest moments, those that none exceeds in every stage; and the
    most receives of each kind."""

    together: tuple[tuple[int, ...], ...]
    posted: Posted


def held(schedule: Schedule, rank: int) -> Held:
    """What a rank holds at most, of a schedule that can be run."""
    stages = schedule.of_rank(rank)
    place = {stage: index for index, stage in enumerate(stages)}
    now = [0] * len(stages)
    fullest: set[tuple[int, ...]] = set()
    activations, gradients = _Buffers(), _Buffers()
    far_before = [stage for stage in stages if stage and stage - 1 not in place]
    far_behind = [stage for stage in stages if stage + 1 < len(schedule.stages) and stage + 1 not in place]
    grown = False
    for kind, stage, _ in schedule.ranks[rank]:
        if kind == "forward":
            now[place[stage]] += 1
            grown = True
            activations.now -= stage in far_before
        elif kind == "recv_activations":
            activations.post()
        elif kind == "recv_gradients":
            gradients.post()
        elif kind in ("backward", "backward_input", "backward_weight"):
            if kind != "backward_weight":
                gradients.now -= stage in far_behind
            if kind != "backward_input":
                if grown:
                    fullest.add(tuple(now))
                grown = False
                now[place[stage]] -= 1
    return Held(tuple(sorted(_unexceeded(fullest), reverse=True)), Posted(activations.most, gradients.most))


def peaks(schedule: Schedule, ranks: Iterable[Held]) -> tuple[int, ...]:
    """For each stage, the most micro-batches that it holds."""
    found = [0] * len(schedule.stages)
    for rank, each in enumerate(ranks):
        for index, stage in enumerate(schedule.of_rank(rank)):
            found[stage] = max(counts[index] for counts in each.together)
    return tuple(found)


class _Buffers:
    now = 0
    most = 0

    def post(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)


def _unexceeded(counts: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those that no other reaches in every stage. Of different counts with one sum none reaches another, so each is
    compared with those of a larger sum alone; with many chunks, hundreds have the largest."""
    kept: list[tuple[int, ...]] = []
    total = 0
    larger: list[tuple[int, ...]] = []
    for each in sorted(counts, key=sum, reverse=True):
        if sum(each) != total:
            total, larger = sum(each), list(kept)
        if not any(all(a <= b for a, b in zip(each, other, strict=True)) for other in larger):
            kept.append(each)
    return kept
