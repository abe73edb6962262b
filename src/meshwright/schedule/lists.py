"""What one rank's list must be by itself: complete, without doubles, and in an order that can be computed.

What is done of a micro-batch on a stage is a few bits: each kind of action needs some of them and sets some.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.schedule.actions import ONCE, Action, Kind, Schedule, words
from meshwright.schedule.errors import ScheduleError

FORWARD, INPUT, WEIGHT = 1, 2, 4  # forward, and backward for the input and for the weights
ACTIVATIONS, GRADIENTS = 8, 16  # there or asked for: what forward needs of the stage before, backward of the one behind
SENT, RETURNED = 32, 64  # activations to the stage behind, gradients to the one before
ALL = FORWARD | INPUT | WEIGHT


def check_lists(schedule: Schedule) -> None:
    """Prove each rank's list; raises ScheduleError."""
    for rank in range(schedule.pipeline_ranks):
        _List(schedule, rank).check()


class _Rule(NamedTuple):
    """The bits that an action needs and sets; those it sets of a neighbouring stage on the same rank, and which."""

    needs: int
    sets: int
    gives: int = 0
    to: int = 0


class _List:
    """One rank's list, and what has been done by some place in it."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.rank, self.holders, self.micros = rank, schedule.stages, schedule.micros
        self.actions = schedule.ranks[rank]
        self.stages = schedule.of_rank(rank)
        self.last = len(schedule.stages) - 1
        self.rules = {stage: self._rules(stage) for stage in self.stages}
        self.done = {stage: bytearray(self.micros) for stage in self.stages}
        self.reduced: set[int] = set()

    def _rules(self, stage: int) -> dict[Kind, _Rule]:
        """What may be done for a stage, and when."""
        forward = _Rule(ACTIVATIONS if stage else 0, FORWARD)
        backward = _Rule(FORWARD | (GRADIENTS if stage < self.last else 0), INPUT)
        rules: dict[Kind, _Rule] = {"backward_weight": _Rule(INPUT, WEIGHT)}
        if stage + 1 in self.stages:
            forward = forward._replace(gives=ACTIVATIONS, to=stage + 1)
        elif stage < self.last:
            rules["send_activations"] = _Rule(FORWARD, SENT)
            rules["recv_gradients"] = _Rule(0, GRADIENTS)
        if stage - 1 in self.stages:
            backward = backward._replace(gives=GRADIENTS, to=stage - 1)
        elif stage:
            rules["send_gradients"] = _Rule(INPUT, RETURNED)
            rules["recv_activations"] = _Rule(0, ACTIVATIONS)
        whole = backward._replace(sets=INPUT | WEIGHT)
        return rules | {"forward": forward, "backward": whole, "backward_input": backward}

    def check(self) -> None:
        rules, micros, done = self.rules, self.micros, self.done
        for position, action in enumerate(self.actions):
            kind, stage, micro = action
            if micro is None or stage not in rules or kind not in rules[stage] or not 0 <= micro < micros:
                self._check_once(position, action)
                continue
            needs, sets, gives, to = rules[stage][kind]
            before = done[stage][micro]
            if before & sets:
                raise self._wrong(position, f": {self._first(position, action)} has done that; leave one out")
            if needs & ~before:
                raise self._too_soon(position, self._needed(action, needs & ~before))
            done[stage][micro] = before | sets
            if gives:
                done[to][micro] |= gives
        self._check_end()

    def _check_once(self, position: int, action: Action) -> None:
        """Reduce and step, and what cannot be done here at all."""
        kind, stage, micro = action
        if stage not in self.stages:
            where = f"on rank {self.holders[stage]}" if 0 <= stage <= self.last else "nowhere"
            own = f"stage{'s' * (len(self.stages) > 1)} {', '.join(map(str, self.stages))}"
            raise self._wrong(position, f": stage {stage} is {where}; rank {self.rank} has {own}")
        if kind not in ONCE and kind not in self.rules[stage]:
            raise self._wrong(position, f": {self._no_message(action)}; leave it out")
        if (micro is None) != (kind in ONCE) or not 0 <= (micro or 0) < self.micros:
            right = "is of the whole batch; give none" if kind in ONCE else f"use 0 to {self.micros - 1}"
            raise self._wrong(position, f": micro-batch {micro}: {right}")
        if kind == "step":
            if position + 1 < len(self.actions):
                raise self._wrong(position, " is not the last, where all ranks meet; put it at the end")
            if stage != self.stages[0]:
                raise self._wrong(position, f" is of stage {stage}; use the rank's first, {self.stages[0]}")
        else:
            if stage in self.reduced:
                raise self._wrong(position, f": {self._first(position, action)} has done that; leave one out")
            for backward in self._backwards_left(stage):
                raise self._too_soon(position, backward)
            self.reduced.add(stage)

    def _check_end(self) -> None:
        for stage in self.stages:
            for micro in range(self.micros):
                if not self.done[stage][micro] & FORWARD:
                    raise self._missing(Action("forward", stage, micro))
            for backward in self._backwards_left(stage):
                raise self._missing(backward)
            if stage not in self.reduced:
                raise self._missing(Action("reduce", stage, None))
        if not self.actions or self.actions[-1].kind != "step":
            raise self._missing(Action("step", self.stages[0], None))

    def _backwards_left(self, stage: int) -> Iterator[Action]:
        for micro, done in enumerate(self.done[stage]):
            if not done & WEIGHT:
                parts = done & INPUT or Action("backward_weight", stage, micro) in self.actions
                yield Action("backward_weight" if parts else "backward", stage, micro)

    # -- in words ---------------------------------------------------------------------------------------------------

    def _wrong(self, position: int, what: str) -> ScheduleError:
        return ScheduleError(f"rank {self.rank}, action {position} ({words(self.actions[position])}){what}")

    def _too_soon(self, position: int, needed: Action) -> ScheduleError:
        where = "this rank has none; put it in"
        if needed in self.actions:
            where = f"it is action {self.actions.index(needed)}; move it up"
        return self._wrong(position, f" needs the {words(needed)} before it: {where}")

    def _missing(self, action: Action) -> ScheduleError:
        where = {"reduce": " behind the stage's last backward", "step": " at the end"}.get(action.kind, "")
        return ScheduleError(f"rank {self.rank} has no {words(action)}; put it in{where}")

    def _first(self, position: int, action: Action) -> str:
        """Which earlier action has done what this one does again: a backward may have been done in parts."""
        alike: set[str] = {action.kind}
        if action.kind == "backward":
            alike |= {"backward_input", "backward_weight"}
        elif action.kind in ("backward_input", "backward_weight"):
            alike |= {"backward"}
        earlier = (place for place in range(position) if self.actions[place].kind in alike)
        first = next(place for place in earlier if self.actions[place][1:] == action[1:])
        return f"action {first} ({words(self.actions[first])})"

    def _needed(self, action: Action, missing: int) -> Action:
        """What would set a bit that an action misses."""
        kind, stage, micro = action
        if missing & FORWARD:
            return Action("forward", stage, micro)
        if missing & INPUT:
            return Action("backward_input", stage, micro) if kind == "backward_weight" else self._back(stage, micro)
        if missing & ACTIVATIONS:
            near = stage - 1 in self.stages
            return Action("forward", stage - 1, micro) if near else Action("recv_activations", stage, micro)
        return self._back(stage + 1, micro) if stage + 1 in self.stages else Action("recv_gradients", stage, micro)

    def _back(self, stage: int, micro: int | None) -> Action:
        """What makes the gradient of a stage's input in this list."""
        part = Action("backward_input", stage, micro)
        return part if part in self.actions else Action("backward", stage, micro)

    def _no_message(self, message: Action) -> str:
        stage = message.stage
        other = stage + (1 if message.kind in ("send_activations", "recv_gradients") else -1)
        if other in self.stages:
            return f"stages {stage} and {other} are both on rank {self.rank} and need no messages"
        return f"stage {stage} is the {'first' if stage == 0 else 'last'}"
