"""How long a step takes on a cluster, every line of it by name: the schedule that the runtime would execute, simulated
with each stage's own times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwright.predict.cost.bound import Stages
from meshwright.predict.cost.constants import Constants
from meshwright.predict.cost.cpu import crowd, stretched
from meshwright.predict.cost.operators import Shard, Written, strides
from meshwright.predict.cost.parts import Block, Parts
from meshwright.predict.cost.stage import Sent, Times, publish, sent, times
from meshwright.predict.flops import model_flops
from meshwright.predict.stages import schedule_of, stages_of
from meshwright.predict.states import gradient_bytes, reduce_bytes, shards
from meshwright.schedule.timeline import simulate
from meshwright.spec.batch import micro_steps
from meshwright.spec.cluster import Cluster, Precision
from meshwright.spec.errors import UserError
from meshwright.spec.layout import STATE_AXES, Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import RunSpec
from meshwright.spec.stages import Stage

ROUNDING = 1e-12
"""Of a step: what is left where sums of the same times are taken from each other."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and where they go on the pipeline rank that computes longest.

    lines: "compute" (forward and backward), "recompute", "optimizer", "bubble", and what computing waits for: "host",
    "tp", "cp", "pp", "zero.gather", "zero.reduce", "zero.publish", "step"; "cores", which they share. They add up to
    `seconds`. low, high: the error band. utilisation: model FLOPs utilisation.
    """

    seconds: float
    lines: dict[str, float]
    utilisation: float
    tokens_per_second: float
    low: float
    high: float

    @property
    def bubble(self) -> float:
        """The bubble's part of the step."""
        return self.lines["bubble"] / self.seconds

    @property
    def exposed(self) -> float:
        """Seconds of communication that computing waits for."""
        own = ("compute", "recompute", "optimizer", "bubble", "host", "cores")
        return sum(time for reason, time in self.lines.items() if reason not in own)


def step_time(
    run: RunSpec, layout: Layout, cluster: Cluster, parts: Parts | None = None, *, length: float | None = None
) -> StepTime:
    """Of `run` with a resolved `layout`; all ranks are charged for the largest part of the batch.

    parts: where many layouts of one run are asked for, the costs they share. length: seconds, where the schedule has
    been simulated already and no ranks share cores. Raises UserError where the cluster has too few devices, and for
    what the schedule cannot take.
    """
    if layout.world > cluster.devices:
        raise UserError(f"layout: {layout.world} ranks on {cluster.devices} devices; use {cluster.devices} or fewer")
    parts = parts or parts_of(run, cluster, layout.world)
    found = _Step(run, layout, parts)
    crowded = crowd(cluster, layout.world)
    if length is not None and crowded == 1:
        return found.told(length, length)
    if layout.pp == 1:
        only = found.times[0]
        length = float(found.micros * (only.forward + only.backward) + only.tail + found.stages.step[0])
        whole = length * crowded
    else:
        timeline = simulate(
            schedule_of(run, layout),
            forward=found.stages.forward.tolist(),
            backward=found.stages.backward.tolist(),
            send=found.stages.send.tolist(),
            reduce=found.stages.reduce.tolist(),
            step=found.stages.step.tolist(),
        )
        length, whole = timeline.length, stretched(timeline, layout.world // layout.pp, crowded, parts.constants.uneven)
    return found.told(length, whole)


def parts_of(run: RunSpec, cluster: Cluster, ranks: int) -> Parts:
    """The costs that all layouts of a run over `ranks` ranks share."""
    return _parts(run.model, run.data.seq_len, run.precision, cluster.model_dump_json(), run.attention, ranks)


@lru_cache(maxsize=8)
def _parts(model: ModelSpec, seq: int, precision: Precision, cluster: str, attention: Written, ranks: int) -> Parts:
    whole = Cluster.model_validate_json(cluster)
    return Parts(model, seq, precision, whole, attention=attention, ranks=ranks)


def _kind(stage: Stage) -> tuple[int, bool, bool]:
    """What a stage's times depend on."""
    return len(stage.blocks), stage.first, stage.last


class _Step:
    """The stages of one layout, and what the lines are made of."""

    def __init__(self, run: RunSpec, layout: Layout, parts: Parts) -> None:
        self.run, self.layout, self.parts = run, layout, parts
        self.micros = micro_steps(run.batch.sequences, layout.data_ranks, run.batch.micro)
        self.every = stages_of(run.model, layout, run.data.seq_len)
        micro = min(run.batch.micro, -(-run.batch.sequences // layout.data_ranks))
        self.shard = Shard.of(layout, micro, max(len(stage.blocks) for stage in self.every))
        self.block, (self.embedding, self.head) = parts.block(self.shard), parts.ends(self.shard)
        alike = {_kind(stage): stage for stage in self.every}
        sent = {kind: self._sent(stage) for kind, stage in alike.items()}
        times = {kind: self._times(stage, sent[kind]) for kind, stage in alike.items()}
        self.sent = [sent[_kind(stage)] for stage in self.every]
        self.times = [times[_kind(stage)] for stage in self.every]
        self.ranks = [range(rank, len(self.every), layout.pp) for rank in range(layout.pp)]
        self.publish = [self._publish(stages) for stages in self.ranks]
        self.message = self._message()
        self.stages = self._stages()

    def pieces(self, stage: Stage) -> list[tuple[int, Block]]:
        """What a stage has, and how often."""
        return [(len(stage.blocks), self.block), (int(stage.first), self.embedding), (int(stage.last), self.head)]

    def _elements(self, stage: Stage) -> int:
        """Parameters of a stage that a tensor rank has."""
        before, inside, after = self.parts.parameters(self.layout.tp)
        tied_twice = stage.first and self.run.model.is_tied
        return inside * len(stage.blocks) + before * stage.first + after * (stage.last and not tied_twice)

    def _sent(self, stage: Stage) -> Sent:
        layout, elements = self.layout, self._elements(stage)
        units = len(stage.blocks) + stage.first + stage.last
        if layout.zero < 2 and layout.zero_join:
            units = max(min(units, elements // layout.zero_join), 1)
        stride = strides(layout)
        return sent(
            self.parts, elements, units, ranks=layout.state_ranks, cut=shards(layout), zero=layout.zero,
            reduce_bytes=reduce_bytes(self.run),
            stride=min((stride[axis] for axis in STATE_AXES if layout.size(axis) > 1), default=1),
        )  # fmt: skip

    def _times(self, stage: Stage, sent: Sent) -> Times:
        pieces = self.pieces(stage)
        forward = sum(times * each.forward for times, each in pieces)
        backward = sum(times * (each.backward + each.recompute) for times, each in pieces)
        return times(forward, backward, sent, zero=self.layout.zero, by_step=self._by_step, constants=self._constants)

    def _publish(self, stages: range) -> float:
        forward = sum(float(self.times[stage].forward) for stage in stages)
        together = Sent(*(np.add.reduce([self.sent[stage][place] for stage in stages]) for place in range(3)))
        by_step, constants = self._by_step, self._constants
        return float(publish(forward, together, zero=self.layout.zero, by_step=by_step, constants=constants))

    @property
    def _by_step(self) -> bool:
        return self.layout.zero_gather == "step"

    @property
    def _constants(self) -> Constants:
        return self.parts.constants

    def _message(self) -> float:
        """Seconds of a message between stages."""
        layout, parts = self.layout, self.parts
        if layout.pp == 1:
            return 0.0
        tokens = self.shard.micro * self.run.data.seq_len // layout.cp
        hidden = tokens * self.run.model.hidden * parts.size
        dealt_out = layout.sp or parts.constants.scattered
        took = float(parts.message(hidden / layout.tp if dealt_out else hidden, strides(layout)["pp"]))
        if parts.constants.scattered and not layout.sp and layout.tp > 1:
            took += float(parts.collective("all_gather", hidden, layout.tp, strides(layout)["tp"]))
        return took

    def _tied(self) -> float:
        """Seconds in which the ends of a pipeline add up the gradients of a tied table."""
        layout, parts = self.layout, self.parts
        if layout.pp == 1 or not self.run.model.is_tied:
            return 0.0
        elements = -(-self.run.model.vocab // layout.tp) * self.run.model.hidden / shards(layout)
        far = strides(layout)["pp"] * (layout.pp - 1)
        return float(parts.collective("all_reduce", elements * gradient_bytes(self.run), 2, far))

    def _stages(self) -> Stages:
        forward = np.array([float(each.forward) for each in self.times])
        backward = np.array([float(each.backward) for each in self.times])
        beside = self.parts.constants.overlap_message
        send = np.full(len(self.every), self.message if beside else 0.0)
        if not beside:  # who sends waits until it has come
            forward[:-1] += self.message
            backward[1:] += self.message
        reduce = np.array([float(each.tail) for each in self.times])
        step = np.zeros(len(self.every))
        for first, stages in enumerate(self.ranks):  # a rank updates all its stages at once, asked for its first
            step[first] = self._update(stages) + self.publish[first]
        return Stages(forward, backward, send, reduce, step)

    def _update(self, stages: range) -> float:
        """Seconds of the optimizer on a rank, and of the sums before it: of the norm, the metrics, and tied tables."""
        elements = sum(self._elements(self.every[stage]) for stage in stages)
        return float(self.parts.optimizer(elements / shards(self.layout))) + self._small() + self._tied()

    def _small(self) -> float:
        """Seconds of the sums of the norm and of the metrics, over all ranks."""
        return 2 * float(self.parts.collective("all_reduce", 8, self.layout.world, 1))

    def told(self, length: float, whole: float) -> StepTime:
        """The lines of a step that takes `whole`, or would take `length` if each rank had a core of its own."""
        layout, run, micros = self.layout, self.run, self.micros
        busy = self.stages.forward + self.stages.backward
        rank = max(range(layout.pp), key=lambda rank: sum(busy[stage] for stage in self.ranks[rank]))
        mine = self.ranks[rank]
        lines = dict.fromkeys(("compute", "recompute", "bubble", "zero.gather", "zero.reduce"), 0.0)
        for stage in mine:
            for often, each in self.pieces(self.every[stage]):
                for reason, time in each.lines.items():
                    lines[reason] = lines.get(reason, 0.0) + micros * often * time
            found = self.times[stage]
            lines["zero.gather"] += micros * float(found.gather)
            lines["zero.reduce"] += micros * float(found.reduce)
        told = sum(float(busy[stage]) * micros for stage in mine)
        lines["pp"] = told - sum(lines.values())
        tail = max(float(self.stages.reduce[stage]) for stage in mine)
        step = float(self.stages.step[rank])
        lines["zero.reduce"] += tail
        lines["zero.publish"] = self.publish[rank]
        lines["optimizer"] = step - self.publish[rank]
        lines["bubble"] = length - told - tail - step
        lines["cores"] = whole - length
        tokens = run.batch.sequences * run.data.seq_len
        needed = model_flops(run.model, seq=run.data.seq_len) * tokens
        error = self.parts.constants.error
        return StepTime(
            seconds=whole,
            lines={reason: time if abs(time) > ROUNDING * whole else 0.0 for reason, time in lines.items()},
            utilisation=needed / (whole * layout.world * self.parts.peak),
            tokens_per_second=tokens / whole,
            low=whole * (1 - error),
            high=whole * (1 + error),
        )
