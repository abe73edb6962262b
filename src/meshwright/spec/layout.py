"""How a model is laid out over ranks: the size of each mesh axis and what goes with it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshwright.spec.errors import UserError
from meshwright.spec.sequence import Method, Order, head_ranks
from meshwright.spec.words import join, near, not_yet, show

Axis = Literal["tp", "cp", "dp", "pp"]
AXES: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")
STATE_AXES: tuple[Axis, ...] = ("dp", "cp")
"""Axes whose ranks hold the same parameters: over all of them gradients are summed, and ZeRO shards."""
SPLITS = ("flops", "parameters", "layers")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "naive")
MOST_RANKS = 1_000_000  # far more than any machine has, and few enough to list
JOIN = 1_000_000  # parameters: 4 MB of float32 gradients, a message whose time is mostly its bytes
Operators = Literal["linear", "attention", "softmax", "activation"]
Ranks = Annotated[int, Field(gt=0, le=MOST_RANKS)]


def places(rank: int, sizes: Mapping[Axis, int]) -> dict[Axis, int]:
    """The place of rank number `rank` on each axis of `sizes`, of which the first varies fastest."""
    found: dict[Axis, int] = {}
    for axis, size in sizes.items():
        rank, found[axis] = divmod(rank, size)
    return found


class Layout(BaseModel):
    """A layout as asked for; `resolve` settles `dp: auto` once the number of ranks is known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dp: Ranks | Literal["auto"] = Field("auto", description="data ranks; auto: what the ranks leave, 2 if nobody says")
    tp: Ranks = Field(1, description="tensor ranks: heads, feed-forward and vocabulary are dealt out over them")
    cp: Ranks = Field(1, description="context ranks: each has a part of every sequence, also outside of attention")
    cp_method: Method = Field(
        "ring",
        description="how attention sees the whole sequence: gather keys and values; pass them around (rsa, ring); "
        "deal heads out instead (ulysses); or usp, both",
    )
    cp_order: Order = Field(
        "zigzag",
        description="which positions a context rank has: a run; zigzag: two runs, so that causal work is even; "
        "striped: every so many",
    )
    cp_ulysses: Ranks | None = Field(
        None, description="cp_method=usp: neighbours that deal heads out; rings go over the others"
    )
    pp: Ranks = Field(1, description="pipeline ranks: each has a run of the model's blocks, or several")
    pp_schedule: Annotated[str, Field(min_length=1)] = Field(
        "1f1b", description="who computes which micro-batch when: naive, gpipe, 1f1b, interleaved, or a schedule file"
    )
    pp_chunks: Ranks = Field(1, description="pp_schedule=interleaved: stages of a pipeline rank")
    pp_split: Annotated[str, Field(min_length=1)] | tuple[Annotated[int, Field(gt=0)], ...] = Field(
        "flops",
        description="how blocks are dealt out over stages: by what stages cost, embedding and head counted (flops, "
        "parameters, or seconds: a file of `meshwright costs`); by number (layers); or the number of each stage's",
    )
    ep: Ranks = Field(1, description="expert ranks, a part of dp × cp")
    zero: Annotated[int, Field(ge=0, le=3)] = Field(
        0, description="ZeRO stage: 1 shards states, 2 gradients, 3 parameters"
    )
    zero_shard: Ranks | None = Field(
        None, description="data and context ranks that shard among themselves, neighbours; null: all of them"
    )
    zero_gather: Literal["micro", "step"] = Field(
        "micro", description="zero=3: free parameters after each pass, or hold them until the step's last backward"
    )
    zero_ahead: Annotated[int, Field(ge=0)] = Field(1, description="zero=3: units gathered before they are needed")
    zero_join: Annotated[int, Field(ge=0)] = Field(
        JOIN, description="zero=0 or 1: join neighbouring units until one holds as many parameters; 0: never"
    )
    sp: bool = Field(False, description="beside tp: norms, dropout and residuals hold a part of the sequence")
    recompute: Literal["none", "full", "selective"] = Field(
        "none",
        description="what backward computes again: nothing; whole blocks; or all but the outputs of recompute_keep",
    )
    recompute_every: Annotated[int, Field(gt=0)] | Literal["sqrt"] = Field(
        1, description="recompute=full: keep the input of every so many blocks; sqrt: about the root of their number"
    )
    recompute_keep: tuple[Operators, ...] = Field(
        ("linear",), description="recompute=selective: the operators of a block whose outputs are kept"
    )
    offload: Literal["none", "activations"] = Field(
        "none", description="activations: what forward saves waits for backward in the host's memory"
    )
    order: tuple[Axis, ...] = Field(AXES, description="axes from neighbouring ranks to distant ones")

    @model_validator(mode="after")
    def _available(self) -> Self:
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"order must name each of {', '.join(AXES)} once")
        neutral = {"ep": 1}
        wrong = [
            not_yet(name, getattr(self, name), f"use {name}={show(value)}")
            for name, value in neutral.items()
            if getattr(self, name) != value
        ]
        if wrong:
            raise ValueError("; ".join(wrong))
        if self.sp and self.tp == 1:
            raise ValueError("sp=true goes beside tensor ranks; use tp=2 or more, or sp=false")
        self._context()
        self._pipeline()
        if self.zero_shard is not None and self.zero == 0:
            raise ValueError("zero_shard belongs to zero=1, 2 or 3; zero=0 shards nothing")
        if self.zero < 3:
            for name in ("zero_gather", "zero_ahead"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}={getattr(self, name)} belongs to zero=3; leave it out")
        if self.zero > 1 and self.zero_join not in (0, JOIN):
            raise ValueError(
                f"zero_join={self.zero_join} belongs to zero=0 or 1; at zero={self.zero} units are never joined, "
                "because each one's size is what is held whole; leave it out"
            )
        if self.recompute != "full" and self.recompute_every != 1:
            raise ValueError(f"recompute_every={self.recompute_every} belongs to recompute=full; leave it out")
        if self.recompute != "selective" and self.recompute_keep != ("linear",):
            raise ValueError(f"recompute_keep={show(list(self.recompute_keep))} belongs to recompute=selective")
        if self.recompute == "selective" and not self.recompute_keep:
            raise ValueError("recompute_keep=[] keeps nothing; that is recompute=full")
        if len(set(self.recompute_keep)) < len(self.recompute_keep):
            raise ValueError(f"recompute_keep={show(list(self.recompute_keep))} names an operator twice")
        return self

    def _context(self) -> None:
        if self.cp == 1:
            for name in ("cp_method", "cp_order", "cp_ulysses"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}={getattr(self, name)} goes beside context ranks; use cp=2 or more")
        elif self.cp_method == "usp":
            right = [f"cp_ulysses={n}" for n in range(2, self.cp) if self.cp % n == 0]
            if f"cp_ulysses={self.cp_ulysses}" not in right:
                raise ValueError(
                    f"cp_method=usp makes rings of ranks that deal heads out: cp={self.cp} = cp_ulysses × ring, both 2 "
                    f"or more; use {join([*right, 'cp_method=ring', 'ulysses'])}"
                )
        elif self.cp_ulysses is not None:
            raise ValueError(f"cp_ulysses={self.cp_ulysses} belongs to cp_method=usp; leave it out")

    def _pipeline(self) -> None:
        if self.pp == 1:
            for name in ("pp_schedule", "pp_chunks", "pp_split"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}={show(getattr(self, name))} goes beside pipeline ranks; use pp=2 or more")
            return
        named = not self.schedule_file
        if named and self.pp_schedule not in SCHEDULES:
            raise ValueError(
                f"pp_schedule={self.pp_schedule}: no such schedule{near(self.pp_schedule, SCHEDULES)}; there are "
                f"{join([*SCHEDULES, 'a schedule file (….json)'])}"
            )
        if self.pp_schedule == "interleaved" and self.pp_chunks == 1:
            raise ValueError("pp_schedule=interleaved gives each rank several stages; use pp_chunks=2 or more, or 1f1b")
        if named and self.pp_schedule != "interleaved" and self.pp_chunks > 1:
            raise ValueError(f"pp_chunks={self.pp_chunks} belongs to pp_schedule=interleaved; leave it out")
        if isinstance(self.pp_split, str) and self.pp_split not in SPLITS and not self.pp_split.endswith(".json"):
            raise ValueError(
                f"pp_split={self.pp_split}: no such way{near(self.pp_split, SPLITS)}; there are "
                f"{join([*SPLITS, 'a file of costs (….json)', 'the number of each stage’s blocks ([7, 9])'])}"
            )
        if isinstance(self.pp_split, tuple) and len(self.pp_split) != self.stages:
            raise ValueError(
                f"pp_split={show(list(self.pp_split))} is for {len(self.pp_split)} stages, and pp={self.pp}"
                f"{f' × pp_chunks={self.pp_chunks}' if self.pp_chunks > 1 else ''} makes {self.stages}"
            )

    @property
    def schedule_file(self) -> bool:
        """Whether `pp_schedule` is the path of a file."""
        return "/" in self.pp_schedule or self.pp_schedule.endswith(".json")

    @property
    def stages(self) -> int:
        """Pipeline stages, of which each pipeline rank has as many."""
        return self.pp * self.pp_chunks

    @property
    def kept_operators(self) -> tuple[Operators, ...]:
        """Operators whose outputs a recompute starts from, beside its input."""
        return self.recompute_keep if self.recompute == "selective" else ()

    def region(self, layers: int) -> int:
        """Blocks of a model of `layers` that are computed again together (the last region may have fewer)."""
        every = round(math.sqrt(layers)) if self.recompute_every == "sqrt" else self.recompute_every
        return min(every, layers)

    @property
    def join(self) -> int:
        """Parameters that a joined unit holds at least; 0: each unit stays as it is."""
        return self.zero_join if self.zero < 2 else 0

    @property
    def data_ranks(self) -> int:
        """`dp` as a number; the layout must be resolved."""
        assert self.dp != "auto", "resolve the layout first"
        return self.dp

    @property
    def state_ranks(self) -> int:
        """Ranks over which a gradient is summed, and among which ZeRO shards where `zero_shard` does not say less."""
        return math.prod(self.size(axis) for axis in STATE_AXES)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.size(a) for a in AXES)

    @property
    def head_ranks(self) -> int:
        """Context ranks that deal heads out among themselves, 1 where none do."""
        return head_ranks(self.cp_method, self.cp, self.cp_ulysses or 1)

    def size(self, axis: Axis) -> int:
        return self.data_ranks if axis == "dp" else int(getattr(self, axis))

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """The place on each axis of rank number `rank`: the first axis of the order varies fastest."""
        assert 0 <= rank < self.world, f"rank {rank} of {self.world}"
        return places(rank, {axis: self.size(axis) for axis in self.order})

    def place(self, rank: int, axes: Collection[Axis] = STATE_AXES) -> int:
        """The place of rank number `rank` among those that differ from it on `axes` only, by ascending number."""
        found, stride = 0, 1
        for axis, at in self.coordinates(rank).items():
            if axis in axes:
                found += stride * at
                stride *= self.size(axis)
        return found

    def rank_at(self, places: Mapping[Axis, int]) -> int:
        """The number of the rank at `places`, 0 on the axes that they leave out."""
        rank, stride = 0, 1
        for axis in self.order:
            rank += stride * places.get(axis, 0)
            stride *= self.size(axis)
        return rank

    def resolve(self, ranks: int | None) -> Layout:
        """Settle `dp: auto` for `ranks` ranks, or for as many as the layout needs where `ranks` is None.

        Raises UserError where the layout does not multiply to `ranks`.
        """
        resolved = self._resolve(ranks)
        ranks = resolved.state_ranks
        if resolved.zero_shard is not None and ranks % resolved.zero_shard:
            right = [n for n in range(1, ranks + 1) if ranks % n == 0]
            beside = "" if resolved.cp == 1 else f" × cp={resolved.cp} = {ranks}"
            raise UserError(
                f"layout: zero_shard={resolved.zero_shard} does not divide dp={resolved.data_ranks}{beside}; "
                f"use one of {', '.join(map(str, right))}"
            )
        return resolved

    def _resolve(self, ranks: int | None) -> Layout:
        others = self.tp * self.cp * self.pp
        if ranks is not None and ranks > MOST_RANKS:
            raise UserError(f"layout: {ranks} ranks are more than any machine has; use at most {MOST_RANKS}")
        if self.dp == "auto":
            if ranks is None:
                return self.model_copy(update={"dp": 2})
            if ranks % others:
                raise UserError(
                    f"layout: tp={self.tp} × cp={self.cp} × pp={self.pp} = {others} does not divide {ranks} ranks"
                )
            return self.model_copy(update={"dp": ranks // others})
        if ranks is not None and self.world != ranks:
            right = (
                f"use dp={ranks // others} or dp=auto, or {self.world} ranks"
                if ranks % others == 0
                else f"use {self.world} ranks"
            )
            raise UserError(
                f"layout: dp={self.dp} × tp={self.tp} × cp={self.cp} × pp={self.pp} = {self.world} "
                f"is not the number of ranks, {ranks}; {right}"
            )
        return self
