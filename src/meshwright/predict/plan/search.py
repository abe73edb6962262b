"""The best layouts of a run on a cluster, exactly: as if each that fits had been simulated.

1. Of each mesh's grid (space.py) memory.py says as arrays what fits at all.
2. For what is left times.py says as arrays below what time none can be; in full only where the same bound over blocks'
   bare arithmetic, bytes and sums (`Parts.floor`) is not above that time already.
3. In the order of that bound layouts are simulated (waves.py), until the bound of the next is above the time of the
   last that is asked for: then no other can be among them.

Where memory.py knows a layout's memory up to a few messages only, and that decides, predict/memory.py is asked.
Everything that is kept between layouts belongs to the search, so searches do not disturb each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.predict.cost.cpu import crowd
from meshwright.predict.cost.parts import Parts
from meshwright.predict.cost.step import step_time
from meshwright.predict.memory import Device, memory
from meshwright.predict.plan.capacity import allowance
from meshwright.predict.plan.memory import Held, MemoryOf
from meshwright.predict.plan.places import Place as Where
from meshwright.predict.plan.places import places
from meshwright.predict.plan.space import Form, Grid, Mesh, Pipe, Sharding, Space, layout_of, run_of
from meshwright.predict.plan.times import Pipeline, StageTimes, TimesOf, bounds, pipelines, shard_of
from meshwright.predict.plan.waves import Order, length, order_of
from meshwright.predict.stages import stages_of
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec
from meshwright.spec.stages import Stage

Array = NDArray[np.float64]
Arrays = tuple[Array, ...]
Place = tuple[int, int, int, int]
TOGETHER = 32
"""Layouts that are simulated before it is asked again whether that is enough."""
WIDER = 1.3
"""By how much floors may be above the lowest at first, and then above those that are done."""
ROUNDING = 1 + 1e-9
"""By how much a bound may be above what it bounds, for its sums are added up in another order."""
Progress = Callable[[float, int], None]
"""Is told the part of the meshes that is done, and of how many layouts."""


@dataclass(frozen=True, order=True)
class Candidate:
    """A layout. seconds: of a step, simulated, if it fits. held: bytes of the fullest rank, at least."""

    seconds: float
    held: float
    grid: Grid = field(compare=False)
    place: Place = field(compare=False)

    @property
    def layout(self) -> Layout:
        return self.grid.layout(self.place)

    @property
    def micro(self) -> int:
        return self.grid.micro(self.place)


@dataclass
class Result:
    """What a search has found. layouts: how many there are, fitting: how many of them fit, simulated: how many of these
    were. usable: bytes of a device. cut_short: it was interrupted, and there may be better ones."""

    usable: float
    best: list[Candidate] = field(default_factory=list)
    layouts: int = 0
    fitting: int = 0
    simulated: int = 0
    cut_short: bool = False


class _Open(NamedTuple):
    """A grid that has layouts that may fit, and what no layout of its columns is below by their blocks alone."""

    grid: Grid
    held: Held
    fits: NDArray[np.bool_]
    columns: list[tuple[int, int]]
    floor: Array


class _Found(NamedTuple):
    """The layouts of a grid that may fit: their places in it as one number each, what no simulation of them is below,
    the bytes that they hold at least, and whether they may hold too much."""

    grid: Grid
    flat: NDArray[np.int64]
    least: Array
    held: Array
    unsure: NDArray[np.bool_]


class Search:
    """A search for the `top` best layouts of `run`, whose own layout and batch.micro do not matter, on `cluster`.

    only: see `Space`. usable: bytes of a device that a run may hold; by default what the allowance leaves. known: the
    figures of memory of another search for the same run on devices of the same kind.
    """

    def __init__(
        self,
        run: RunSpec,
        cluster: Cluster,
        *,
        top: int = 10,
        only: Mapping[str, Any] | None = None,
        usable: float | None = None,
        parts: Parts | None = None,
        known: MemoryOf | None = None,
    ) -> None:
        self.run, self.cluster, self.top = run, cluster, top
        self.space = Space(run, cluster, only)
        self.cpu = cluster.device.kind == "cpu"
        self.device: Device = "cpu" if self.cpu else "cuda"
        self.parts = parts or Parts(run.model, run.data.seq_len, run.precision, cluster, attention=run.attention)
        left = allowance(cluster.device).usable(cluster.device.memory)
        self.result = Result(left if usable is None else usable)
        self._crowded = crowd(cluster, cluster.devices)
        self._memory = known or MemoryOf(run, cpu=self.cpu)
        self._times = TimesOf(run, self.parts)
        self._stages: dict[tuple[int, int], tuple[Stage, ...]] = {}
        self._orders: dict[tuple[Pipe, int, int], Order] = {}
        self._fullest: dict[tuple[int, Pipe], list[Where]] = {}
        self._open: list[_Open] = []

    def run_all(self, progress: Progress | None = None) -> Result:
        """Search. Where it is interrupted (KeyboardInterrupt) the best so far are the result."""
        try:
            self._look(progress)
            self._simulate()
        except KeyboardInterrupt:
            self.result.cut_short = True
            if not self.result.best:
                self._simulate(enough=TOGETHER)
        self.result.best.sort()
        return self.result

    # -- all layouts, by arrays ---------------------------------------------------------------------------------------

    def _look(self, progress: Progress | None) -> None:
        grids = list(self.space.grids())
        for number, grid in enumerate(grids):
            self._grid(grid)
            if progress is not None:
                progress((number + 1) / len(grids), self.result.layouts)

    def held(self, grid: Grid) -> Held:
        """What the layouts of a grid hold."""
        return self._memory.of(grid, self._places(grid))

    def _places(self, grid: Grid) -> list[list[Where]]:
        """For each pipeline of a grid the places that may hold most."""
        pp = grid.mesh.pp
        for pipe in grid.pipes:
            if (pp, pipe) not in self._fullest:
                self._fullest[pp, pipe] = places(pipe, pp, self.stages(pp, pipe))
        return [self._fullest[pp, pipe] for pipe in grid.pipes]

    def _grid(self, grid: Grid) -> None:
        self.result.layouts += int(np.broadcast_to(grid.valid, grid.shape).sum())
        always = np.asarray(self._memory.always(grid, self._places(grid)) <= self.result.usable)
        if not always.any():
            return
        grid = grid.only(np.flatnonzero(always.any(axis=1)), np.flatnonzero(always.any(axis=0)))
        held = self.held(grid)
        fits = grid.valid & (held.least <= self.result.usable)
        if not fits.any():
            return
        self.result.fitting += int(fits.sum())
        columns = [(int(form), int(micro)) for form, micro in np.argwhere(fits.any(axis=(0, 1)))]
        self._open.append(_Open(grid, held, fits, columns, self._floor(grid, columns)))

    def _floor(self, grid: Grid, columns: Sequence[tuple[int, int]]) -> Array:
        """Seconds that no layout of each column is below, of blocks alone: costs of a shard are asked for later."""
        kinds, lines = pipelines(grid, [self.stages(grid.mesh.pp, pipe) for pipe in grid.pipes])
        of_form = {form: self.parts.floor(shard_of(grid, (form, 0))) for form in {form for form, _ in columns}}
        first, more = np.array([of_form[form] for form, _ in columns]).T
        passes = first + more * (np.array([grid.micros[micro] for _, micro in columns], float) - 1)
        forward = np.array([kind.blocks for kind in kinds], float)[:, None, None] * passes
        none, rows = np.zeros_like(forward), (len(lines), 1, len(columns))
        alone = StageTimes(forward, none, none, np.zeros(len(columns)), np.zeros(rows))
        micros = np.array([grid.steps[micro] for _, micro in columns], float)
        return np.asarray(bounds(alone, lines, micros).min(axis=(0, 1)))

    def _bounded(self, above: float, limit: float) -> list[_Found]:
        """The layouts of all columns whose floor is above the one and not above the other."""
        found = []
        for grid, held, fits, columns, floor in self._open:
            some = [column for column, least in zip(columns, floor, strict=True) if above < least <= limit]
            if not some:
                continue
            forms, micros = zip(*some, strict=True)
            least, chosen = np.full(grid.shape, np.inf), np.zeros_like(fits)
            least[:, :, forms, micros] = self.bounds(grid, some)
            chosen[:, :, forms, micros] = fits[:, :, forms, micros]
            flat = np.flatnonzero(chosen)
            unsure = (held.least + held.spare > self.result.usable).ravel()[flat]
            found.append(_Found(grid, flat, least.ravel()[flat], held.least.ravel()[flat], unsure))
        return found

    def bounds(self, grid: Grid, columns: Sequence[tuple[int, int]]) -> Array:
        """Seconds that no layout of the columns is below, of shape (pipelines, shardings, columns)."""
        kinds, lines = pipelines(grid, [self.stages(grid.mesh.pp, pipe) for pipe in grid.pipes])
        micros = np.array([grid.steps[micro] for _, micro in columns], float)
        return bounds(self._times.of(grid, kinds, lines, columns), lines, micros)

    def nearest(self) -> Candidate | None:
        """The layout that holds least: where none fits, what comes closest. None where there is no layout at all."""
        found: Candidate | None = None
        for grid in self.space.grids():
            held = np.where(grid.valid, self.held(grid).least, np.inf)
            at = int(held.argmin())
            least = float(held.ravel()[at])
            if np.isfinite(least) and (found is None or least < found.held):
                found = Candidate(np.inf, least, grid, _place(grid, at))
        return found

    def any_fits(self) -> bool:
        """Whether some layout fits; the search ends with the first."""
        for grid in self.space.grids():
            if (self._memory.always(grid, self._places(grid)) <= self.result.usable).any():
                held = self.held(grid)
                if np.any(grid.valid & (held.least + np.where(self.cpu, 0, held.spare) <= self.result.usable)):
                    return True
        return False

    def stages(self, pp: int, pipe: Pipe) -> tuple[Stage, ...]:
        """The stages of a pipeline."""
        key = pp, pipe.chunks
        if key not in self._stages:
            line = pipe if pipe.chunks > 1 else Pipe()
            layout = layout_of(Mesh(1, 1, 1, pp), line, Sharding(0), Form(False, "none"))
            self._stages[key] = stages_of(self.run.model, layout, self.run.data.seq_len)
        return self._stages[key]

    # -- the leaders, one by one --------------------------------------------------------------------------------------

    def _simulate(self, enough: int | None = None) -> None:
        """Simulate until no other can be among the best, columns of low floors first. enough: at most so many."""
        if not self._open:
            return
        floors = np.concatenate([each.floor for each in self._open])
        above, limit = -np.inf, float(floors.min()) * WIDER
        while True:
            self._simulate_of(self._bounded(above, limit), enough)
            last = self._last * ROUNDING
            above = limit
            if above >= min(last, float(floors.max())) or (enough is not None and self.result.simulated >= enough):
                return
            limit = min(limit * WIDER, last)

    def _simulate_of(self, every: list[_Found], enough: int | None) -> None:
        """Simulate in the order of the bounds, until no other of these can be among the best."""
        if not every:
            return
        result = self.result
        least, held = (np.concatenate([getattr(each, of) for each in every]) for of in ("least", "held"))
        ends = np.cumsum([len(each.flat) for each in every])
        for batch in _in_order(least, held):
            if enough is not None and result.simulated >= enough:
                return
            batch = batch[least[batch] <= self._last * ROUNDING]
            if not len(batch):
                return
            leaders = []
            for number in batch:
                which = int(np.searchsorted(ends, number, side="right"))
                of, at = every[which], int(number - ends[which])  # counted from its end
                place = _place(of.grid, int(of.flat[at]))
                if not of.unsure[at] or self._fits(of.grid, place):
                    leaders.append((of.grid, place, float(of.held[at])))
            self._take(leaders)

    @property
    def _last(self) -> float:
        """The time of the last of the best; infinite while there are fewer."""
        best = self.result.best
        return best[-1].seconds if len(best) == self.top else np.inf

    def _take(self, leaders: Sequence[tuple[Grid, Place, float]]) -> None:
        times = self.simulated([(grid, place) for grid, place, _ in leaders])
        self.result.simulated += len(leaders)
        new = [Candidate(time, held, grid, place) for time, (grid, place, held) in zip(times, leaders, strict=True)]
        self.result.best = heapq.nsmallest(self.top, [*self.result.best, *new])

    def simulated(self, layouts: Sequence[tuple[Grid, Place]]) -> list[float]:
        """Seconds of a step of each layout, exactly; those with one order together."""
        if self._crowded > 1:  # cores that ranks share are shared unevenly in time
            return [self._stretched(grid, place) for grid, place in layouts]
        found = [0.0] * len(layouts)
        groups: dict[tuple[Pipe, int, int], list[tuple[int, Arrays]]] = {}
        for number, (grid, place) in enumerate(layouts):
            one, micros = grid.at(place), grid.steps[place[3]]
            kinds, (line,) = pipelines(one, [self.stages(grid.mesh.pp, one.pipes[0])])
            stage = self._times.of(one, kinds, [line], [(0, 0)])
            if line.ranks == 1:
                found[number] = float(bounds(stage, [line], np.array([float(micros)]))[0, 0, 0])
            else:
                key = line.pipe, line.ranks, micros
                groups.setdefault(key, []).append((number, _by_stage(stage, line)))
        for key, members in groups.items():
            arrays = (np.array(rows) for rows in zip(*(each for _, each in members), strict=True))
            for (number, _), seconds in zip(members, length(self._order(*key), *arrays), strict=True):
                found[number] = float(seconds)
        return found

    def _stretched(self, grid: Grid, place: Place) -> float:
        layout = grid.layout(place)
        return step_time(run_of(self.run, layout, grid.micro(place)), layout, self.cluster, self.parts).seconds

    def _order(self, pipe: Pipe, ranks: int, micros: int) -> Order:
        key = pipe, ranks, micros
        if key not in self._orders:
            self._orders[key] = order_of(pipe, ranks, micros)
        return self._orders[key]

    def _fits(self, grid: Grid, place: Place) -> bool:
        """Whether a layout fits by predict/memory.py."""
        layout = grid.layout(place)
        run = run_of(self.run, layout, grid.micro(place))
        if not self.cpu:  # what checkpoints are written from is in the host's memory
            run = run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"every": 0})})
        ranks = {layout.rank_at({"pp": each.rank}) for each in self._places(grid)[place[0]]}
        return all(memory(run, layout, rank, self.device).total <= self.result.usable for rank in ranks)

    def fullest_rank(self, candidate: Candidate) -> int:
        """The number of the rank that holds most."""
        one = candidate.grid.at(candidate.place)
        (where,) = self._places(one)
        held = self._memory.by_place(one, where).least.ravel()
        return candidate.layout.rank_at({"pp": where[int(held.argmax())].rank})


def _by_stage(stage: StageTimes, line: Pipeline) -> Arrays:
    """Forward, backward, send, reduce and step of a single layout, as `waves.length` takes them."""
    each = list(line.kinds)
    forward, backward, tail = (array[each, 0, 0] for array in stage[:3])
    return forward, backward, np.full(len(each), stage.send[0]), tail, stage.step[0, 0, 0]


def _place(grid: Grid, at: int) -> Place:
    pipe, sharding, form, micro = (int(each) for each in np.unravel_index(at, grid.shape))
    return pipe, sharding, form, micro


def _in_order(found: Array, held: Array) -> Iterator[NDArray[np.int64]]:
    """Places of ascending bounds, TOGETHER at once; of equal ones those first that hold least."""
    ready, number = np.zeros(0, np.int64), 0
    while number < len(found):
        if number == len(ready):
            # What is asked for is mostly among the first few, so all are never sorted at once.
            more = min(max(4 * number, 4096), len(found))
            ready = np.argpartition(found, more - 1)[:more]
            ready = ready[np.lexsort((held[ready], found[ready]))]
        yield ready[number : number + TOGETHER]
        number = min(number + TOGETHER, len(ready))
