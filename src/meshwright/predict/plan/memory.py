"""What the fullest rank of each layout of a grid holds, as arrays: the moments of predict/peak.py by broadcasting.

Blocks are alike, so of a stage's only the last three can be where most is held: before them less is saved, and no more
units are gathered or on their way. The same goes for ranks (places.py). Everything that a block's sizes need comes from
the predictors of a single run (sizes.py, predict/params.py); what is said here is how moments add up, and tests hold
that to predict/memory.py, byte for byte.

Exact on accelerators but for what `spare` counts: a pipeline rank may hold a few messages more, and an interleaved
rank's other stages may differ by a block. On the CPU, which keeps buffers for sums, it is the least that a rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.predict.memory import inputs
from meshwright.predict.params import buffer_count, tensors, unit_counts
from meshwright.predict.peak import loss_workspace, written_out
from meshwright.predict.plan.places import Flying, Kind, Place, flying
from meshwright.predict.plan.sizes import ALONE, Sizes, SizesOfBlocks
from meshwright.predict.plan.space import Grid, Sharding
from meshwright.predict.states import DTYPE_BYTES, gradient_bytes, master_bytes, reduce_bytes
from meshwright.spec.joining import joined
from meshwright.spec.layout import JOIN, Layout
from meshwright.spec.run import WIDENED, RunSpec

Array = NDArray[np.float64]
UNITS = ("block", "head", "embedding", "tied")
MOMENTS = ("last block", "last but one", "last but two", "loss", "head", "final norm", "embedding")


class Held(NamedTuple):
    """Bytes that the fullest rank holds, of shape (pipelines, shardings, forms, micro-batches): so many at least, and
    so many more at most."""

    least: Array
    spare: Array


class MemoryOf:
    """The memory of all layouts of one run, on accelerators or on the CPU."""

    def __init__(self, run: RunSpec, *, cpu: bool) -> None:
        self.run, self.cpu = run, cpu
        self._sizes = SizesOfBlocks(run, cpu=cpu)
        self._units: dict[int, Units] = {}
        self._states: dict[tuple[int, tuple[Kind, ...], int, int], float] = {}
        self._rows: dict[tuple[int, tuple[Kind, ...], tuple[Sharding, ...], int], list[float]] = {}
        self._beside: dict[Place, dict[str, Beside]] = {}
        self._in_flight: dict[tuple[Place, tuple[int, ...]], Flying] = {}

    def of(self, grid: Grid, where: Sequence[Sequence[Place]]) -> Held:
        """Of a grid's layouts. where: for each of its pipelines the places that may hold most."""
        starts = np.cumsum([0, *(len(of_pipe) for of_pipe in where[:-1])])
        each = self.by_place(grid, [place for of_pipe in where for place in of_pipe])
        least = np.maximum.reduceat(each.least, starts, axis=0)
        return Held(least, np.maximum.reduceat(each.least + each.spare, starts, axis=0) - least)

    def by_place(self, grid: Grid, flat: Sequence[Place]) -> Held:
        """Of each of these places, which stand for pipelines."""
        air = [self._flying(place, grid.steps) for place in flat]
        beside = [self._units_beside(place) for place in flat]
        step = _Moments(self.run, self.units(grid.mesh.tp), grid, flat, beside, self._sizes, cpu=self.cpu)
        moment = np.maximum(step.backward(air), step.update()[None, :, None, None])
        held = self._always(grid, flat)[:, :, None, None] + moment + step.inputs(air)[:, None]
        return Held(held, np.broadcast_to(step.spare(air)[:, None], held.shape))

    def always(self, grid: Grid, where: Sequence[Sequence[Place]]) -> Array:
        """What is there all the time, of shape (pipelines, shardings): no layout holds less."""
        return np.array([self._always(grid, of_pipe).max(axis=0) for of_pipe in where])

    def units(self, tp: int) -> Units:
        if tp not in self._units:
            self._units[tp] = Units.of(self.run, tp)
        return self._units[tp]

    def _flying(self, place: Place, steps: tuple[int, ...]) -> Flying:
        key = place, steps
        if key not in self._in_flight:
            self._in_flight[key] = flying(place, np.array(steps, float))
        return self._in_flight[key]

    def _units_beside(self, place: Place) -> dict[str, Beside]:
        if place not in self._beside:
            units = self.units(1)
            chunked = self.run.loss == "chunked"
            self._beside[place] = units_beside(place, units.tied > 0, units.embedding > 0, chunked=chunked)
        return self._beside[place]

    def _always(self, grid: Grid, flat: Sequence[Place]) -> Array:
        """States and tables, of shape (places, shardings)."""
        return np.array([self._row(grid, place.rank_stages) for place in flat])

    def _row(self, grid: Grid, stages: tuple[Kind, ...]) -> list[float]:
        """That of a rank with these stages, by sharding; many meshes and places share it."""
        tp, ranks = grid.mesh.tp, grid.mesh.dp * grid.mesh.cp
        key = tp, stages, grid.shardings, ranks
        if key not in self._rows:
            model, seq = self.run.model, self.run.data.seq_len
            table = len(stages) * buffer_count(model, seq) * max(DTYPE_BYTES[self.run.precision], 4)
            each = zip(grid.shardings, cuts_of(grid), strict=True)
            self._rows[key] = [self.states(tp, stages, sharding.zero, cut) + table for sharding, cut in each]
        return self._rows[key]

    def least(self, devices: int) -> float:
        """Bytes of the states of the fullest of so many devices, at least: those of the whole model, dealt out."""
        units, layers = self.units(1), self.run.model.layers
        elements = layers * units.block + units.head + units.embedding + units.tied
        parameter, master = DTYPE_BYTES[self.run.precision], master_bytes(self.run)
        each = parameter + gradient_bytes(self.run) + (2 + (master != parameter)) * master
        return elements * each / devices

    def states(self, tp: int, stages: tuple[Kind, ...], zero: int, cut: int) -> float:
        """Bytes of the states of a rank that has these stages: see predict/states.py."""
        key = tp, stages, zero, cut
        if key not in self._states:
            parameter, master = DTYPE_BYTES[self.run.precision], master_bytes(self.run)
            whole = sum(self.units(tp).padded(stage, cut, JOIN if zero < 2 else 0) for stage in stages)
            shard = whole // cut
            self._states[key] = (
                (shard if zero == 3 else whole) * parameter
                + (shard if zero >= 2 else whole) * gradient_bytes(self.run)
                + (2 + (master != parameter)) * shard * master
                + 4
                + (len(stages) * parameter if zero == 3 else 0)
            )
        return self._states[key]


def cuts_of(grid: Grid) -> list[int]:
    """For each sharding the ranks that a unit is cut over."""
    ranks = grid.mesh.dp * grid.mesh.cp
    return [1 if each.zero == 0 else each.shard or ranks for each in grid.shardings]


@dataclass(frozen=True)
class Units:
    """Elements that a tensor rank has of each of UNITS where ZeRO cuts nothing; 0 for what the model does not have.

    Of a tied table both ends have all, and the head's unit is then the last norm alone.
    """

    block: int
    head: int
    embedding: int
    tied: int
    table: int
    """Of the largest table that words or positions are looked up in."""

    @classmethod
    def of(cls, run: RunSpec, tp: int) -> Units:
        layout = Layout(dp=1, tp=tp)
        counts = unit_counts(run.model, 0, layout, ALONE)
        tables = (t.local_numel for t in tensors(run.model, layout, ALONE) if t.tied or t.lookup)
        return cls(counts["blocks.0"], counts["head"], counts.get("embedding", 0), counts.get("tied", 0), max(tables))

    def listed(self, stage: Kind) -> list[tuple[str, int]]:
        """Those of a stage in the order of forward, blocks one by one."""
        names = order(stage, tied=self.tied > 0, embedding=self.embedding > 0)
        return [(f"{name} {place}", getattr(self, name)) for place, name in enumerate(names)]

    def padded(self, stage: Kind, cut: int, join: int) -> int:
        """Elements of a stage's flat buffers, which `cut` divides."""
        units = self.listed(stage)
        if join and min(size for _, size in units) < join:
            sizes = dict(units)
            alone = {name for name in sizes if name.startswith("tied")}
            together = (sum(sizes[name] for name in names) for names in joined(units, join, alone).values())
        else:
            together = (size for _, size in units)
        return sum(-(-size // cut) * cut for size in together)

    def each_padded(self, cuts: list[int]) -> Array:
        """Each by itself, of shape (units, cuts)."""
        return np.array([[-(-getattr(self, name) // cut) * cut for cut in cuts] for name in UNITS], float)


def order(stage: Kind, *, tied: bool, embedding: bool) -> list[str]:
    """The units of a stage in the order of forward."""
    before = ["tied"] * (tied and (stage.first or stage.last)) + ["embedding"] * (embedding and stage.first)
    return before + ["block"] * stage.blocks + ["head"] * stage.last


class _Moments:
    """The moments of a grid's places. Arrays have the axes (places, shardings, forms, micro-batches), or those of them
    that matter."""

    def __init__(
        self,
        run: RunSpec,
        units: Units,
        grid: Grid,
        flat: Sequence[Place],
        beside: list[dict[str, Beside]],
        known: SizesOfBlocks,
        *,
        cpu: bool,
    ) -> None:
        self.run, self.grid, self.flat, self.units, self.cpu = run, grid, flat, units, cpu
        self.units_beside = beside
        model, mesh = run.model, grid.mesh
        self.sizes: Sizes = known.of(mesh, grid.forms, grid.micros)
        self.size = DTYPE_BYTES[run.precision]
        self.cuts = cuts_of(grid)
        self.zero = np.array([sharding.zero for sharding in grid.shardings])
        sequences = np.array(grid.micros, float)
        seq, self.sp = run.data.seq_len, np.array([[form.sp] for form in grid.forms])
        self.tokens = sequences * (seq // mesh.cp)
        self.whole = self.tokens * model.hidden * self.size
        self.hidden = np.where(self.sp, self.whole // mesh.tp, self.whole)
        scattered = (1 + (sequences > 1)) * self.whole + self.hidden
        self.scattered = np.where(self.sp, scattered, 0.0)
        self.width = model.ffn_width // mesh.tp
        self.ffn = self.tokens * self.width * self.size
        heads, kv_heads = model.heads // mesh.tp, -(-model.num_kv_heads // mesh.tp)
        self.qkv = (heads + 2 * kv_heads) * model.head_width
        self.heads = self.tokens * self.qkv * self.size
        self.scores = np.zeros_like(sequences)
        if written_out(run, cpu=cpu):
            wide = self.size if run.attention == "explicit" else max(self.size, 4)
            self.scores = sequences * heads * float(seq) ** 2 * wide
        self.words = -(-model.vocab // mesh.tp)
        self.table = float(self.words * model.hidden * self.size)
        self.first, self.last = (np.array([getattr(p.stage, end) for p in flat]) for end in ("first", "last"))
        self.blocks = np.array([place.stage.blocks for place in flat], float)
        self.tied_whole = np.array([place.stage.whole and units.tied > 0 for place in flat])

    # -- all together -----------------------------------------------------------------------------------------------

    def backward(self, air: Sequence[Flying]) -> Array:
        """The fullest moment of backward."""
        on_way = self._on_way()
        beside = self._beside(air)
        fullest = None
        for name, here in self._activations().items():
            held = (here + beside)[:, None] + on_way[name]
            fullest = held if fullest is None else np.maximum(fullest, held, out=fullest)
        assert fullest is not None
        return fullest

    def _activations(self) -> dict[str, Array]:
        """By moment, what is there of one micro-batch beside gathered units and reductions: (places, forms, micros)."""
        s, shape = self.sizes, (len(self.flat), 1, 1)
        ends = self.first, self.last, self.tied_whole
        blocks, first, last, tied = (each.reshape(shape) for each in (self.blocks, *ends))
        before = np.where(first, s.embedding, 0.0)
        waits = np.where(tied, self.table, 0.0)
        inner, leading = self._block(0.0), self._block(s.saved_shared)
        found = {}
        for back, name in enumerate(MOMENTS[:3], 1):
            at = blocks - back
            within = np.where(at > 0, inner + s.kept_shared + at * s.kept, leading)
            found[name] = np.where(at >= 0, before + within + waits, -np.inf)
        behind = before + blocks * s.kept + s.kept_shared
        found["loss"] = np.where(last, behind + s.logits + s.loss + self._loss(), -np.inf)
        logits = self.tokens * self.words * self.size + self.table + self.whole + self.scattered
        full = self.run.loss == "full"
        found["head"] = np.where(last & full, behind + s.logits + logits, -np.inf)
        norm = self.hidden
        if self.run.model.family == "llama":
            norm = 4 * self.hidden // self.size * max(self.size, 4)
        found["final norm"] = np.where(last, behind + s.norm + self.hidden + norm + waits, -np.inf)
        found["embedding"] = np.where(first, self._embedding() + waits, -np.inf)
        return found

    def _block(self, shared: Array | float) -> Array:
        """The fullest moment of a block's backward, over what is there when backward has left it.

        shared: of what all blocks share, what this one saves for all."""
        s, d, model = self.sizes, self.run.model.hidden, self.run.model
        factors = 2 if model.family == "llama" else 1
        end, whole = s.saved + shared, np.where(self.sp, self.whole, 0.0)
        moments = [
            end + d * self.width * self.size + self.hidden + self.ffn + whole,
            end - self.ffn + self.hidden + (1 + factors) * self.ffn,
            s.attention + shared + self.hidden + self.whole + self.heads + s.passing + 2 * self.scores,
        ]
        if self.grid.mesh.tp > 1:
            beside = 2 * self.hidden + self.whole + self.scattered
            moments.append(s.mlp + shared + d * factors * self.width * self.size + factors * self.ffn + beside)
            moments.append(s.qkv + d * self.qkv * self.size + self.heads + beside)
        return np.asarray(np.maximum.reduce(np.broadcast_arrays(*moments)))

    def _loss(self) -> Array:
        found = (
            loss_workspace(
                self.run.model, tokens=int(tokens), dtype_bytes=self.size, loss=self.run.loss, tp=self.grid.mesh.tp
            )
            for tokens in self.tokens
        )
        return np.array([float(sum(each.values())) for each in found])

    def _embedding(self) -> Array:
        passing = np.broadcast_to(2 * self.whole, self.hidden.shape) if self.grid.mesh.tp > 1 else self.hidden
        return np.asarray(float(self.units.table * self.size) + passing)

    def update(self) -> Array:
        """The part of the gradients that the optimizer widens, by sharding."""
        master = master_bytes(self.run)
        if gradient_bytes(self.run) >= master:
            return np.zeros(len(self.cuts))
        largest = self.units.each_padded(self.cuts).max(axis=0)
        return np.asarray(np.minimum(largest // self.cuts, WIDENED) * master)

    # -- beside one micro-batch's activations -----------------------------------------------------------------------

    def _kept(self) -> Array:
        """What a micro-batch keeps on each place: (places, forms, micros)."""
        s, shape = self.sizes, (len(self.flat), 1, 1)
        blocks, first, last = (each.reshape(shape) for each in (self.blocks, self.first, self.last))
        ends = np.where(first, s.embedding, 0.0) + np.where(last, s.logits + s.loss, 0.0)
        return np.asarray(blocks * s.kept + s.kept_shared + ends)

    def _beside(self, air: Sequence[Flying]) -> Array:
        """Other micro-batches in flight, and messages; of an interleaved rank's stages the shortest counts."""
        others, messages = (np.array([getattr(each, of) for each in air])[:, None] for of in ("others", "messages"))
        fewest = np.array([min(kind.blocks for kind in place.rank_stages) for place in self.flat], float)
        several = np.array([len(place.rank_stages) > 1 for place in self.flat])[:, None, None]
        short = fewest[:, None, None] * self.sizes.kept + self.sizes.kept_shared
        # On the CPU messages are let go when they have left.
        sent = 0.0 if self.cpu else messages * self.hidden
        return np.asarray(others * np.where(several, short, self._kept()) + sent)

    def spare(self, air: Sequence[Flying]) -> Array:
        """What more there may be: (places, forms, micros)."""
        others, messages, begun = (
            np.array([getattr(each, of) for each in air])[:, None] for of in ("others", "spare", "spare_begun")
        )
        rows = [[kind.blocks for kind in place.rank_stages] for place in self.flat]
        unlike = np.array([max(row) - min(row) for row in rows], float)[:, None, None]
        first = np.array([len(p.rank_stages) > 1 and p.rank_stages[0].first for p in self.flat])[:, None, None]
        found = others * (unlike * self.sizes.kept + np.where(first, self.sizes.embedding, 0.0))
        found += messages * self.hidden + begun * self._inputs()
        found += self._late_logits()
        selective = any(form.recompute == "selective" for form in self.grid.forms)
        if self.cpu or (selective and written_out(self.run, cpu=self.cpu)):
            return np.full_like(found, np.inf)
        return np.asarray(found + 3 * self._narrow())

    def _late_logits(self) -> Array:
        """On an interleaved rank with the head: where groups of micro-batches are not alike, more than one may be in
        flight behind it."""
        ranks = [len(place.rank_stages) if place.rank_stages[-1].last else 0 for place in self.flat]
        chunks = np.array([number if number > 1 else 0 for number in ranks], float)[:, None, None]
        steps, pp = np.array(self.grid.steps), self.grid.mesh.pp
        uneven = steps % np.maximum(steps // pp, 1) > 0
        return np.asarray(chunks * uneven * (self.sizes.logits + self.sizes.loss))

    def _narrow(self) -> float:
        """Copies in the dtype of a reduction at ZeRO 0 and 1, of units that may be joined: so much each at most."""
        if reduce_bytes(self.run) == gradient_bytes(self.run):
            return 0.0
        units = self.units
        return float((JOIN + sum(getattr(units, name) for name in UNITS)) * 2 * reduce_bytes(self.run))

    def _inputs(self) -> Array:
        mesh = self.grid.mesh
        layout = Layout(dp=1, cp=mesh.cp)
        seq = self.run.data.seq_len
        return 8.0 * np.array([inputs(self.run, layout, (micro, seq), self.cpu) for micro in self.grid.micros])

    def inputs(self, air: Sequence[Flying]) -> Array:
        """Tokens and what goes with them: (places, forms, micros)."""
        return np.asarray(np.array([each.begun for each in air])[:, None] * self._inputs())

    # -- gathered units and reductions ------------------------------------------------------------------------------

    def _on_way(self) -> dict[str, Array]:
        """By moment, bytes of gathered units and of gradients that are reduced: (places, shardings, 1, micros)."""
        padded = self.units.each_padded(self.cuts)
        several = (np.array(self.grid.steps) > 1).astype(float)
        third, second = self.zero == 3, self.zero >= 2
        found = {}
        for name in MOMENTS:
            gathered, reduced, again = (
                np.array(counts) @ padded for counts in zip(*(each[name] for each in self.units_beside), strict=True)
            )
            steady = gathered * third * self.size + reduced * second * reduce_bytes(self.run)
            last = again * second * reduce_bytes(self.run)
            found[name] = (steady[:, :, None] + last[:, :, None] * several)[:, :, None, :]
        return found


class Beside(NamedTuple):
    """How many of each of UNITS are gathered at a moment, are reduced, and are still reduced from the micro-batch
    before."""

    gathered: list[int]
    reduced: list[int]
    again: list[int]


def units_beside(place: Place, tied: bool, embedding: bool, *, chunked: bool) -> dict[str, Beside]:
    """By moment, on a model with a tied table and with another: see `peak._Step`. chunked: the loss."""
    stage = place.stage
    names = order(stage, tied=tied, embedding=embedding)
    start, last = names.index("block"), len(names) - 1
    elsewhere = [unit for other in place.others for unit in order(other, tied=tied, embedding=embedding)[:2]]
    always = ["tied"] if tied and stage.whole else []
    waiting = ["tied"] if tied and stage.last and not stage.whole else []

    def near(at: int) -> list[str]:
        units = names[max(at - 1, 0) : at + 1]
        return always + [unit for unit in units if unit not in ("tied", "embedding")]

    def on_way(at: int) -> list[str]:
        return names[at : at + 3] + waiting

    found: dict[str, tuple[list[str], list[str], list[str]]] = {}
    for back, name in enumerate(MOMENTS[:3], 1):
        at = max(last - stage.last - back + 1, start)
        found[name] = near(at), on_way(at), elsewhere
    of_head = waiting or near(last)
    here = [*always, "head"] if stage.whole else [*waiting, "head"] if chunked else of_head
    found["loss"] = here, [], elsewhere + names[:2]
    found["head"] = of_head, names[last:], elsewhere
    found["final norm"] = near(last), on_way(last), elsewhere
    found["embedding"] = near(0), on_way(0), elsewhere
    return {name: Beside(*([units.count(unit) for unit in UNITS] for units in lists)) for name, lists in found.items()}
