"""Messages as numbers: a large schedule has hundreds of thousands of them, to be looked up several times each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from meshwright.schedule.actions import Action, Channel, Kind


class Numbers:
    """The number of a message that leaves stage s is s·m + i for activations and (S + s)·m + i for gradients.

    What stages on one rank hand over, and what first and last stages make for nobody, has numbers too.
    """

    def __init__(self, stages: Sequence[int], micros: int) -> None:
        """stages: the rank of each."""
        number = len(stages)
        self.stages, self.micros = number, micros
        self.all = 2 * number * micros
        self.base: dict[Kind, int] = {
            "forward": -1,
            "backward": number + 1,
            "backward_input": number + 1,
            "send_activations": 0,
            "recv_activations": -1,
            "send_gradients": number,
            "recv_gradients": number + 1,
        }
        """(base + stage)·m + micro-batch is what an action sends or receives, or needs for computing."""
        between = [(here, there) for here, there in pairwise(stages)]
        there = [Channel(one, other, "activations") if one != other else None for one, other in between]
        back = [Channel(other, one, "gradients") if one != other else None for one, other in between]
        self.channels: list[Channel | None] = [*there, None, None, *back, None]
        """By base + stage: over which a message goes to another rank, if it does. Stages that need nothing of another
        find None, at −1 and 2S."""

    def send(self, number: int) -> Action:
        leaving, micro = divmod(number, self.micros)
        if leaving < self.stages:
            return Action("send_activations", leaving, micro)
        return Action("send_gradients", leaving - self.stages, micro)

    def receive(self, number: int) -> Action:
        leaving, micro = divmod(number, self.micros)
        if leaving < self.stages:
            return Action("recv_activations", leaving + 1, micro)
        return Action("recv_gradients", leaving - self.stages - 1, micro)
