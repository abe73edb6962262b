"""Flat buffers: how a unit's parameters lie side by side in memory, and which run of them is a rank's shard.

    | decayed parameters … | other parameters … | padding |
    |   shard 0   |   shard 1   |   shard 2   |   shard 3   |

Padding stands at the end only, and there is as much as makes the shards equal. A shard is a run of the buffer and
does not care where a parameter begins, so each rank holds at most two runs that the optimizer treats alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from meshwright.comm.collectives import Pending
from meshwright.parallel.placement import Placement, at
from meshwright.parallel.units import UnitPlan
from meshwright.spec.boxes import Box, boxes_of_run
from meshwright.spec.cuts import in_whole


@dataclass(frozen=True)
class Precision:
    """Dtypes beside the parameters' own. None: gradients as parameters, reduction as gradients, no master copy."""

    gradients: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: torch.dtype | None = None


@dataclass(frozen=True)
class Member:
    """One parameter's range of its unit's flat buffers."""

    placement: Placement
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.placement.local_numel

    def of(self, flat: Tensor) -> Tensor:
        """This parameter's part of a whole flat buffer, in the parameter's own shape; a view."""
        return flat[self.start : self.stop].view(self.placement.local_shape)


@dataclass(frozen=True)
class Piece:
    """The run of one parameter that lies in this rank's shard: elements [start, stop) of it, in C order."""

    placement: Placement
    start: int
    stop: int
    offset: int  # of element `start` in the shard

    def of(self, shard: Tensor) -> Tensor:
        """This piece of a tensor that is laid out as the shard; 1-dim, a view."""
        return shard[self.offset : self.offset + self.stop - self.start]

    def boxes(self, elements: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """The boxes of the whole parameter that the piece's `elements` are, each with its own, a view in its shape."""
        done = 0
        for box in boxes_of_run(self.placement.local_shape, self.start, self.stop):
            local = elements[done : done + box.numel].view(box.sizes)
            done += box.numel
            for inner, whole in in_whole(box, self.placement.cuts):
                yield whole, at(local, inner, box)


@dataclass(frozen=True)
class Segment:
    """A run of a shard whose parameters the optimizer treats alike."""

    decay: bool
    start: int
    stop: int

    def of(self, shard: Tensor) -> Tensor:
        return shard[self.start : self.stop]


class Unit:
    """One unit's buffers on this rank, and what is under way with them.

    parameters: whole, `padded` long; at stage 3 its memory comes and goes (`resident`). parameter_shard: this rank's
    run of it; below stage 3 a view, at stage 3 memory of its own.
    master: the shard as the optimizer updates it, in
    `precision.master`; the parameter shard itself where there is none. gradients: whole; None between backward passes
    at stages 2 and 3. gradient_shard: the sum over ranks lands there; a view of `gradients` at stages 0 and 1.
    """

    def __init__(
        self,
        plan: UnitPlan,
        stage: int,
        ranks: int,
        rank: int,
        dtype: torch.dtype,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self.name = plan.name
        self.trainable = plan.trainable
        self.members: list[Member] = []
        size = 0
        for placement in plan.placements:
            self.members.append(Member(placement, size))
            size += placement.local_numel
        cut = ranks if stage else 1
        self.size, self.padded = size, -(-size // cut) * cut
        length = self.padded // cut
        self.start = length * (rank if stage else 0)
        mine = slice(self.start, self.start + length)

        self.parameters = torch.empty(self.padded, dtype=dtype, device=device)
        self.views = [member.of(self.parameters) for member in self.members]
        self.parameter_shard = self.parameters[mine]
        if stage == 3:
            self.parameters.untyped_storage().resize_(0)
            self.parameter_shard = torch.empty(length, dtype=dtype, device=device)
        self.parameter_shard[max(size - self.start, 0) :].zero_()
        self.master = self.parameter_shard
        if plan.trainable and precision.master not in (None, dtype):
            self.master = torch.zeros(length, dtype=precision.master, device=device)

        self.gradient_dtype = precision.gradients or dtype
        self.reduce_dtype = precision.reduce or self.gradient_dtype
        self.gradients: Tensor | None = None
        # Members' ranges are written before they are read: by a gradient's copy, or with zeros where there is none.
        self.gradient_shard = torch.zeros(0, dtype=self.gradient_dtype, device=device)
        if plan.trainable and stage < 2:
            self.gradients = torch.empty(self.padded, dtype=self.gradient_dtype, device=device)
            self.gradients[size:].zero_()
            self.gradient_shard = self.gradients[mine]
        elif plan.trainable:
            self.gradient_shard = torch.zeros(length, dtype=self.gradient_dtype, device=device)

        self.reduction: Reduction | None = None
        self.missing = 0  # members whose gradient of this backward is still to come
        self.arrived = [False] * len(self.members)  # whose gradient is in `gradients`
        self.summed = False  # whether `gradient_shard` has a sum of this step
        self.gather: Pending | None = None  # of updated `parameters`, under way (stages 1 and 2)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The parts of members that lie in this rank's shard, in order."""
        end = self.start + self.parameter_shard.numel()
        found = []
        for member in self.members:
            first, last = max(member.start, self.start), min(member.stop, end)
            if first < last:
                found.append(Piece(member.placement, first - member.start, last - member.start, first - self.start))
        return tuple(found)

    def counted(self, shard: Tensor) -> Iterator[Tensor]:
        """The runs of `shard`, which is laid out as the rank's, that a norm over all ranks counts here."""
        start = stop = 0
        for piece in self.pieces:
            if piece.placement.counted:
                if piece.offset != stop:
                    if start < stop:
                        yield shard[start:stop]
                    start = piece.offset
                stop = piece.offset + piece.stop - piece.start
        if start < stop:
            yield shard[start:stop]

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The decayed run of the shard and the other, where not empty; without padding."""
        runs: dict[bool, tuple[int, int]] = {}
        for piece in self.pieces:
            start, _ = runs.get(piece.placement.decay, (piece.offset, 0))
            runs[piece.placement.decay] = (start, piece.offset + piece.stop - piece.start)
        return tuple(Segment(decay, start, stop) for decay, (start, stop) in runs.items())


@dataclass
class Reduction:
    """A unit's reduction under way: the handle, what it writes, and what must be given back after it."""

    pending: Pending
    result: Tensor  # where the sum lands
    lent: tuple[Tensor, ...]
