"""The layouts that are tried for a run on a cluster: meshes, and for each mesh a dense grid of everything else.

A mesh says how many ranks each axis has, and with context ranks by which method attention goes over them. What is left
are four lists that combine freely, so a grid is their product, and a figure of all its layouts is one array of shape
(pipelines, shardings, forms, micro-batches), computed from figures of each list by broadcasting. A search over a
million layouts is a loop over some hundred meshes.

What no run would take (spec/run.py refuses it) is never made; what cannot be on its own account of the number of
micro-batches is masked out by `Grid.valid`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.predict.traffic import MOST_MICROS
from meshwright.schedule.registry import MOST
from meshwright.spec.batch import micro_steps
from meshwright.spec.cluster import Cluster
from meshwright.spec.context import check as check_context
from meshwright.spec.layout import AXES, Axis, Layout, Operators
from meshwright.spec.model import divisors
from meshwright.spec.run import RunSpec
from meshwright.spec.sequence import Method, Order
from meshwright.spec.splitting import check as check_split
from meshwright.spec.words import join

T = TypeVar("T")
Recompute = Literal["none", "full", "selective"]

LEAST_TOKENS = 256
"""Of a sequence on a context rank: fewer leave attention's kernels and messages to their latencies."""
SWAPPED: tuple[Axis, ...] = ("tp", "cp", "pp", "dp")
"""Pipeline ranks nearer to each other than data ranks: worth it where a node has room for several stages."""


class Attend(NamedTuple):
    """How attention goes over the context ranks."""

    method: Method = "ring"
    order: Order = "zigzag"
    ulysses: int | None = None


class Mesh(NamedTuple):
    """Ranks of each axis, the order in which they lie, and attention over `cp`."""

    tp: int
    cp: int
    dp: int
    pp: int
    order: tuple[Axis, ...] = AXES
    attend: Attend = Attend()


class Pipe(NamedTuple):
    """A schedule, and the stages of a pipeline rank."""

    schedule: str = "1f1b"
    chunks: int = 1


class Sharding(NamedTuple):
    """A ZeRO stage, and the ranks that shard among themselves (None: all)."""

    zero: int
    shard: int | None = None


class Form(NamedTuple):
    """How a block is computed: with sequence parallelism or without, and what is computed again."""

    sp: bool
    recompute: Recompute
    keep: tuple[Operators, ...] = ("linear",)


RECOMPUTE: tuple[tuple[Recompute, tuple[Operators, ...]], ...] = (
    ("none", ("linear",)),
    ("selective", ("linear", "attention")),
    ("selective", ("linear",)),
    ("full", ("linear",)),
)
METHODS: tuple[Method, ...] = ("ring", "ulysses", "gather")


@dataclass(frozen=True)
class Grid:
    """All layouts of one mesh: the product of the four lists."""

    mesh: Mesh
    pipes: tuple[Pipe, ...]
    shardings: tuple[Sharding, ...]
    forms: tuple[Form, ...]
    micros: tuple[int, ...]
    sequences: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.pipes), len(self.shardings), len(self.forms), len(self.micros)

    @property
    def size(self) -> int:
        """Layouts in it, those that `valid` masks out among them."""
        pipes, shardings, forms, micros = self.shape
        return pipes * shardings * forms * micros

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """For each size of micro-batch how many a data rank goes through in a step."""
        return tuple(micro_steps(self.sequences, self.mesh.dp, micro) for micro in self.micros)

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Which layouts can be: of shape (pipelines, shardings, 1, micro-batches)."""
        steps = np.array(self.steps)
        in_rows = np.array([self._in_rows(sharding) for sharding in self.shardings])
        few = (steps <= MOST_MICROS) | ~in_rows[:, None]
        pp = self.mesh.pp
        short = np.array([[pp == 1 or 2 * pp * pipe.chunks * m <= MOST for m in self.steps] for pipe in self.pipes])
        return np.asarray((short[:, None, :] & few[None])[:, :, None, :])

    def _in_rows(self, sharding: Sharding) -> bool:
        """Whether each micro-batch has messages of its own."""
        mesh = self.mesh
        return sharding.zero >= 2 or max(mesh.tp, mesh.cp, mesh.pp) > 1

    def only(self, pipes: Iterable[int], shardings: Iterable[int]) -> Grid:
        """The part of it that has these pipelines and shardings, by their places."""
        kept, sharded = tuple(self.pipes[each] for each in pipes), tuple(self.shardings[each] for each in shardings)
        return replace(self, pipes=kept, shardings=sharded)

    def at(self, place: tuple[int, int, int, int]) -> Grid:
        """A grid of one layout alone."""
        pipe, sharding, form, micro = place
        return replace(self.only([pipe], [sharding]), forms=(self.forms[form],), micros=(self.micros[micro],))

    def layout(self, place: tuple[int, int, int, int]) -> Layout:
        """The layout at a place of the grid."""
        pipe, sharding, form, _ = place
        return layout_of(self.mesh, self.pipes[pipe], self.shardings[sharding], self.forms[form])

    def micro(self, place: tuple[int, int, int, int]) -> int:
        """Sequences of its micro-batches."""
        return self.micros[place[3]]


def layout_of(mesh: Mesh, pipe: Pipe, sharding: Sharding, form: Form) -> Layout:
    """The layout that they make up."""
    fields: dict[str, Any] = {"tp": mesh.tp, "cp": mesh.cp, "dp": mesh.dp, "pp": mesh.pp, "order": mesh.order}
    if mesh.cp > 1:
        attend = mesh.attend
        fields |= {"cp_method": attend.method, "cp_order": attend.order, "cp_ulysses": attend.ulysses}
    if mesh.pp > 1:
        fields |= {"pp_schedule": pipe.schedule, "pp_chunks": pipe.chunks}
    fields |= {"zero": sharding.zero, "zero_shard": sharding.shard, "sp": form.sp, "recompute": form.recompute}
    if form.recompute == "selective":
        fields["recompute_keep"] = form.keep
    return Layout(**fields)


def run_of(run: RunSpec, layout: Layout, micro: int) -> RunSpec:
    """`run` with a layout and micro-batches of so many sequences."""
    return run.model_copy(update={"layout": layout, "batch": run.batch.model_copy(update={"micro": micro})})


class Space:
    """The layouts of `run`'s model, sequences and batch on `cluster`; the run's own layout and batch.micro do not
    matter.

    only: fields of the layout, and "micro", each with the value it must have: {"tp": 8, "zero": 1}. Raises ValueError
    for fields that the search does not vary.
    """

    FIELDS = ("tp", "cp", "dp", "pp", "cp_method", "pp_schedule", "pp_chunks", "zero", "zero_shard", "sp", "recompute",
              "recompute_keep", "micro", "order")  # fmt: skip

    def __init__(self, run: RunSpec, cluster: Cluster, only: Mapping[str, Any] | None = None) -> None:
        self.run, self.cluster, self.only = run, cluster, dict(only or {})
        unknown = [name for name in self.only if name not in self.FIELDS]
        if unknown:
            raise ValueError(f"{unknown[0]} is not searched over; there are {join(self.FIELDS, 'and')}")

    def grids(self) -> Iterator[Grid]:
        """One for each mesh."""
        for mesh in self.meshes():
            grid = Grid(
                mesh,
                tuple(self._pipes(mesh)),
                tuple(self._shardings(mesh)),
                tuple(self._forms(mesh)),
                tuple(self._micros(mesh)),
                self.run.batch.sequences,
            )
            if grid.size:
                yield grid

    def meshes(self) -> Iterator[Mesh]:
        """Those that multiply to the cluster's devices, and whose axes the model and its sequences allow."""
        ranks = self.cluster.devices
        for tp in self._allowed("tp", divisors(ranks)):
            if not self._fits_split(Layout(dp=1, tp=tp)) or not self._alone(tp):
                continue
            for cp in self._allowed("cp", divisors(ranks // tp)):
                for attend in self._attends(tp, cp):
                    yield from self._pipelines(tp, cp, attend)

    def _pipelines(self, tp: int, cp: int, attend: Attend) -> Iterator[Mesh]:
        ranks = self.cluster.devices // (tp * cp)
        for pp in self._allowed("pp", divisors(ranks)):
            dp = ranks // pp
            if pp > self.run.model.layers or dp > self.run.batch.sequences or dp not in self._allowed("dp", [dp]):
                continue
            for order in self._allowed("order", self._orders(tp, cp, dp, pp)):
                yield Mesh(tp, cp, dp, pp, order, attend)

    def _orders(self, tp: int, cp: int, dp: int, pp: int) -> list[tuple[Axis, ...]]:
        """The default; and pipeline ranks inside of data ranks where that changes which links they cross."""
        near, node = tp * cp, self.cluster.per_node
        worth = dp > 1 and pp > 1 and near < node < self.cluster.devices
        return [AXES, SWAPPED] if worth else [AXES]

    def _alone(self, tp: int) -> bool:
        return tp == 1 or self.run.compile == "none"

    def _fits_split(self, layout: Layout) -> bool:
        return _passes(check_split, self.run, layout)

    def _attends(self, tp: int, cp: int) -> Iterator[Attend]:
        """How attention may go over `cp` ranks; for a single one there is nothing to choose."""
        seq, packed = self.run.data.seq_len, self.run.data.packing
        if cp == 1:
            yield Attend()
            return
        if self.run.compile != "none" or self.run.attention == "explicit" or seq < LEAST_TOKENS * cp:
            return
        order: Order = "zigzag" if self.run.model.causal and packed == "none" else "contiguous"
        for method in self._allowed("cp_method", METHODS):
            layout = Layout(dp=1, tp=tp, cp=cp, cp_method=method, cp_order=order)
            if _passes(check_context, self.run, layout):
                yield Attend(method, order)

    def _pipes(self, mesh: Mesh) -> Iterator[Pipe]:
        if mesh.pp == 1:
            yield from [Pipe()] if self._is("pp_chunks", 1) and self._is("pp_schedule", "1f1b") else []
            return
        for schedule in self._allowed("pp_schedule", ["1f1b", "gpipe", "interleaved"]):
            most = self.run.model.layers // mesh.pp
            chunks = [n for n in range(2, most + 1) if most % n == 0 or n & (n - 1) == 0]
            for number in self._allowed("pp_chunks", chunks if schedule == "interleaved" else [1]):
                yield Pipe(schedule, number)

    def _shardings(self, mesh: Mesh) -> Iterator[Sharding]:
        """Over all data and context ranks; and over those of a node alone where that is less."""
        ranks = mesh.dp * mesh.cp
        near = self.cluster.per_node // mesh.tp
        within = mesh.order == AXES and 1 < near < ranks and self.cluster.per_node % mesh.tp == 0 and ranks % near == 0
        for zero in self._allowed("zero", [0, 1, 2, 3] if ranks > 1 else [0]):
            for shard in self._allowed("zero_shard", [None, near] if within and zero else [None]):
                yield Sharding(zero, shard)

    def _forms(self, mesh: Mesh) -> Iterator[Form]:
        seq, cut = self.run.data.seq_len, mesh.cp * mesh.tp
        for sp in self._allowed("sp", [True, False] if mesh.tp > 1 and seq % cut == 0 else [False]):
            for recompute, keep in RECOMPUTE:
                if recompute == "selective" and self.run.compile != "none":
                    continue
                if self._is("recompute", recompute) and self._is("recompute_keep", keep):
                    yield Form(sp, recompute, keep)

    def _micros(self, mesh: Mesh) -> Iterable[int]:
        """Those that leave no short micro-batch on the ranks that have the largest part of the batch."""
        return self._allowed("micro", divisors(-(-self.run.batch.sequences // mesh.dp)))

    def _allowed(self, name: str, values: Iterable[T]) -> list[T]:
        return [value for value in values if self._is(name, value)]

    def _is(self, name: str, value: object) -> bool:
        return name not in self.only or self.only[name] == value


def _passes(check: Any, run: RunSpec, layout: Layout) -> bool:
    try:
        check(run.model, layout, run.data.seq_len)
    except ValueError:
        return False
    return True
