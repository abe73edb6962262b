"""How long the layouts of a grid take: the stages of predict/cost/step.py as arrays, and a closed form that is never
above their simulation.

Stages come in few kinds (places.py), so what a pipeline takes is sums over kinds, each so many times. The bound is the
longest of some paths through the schedule, whatever else happens:

    one stage    the first micro-batch comes through the stages before; all micro-batches go through this stage, or
                 through all stages of its rank; the last one goes back
    round trips  1F1B holds no more than p − s micro-batches on stage s, so one more begins only when the one so many
                 before has gone to the end and come back: with messages that take time this is what limits it
    two phases   GPipe's last stage begins backward when it has done all forwards
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.predict.cost.parts import Parts, Shard
from meshwright.predict.cost.stage import Sent, publish, sent, times
from meshwright.predict.plan.memory import cuts_of
from meshwright.predict.plan.places import Kind
from meshwright.predict.plan.space import Grid, Mesh, Pipe
from meshwright.predict.states import gradient_bytes, reduce_bytes
from meshwright.spec.layout import JOIN, STATE_AXES, Axis
from meshwright.spec.run import RunSpec
from meshwright.spec.stages import Stage

Array = NDArray[np.float64]
Columns = Sequence[tuple[int, int]]
"""Of a grid the forms and micro-batches that matter, by their places."""


class StageTimes(NamedTuple):
    """Seconds by kind of stage, sharding and column: of a micro-batch's passes, and of what is left to reduce; of a
    message between stages, by column; and of the step on the rank where it takes longest, by pipeline, sharding and
    column."""

    forward: Array
    backward: Array
    tail: Array
    send: Array
    step: Array


class Pipeline(NamedTuple):
    """A pipeline of a grid: its schedule, and the kind of each stage by its place in a list of kinds."""

    pipe: Pipe
    ranks: int
    kinds: tuple[int, ...]

    @property
    def by_rank(self) -> list[tuple[int, ...]]:
        """The kinds that each rank has: stages are dealt out in turn."""
        return [self.kinds[rank :: self.ranks] for rank in range(self.ranks)]


def pipelines(grid: Grid, stages: Sequence[Sequence[Stage]]) -> tuple[list[Kind], list[Pipeline]]:
    """The kinds of stages that a grid's pipelines have, and the pipelines. stages: of each pipe."""
    kinds: dict[Kind, int] = {}
    found = []
    for pipe, of_pipe in zip(grid.pipes, stages, strict=True):
        each = [Kind(len(stage.blocks), stage.first, stage.last) for stage in of_pipe]
        places = tuple(kinds.setdefault(kind, len(kinds)) for kind in each)
        found.append(Pipeline(pipe, grid.mesh.pp, places))
    return list(kinds), found


def strides(mesh: Mesh) -> dict[Axis, int]:
    """How many devices neighbours on each axis are apart."""
    found: dict[Axis, int] = {}
    stride = 1
    for axis in mesh.order:
        found[axis] = stride
        stride *= getattr(mesh, axis)
    return found


class TimesOf:
    """The times of all layouts of one run."""

    def __init__(self, run: RunSpec, parts: Parts) -> None:
        self.run, self.parts = run, parts

    def of(self, grid: Grid, kinds: Sequence[Kind], lines: Sequence[Pipeline], columns: Columns) -> StageTimes:
        """Those of a grid's columns, on pipelines of stages of these kinds."""
        parts, mesh = self.parts, grid.mesh
        shards = [shard_of(grid, column) for column in columns]
        forward, backward = self._computing(kinds, shards)
        number, first, last = _counts(kinds)
        before, inside, after = parts.parameters(mesh.tp)
        tied_whole = first * last * self.run.model.is_tied
        elements = inside * number + before * first + after * last * (1 - tied_whole)
        zero = np.array([each.zero for each in grid.shardings]).reshape(1, -1, 1)
        cut = np.array(cuts_of(grid)).reshape(1, -1, 1)
        units = number + first + last
        units = np.where(zero < 2, np.maximum(np.minimum(units, elements // JOIN), 1), units)
        far = strides(mesh)
        stride = min((far[axis] for axis in STATE_AXES if getattr(mesh, axis) > 1), default=1)
        going = sent(
            parts, elements, units, ranks=mesh.dp * mesh.cp, cut=cut, zero=zero, reduce_bytes=reduce_bytes(self.run),
            stride=stride,
        )  # fmt: skip
        found = times(forward, backward, going, zero=zero, by_step=False, constants=parts.constants)
        full = len(kinds), zero.size, len(columns)
        ahead, back, tail = (np.broadcast_to(each, full) for each in (found.forward, found.backward, found.tail))
        step = self._step(grid, lines, ahead, elements, cut, zero, going)
        message = self._message(grid, shards)
        if not parts.constants.overlap_message:
            ahead, back, message = ahead + message * (1 - last), back + message * (1 - first), 0 * message
        return StageTimes(ahead, back, tail, message, step)

    def _computing(self, kinds: Sequence[Kind], shards: Sequence[Shard]) -> tuple[Array, Array]:
        """Seconds of forward and backward, by kind and column, with an axis for shardings between them."""
        blocks, ends = [self.parts.block(shard) for shard in shards], [self.parts.ends(shard) for shard in shards]
        pieces = blocks, [each[0] for each in ends], [each[1] for each in ends]
        forward = backward = np.zeros((len(kinds), 1, len(shards)))
        for count, piece in zip(_counts(kinds), pieces, strict=True):
            forward = forward + count * np.array([each.forward for each in piece])
            backward = backward + count * np.array([each.backward + each.recompute for each in piece])
        return forward, backward

    def _step(
        self,
        grid: Grid,
        lines: Sequence[Pipeline],
        forward: Array,
        elements: Array,
        cut: Array,
        zero: Array,
        going: Sent,
    ) -> Array:
        """A rank updates all its stages at once."""
        parts = self.parts
        together = list(dict.fromkeys(rank for line in lines for rank in line.by_rank))
        counts = np.array([np.bincount(rank, minlength=len(forward)) for rank in together], float)
        of_rank = [np.tensordot(counts, np.broadcast_to(each, (len(forward), *each.shape[1:])), 1) for each in going]
        waits = publish(
            np.tensordot(counts, forward, 1), Sent(*of_rank), zero=zero, by_step=False, constants=parts.constants
        )
        took = parts.optimizer(np.tensordot(counts, elements, 1) / cut) + waits
        slowest = [took[[together.index(rank) for rank in line.by_rank]].max(axis=0) for line in lines]
        return np.array(slowest) + self._sums(grid, cut)

    def _message(self, grid: Grid, shards: Sequence[Shard]) -> Array:
        """Of a message between stages, by column."""
        mesh, parts = grid.mesh, self.parts
        if mesh.pp == 1:
            return np.zeros(len(shards))
        far, scattered = strides(mesh), parts.constants.scattered
        tokens = np.array([shard.micro * self.run.data.seq_len // mesh.cp for shard in shards], float)
        hidden = tokens * self.run.model.hidden * parts.size
        sp = np.array([shard.sp for shard in shards])
        found = parts.message(np.where(sp | scattered, hidden / mesh.tp, hidden), far["pp"])
        if scattered and mesh.tp > 1:
            found = found + np.where(sp, 0.0, parts.collective("all_gather", hidden, mesh.tp, far["tp"]))
        return found

    def _sums(self, grid: Grid, cut: Array) -> Array:
        """Once a step over all ranks, of the norm and of the metrics, and over a pipeline's ends."""
        mesh, parts = grid.mesh, self.parts
        world = mesh.tp * mesh.cp * mesh.dp * mesh.pp
        found = 2 * float(parts.collective("all_reduce", 8, world, 1)) + np.zeros(cut.shape)
        if mesh.pp > 1 and self.run.model.is_tied:
            elements = -(-self.run.model.vocab // mesh.tp) * self.run.model.hidden / cut
            far = strides(mesh)["pp"] * (mesh.pp - 1)
            found = found + parts.collective("all_reduce", elements * gradient_bytes(self.run), 2, far)
        return found


def _counts(kinds: Sequence[Kind]) -> list[Array]:
    """Blocks, embeddings and heads of each kind."""
    return [np.array([getattr(kind, of) for kind in kinds], float).reshape(-1, 1, 1) for of in Kind._fields]


def shard_of(grid: Grid, column: tuple[int, int]) -> Shard:
    """What the cost of a block depends on."""
    mesh, form, micro = grid.mesh, grid.forms[column[0]], grid.micros[column[1]]
    method, order, ulysses = mesh.attend
    return Shard(
        tp=mesh.tp, sp=form.sp, cp=mesh.cp, cp_method=method, cp_order=order, cp_ulysses=ulysses,
        recompute=form.recompute, recompute_keep=form.keep, micro=micro,
    )  # fmt: skip


# -- the bound ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Paths:
    """One row a path: how many stages of each kind it goes through once (there and back), and with every micro-batch;
    and for round trips those behind, by how many micro-batches they are apart. hops: messages each way."""

    pipe: Array
    once: Array
    often: Array
    hops: Array
    trip: Array
    trip_hops: Array
    width: Array


def bounds(stage: StageTimes, lines: Sequence[Pipeline], micros: Array) -> Array:
    """Seconds that the simulation of no layout is below, by pipeline, sharding and column; `micros` by column."""
    both = stage.forward + stage.backward
    if lines[0].ranks == 1:
        (kind,) = lines[0].kinds
        return np.asarray((micros * both[kind] + stage.tail[kind] + stage.step[0])[None])
    paths = _paths(lines, len(both))
    flat = both.reshape(len(both), -1)
    once, often, trip = (
        (rows @ flat).reshape(len(rows), *both.shape[1:]) for rows in (paths.once, paths.often, paths.trip)
    )
    hop = 2 * stage.send
    width, hops, trip_hops = (each[:, None, None] for each in (paths.width, paths.hops, paths.trip_hops))
    trips, rest = np.divmod(micros - 1, np.maximum(width, 1))
    around = (trips + 1) * (trip + trip_hops * hop) + rest * often
    straight = micros * often
    value = once + hops * hop + np.where(width == 0, straight, np.where(trips > 0, around, 0.0))
    starts = np.searchsorted(paths.pipe, np.arange(len(lines)))
    least = np.maximum.reduceat(value, starts, axis=0)
    for place, line in enumerate(lines):
        if line.pipe.schedule == "gpipe":
            least[place] = np.maximum(least[place], _phases(stage, line, micros))
    first = [line.kinds[0] for line in lines]
    return np.asarray(least + stage.tail[first] + stage.step)


def _phases(stage: StageTimes, line: Pipeline, micros: Array) -> Array:
    kinds = np.bincount(line.kinds, minlength=len(stage.forward))
    found = 2 * (line.ranks - 1) * stage.send
    for each in (stage.forward, stage.backward):
        found = found + np.tensordot(kinds, each, 1) + (micros - 1) * each[kinds > 0].max(axis=0)
    return found


def _paths(lines: Sequence[Pipeline], kinds: int) -> _Paths:
    rows = [(place, *row) for place, line in enumerate(lines) for row in _rows(line, kinds)]
    return _Paths(*(np.array(column, float) for column in zip(*rows, strict=True)))


def _rows(line: Pipeline, kinds: int) -> list[tuple[Array, Array, int, Array, int, int]]:
    """once, often, hops, trip, trip_hops and width of each path. Of a run of alike stages the last waits longest for
    the first micro-batch, and the first has the longest way to the end."""
    each = line.kinds
    none = np.zeros(kinds)

    def count(stages: Sequence[int]) -> Array:
        return np.bincount(np.array(stages, int), minlength=kinds).astype(float)

    ranks = line.by_rank
    ends = _run_ends(ranks)
    found = [(count(each[:rank]), count(ranks[rank]), rank, none, 0, 0) for rank in ends]
    if line.pipe.chunks > 1:
        last = len(each) - 1
        found.append((count(each[:last]), count(each[last:]), last, none, 0, 0))
    if line.pipe.schedule == "1f1b":
        for rank in sorted({0, *ends, *(end + 1 for end in ends[:-1])}):
            behind = line.ranks - 1 - rank
            found.append((count(each[:rank]), count([each[rank]]), rank, count(each[rank:]), behind, behind + 1))
    return found


def _run_ends(ranks: Sequence[tuple[int, ...]]) -> list[int]:
    ends, at = [], 0
    for _, run in groupby(ranks):
        at += len(list(run))
        ends.append(at - 1)
    return ends
