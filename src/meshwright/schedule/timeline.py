"""When everything in a schedule happens, if one knows how long each thing takes.

A rank works off its list: it computes one thing after another, and waits where an input has not come. Messages and
reductions take their time beside it. A message sets out when it is sent, its receive is posted, and those before it on
its channel have come; both Gloo and NCCL ask for a receive before they send more than a little. The step begins on all
ranks at once, when the last of them has come to it and all its gradients are reduced.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwright.schedule.actions import COMPUTING, RECEIVES, SENDS, Action, Channel, Kind, Schedule
from meshwright.schedule.errors import ScheduleError
from meshwright.schedule.held import held, peaks
from meshwright.schedule.numbers import Numbers
from meshwright.spec.errors import UserError

Duration = float | Sequence[float]
"""Of one action, in any unit of time: one for all stages, or one for each."""


NEVER = -1


class Span(NamedTuple):
    """An action, and when it begins and ends."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each action of a schedule begins and ends: `starts` and `ends` have a time for each action of each rank.

    A send lasts from when it sets out until it has come. busy: for each rank, the time in which it computes or steps.
    held: for each stage, the most micro-batches that it holds.
    """

    schedule: Schedule
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    busy: tuple[float, ...]
    held: tuple[int, ...]

    @property
    def length(self) -> float:
        """From the first action to the end of the last, which is the step."""
        return max(ends[-1] for ends in self.ends)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.length) if self.length else 0

    @cached_property
    def ranks(self) -> tuple[tuple[Span, ...], ...]:
        """For each rank, what it computes, and its step, one after another."""
        return self._spans({*COMPUTING, "step"})

    @cached_property
    def beside(self) -> tuple[tuple[Span, ...], ...]:
        """For each rank, what it sends and reduces meanwhile."""
        return self._spans({*SENDS, "reduce"})

    def _spans(self, kinds: Collection[Kind]) -> tuple[tuple[Span, ...], ...]:
        return tuple(
            tuple(Span(*each) for each in zip(*rank, strict=True) if each[0].kind in kinds)
            for rank in zip(self.schedule.ranks, self.starts, self.ends, strict=True)
        )


def simulate(
    schedule: Schedule,
    *,
    forward: Duration = 1.0,
    backward: Duration = 2.0,
    backward_input: Duration | None = None,
    backward_weight: Duration | None = None,
    send: Duration = 0,
    reduce: Duration = 0,
    step: Duration = 0,
) -> Timeline:
    """Time a schedule that `check` has proven.

    backward_input, backward_weight: by default half of backward each. send: from the stage that sends. step: that of
    a rank's first stage. Raises UserError for durations that are none, ScheduleError where ranks wait for ever.
    """
    stages = len(schedule.stages)
    whole = _each("backward", backward, stages)
    half = [time / 2 for time in whole]
    durations: dict[Kind, list[float]] = {
        "forward": _each("forward", forward, stages),
        "backward": whole,
        "backward_input": half if backward_input is None else _each("backward_input", backward_input, stages),
        "backward_weight": half if backward_weight is None else _each("backward_weight", backward_weight, stages),
    }
    simulation = _Simulation(schedule, durations, _each("send", send, stages), _each("reduce", reduce, stages))
    simulation.run()
    simulation.step(_each("step", step, stages))
    ranks = [held(schedule, rank) for rank in range(schedule.pipeline_ranks)]
    return Timeline(schedule, simulation.starts, simulation.ends, tuple(simulation.busy), peaks(schedule, ranks))


def _each(name: str, duration: Duration, stages: int) -> list[float]:
    """A duration for each stage."""
    each = list(duration) if isinstance(duration, Sequence) else [duration] * stages
    if len(each) != stages:
        raise UserError(f"{name}: {len(each)} durations for {stages} stages; give one for all, or one for each")
    for time in each:
        if not (math.isfinite(time) and time >= 0):
            raise UserError(f"{name}: {time} is no duration; use 0 or more")
    return each


class _Simulation:
    """Ranks are taken as far as they go; what each thing waits for is on record when its turn comes, so the order in
    which they are taken does not matter, and nothing has to be sorted by time."""

    def __init__(
        self, schedule: Schedule, durations: dict[Kind, list[float]], send: list[float], reduce: list[float]
    ) -> None:
        ranks = schedule.pipeline_ranks
        self.schedule, self.durations, self.send, self.reduce = schedule, durations, send, reduce
        self.numbers = numbers = Numbers(schedule.stages, schedule.micros)
        self.sent = [NEVER] * numbers.all  # by message: the place of its send in the sender's list
        self.posted: list[float] = [NEVER] * numbers.all
        self.arrived: list[float] = [NEVER] * numbers.all
        self.free: dict[Channel, float] = dict.fromkeys(schedule.channels, 0)
        self.starts: list[list[float]] = [[0] * len(actions) for actions in schedule.ranks]
        self.ends: list[list[float]] = [[0] * len(actions) for actions in schedule.ranks]
        self.clocks: list[float] = [0] * ranks
        self.busy: list[float] = [0] * ranks
        self.reduced: list[float] = [0] * ranks
        self.at = [0] * ranks
        self.waiting: dict[int, int] = {}  # for a message, the rank
        self.ready = list(range(ranks))

    def run(self) -> None:
        """Work off all lists but their steps."""
        while self.ready:
            self._go_on(self.ready.pop())
        if self.waiting:
            raise ScheduleError(f"ranks {sorted(self.waiting.values())} wait for ever: the schedule was not checked")

    def _go_on(self, rank: int) -> None:
        """Take a rank as far as it goes."""
        base, channels, micros, durations = (
            self.numbers.base,
            self.numbers.channels,
            self.schedule.micros,
            self.durations,
        )
        arrived, posted, sent = self.arrived, self.posted, self.sent
        actions, starts, ends = self.schedule.ranks[rank], self.starts[rank], self.ends[rank]
        clock = self.clocks[rank]
        for position in range(self.at[rank], len(actions)):
            kind, stage, micro = actions[position]
            if micro is None:
                if kind == "reduce":
                    self._reduce(rank, position, clock)
                continue
            message = (base.get(kind, NEVER) + stage) * micros + micro
            if kind in durations:
                if kind != "backward_weight" and channels[message // micros]:
                    come = arrived[message]
                    if come == NEVER:
                        self.waiting[message] = rank
                        self.at[rank] = position
                        break
                    if come > clock:
                        clock = come
                starts[position] = clock
                took = durations[kind][stage]
                self.busy[rank] += took
                ends[position] = clock = clock + took
            else:
                starts[position] = ends[position] = clock
                if kind in RECEIVES:
                    posted[message] = clock
                else:
                    sent[message] = position
                if sent[message] != NEVER and posted[message] != NEVER:
                    self._deliver(message)
        self.clocks[rank] = clock

    def _deliver(self, message: int) -> None:
        """Let a message go that is sent and asked for; both ends have a channel's messages in one order."""
        channel = self.numbers.channels[message // self.schedule.micros]
        assert channel is not None
        rank, position = channel.source, self.sent[message]
        start = max(self.starts[rank][position], self.posted[message], self.free[channel])
        end = start + self.send[self.schedule.ranks[rank][position].stage]
        self.starts[rank][position] = start
        self.ends[rank][position] = self.arrived[message] = self.free[channel] = end
        if message in self.waiting:
            self.ready.append(self.waiting.pop(message))

    def _reduce(self, rank: int, position: int, clock: float) -> None:
        start = max(clock, self.reduced[rank])
        self.starts[rank][position] = start
        end = start + self.reduce[self.schedule.ranks[rank][position].stage]
        self.ends[rank][position] = self.reduced[rank] = end

    def step(self, durations: list[float]) -> None:
        """All ranks at once, when the last of them has come to it."""
        start = max(*self.clocks, *self.reduced)
        for rank, actions in enumerate(self.schedule.ranks):
            took = durations[actions[-1].stage]
            self.starts[rank][-1], self.ends[rank][-1] = start, start + took
            self.busy[rank] += took
