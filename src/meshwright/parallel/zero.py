"""ZeRO over flat unit buffers (Rajbhandari et al. 2020). Here its stage 0: plain data parallelism, overlapped.

Every data rank holds the whole model and computes its part of the global batch; gradients are summed over the
ranks. A unit's parameters lie in one flat buffer and their gradients in another, so a unit is reduced by one
collective, started as soon as backward has left the unit, while earlier layers still run backward
(Li et al. 2020). Sums, not means: whoever updates divides by the valid tokens of the global batch.

    ============  =================  ===============================  ====
    stage         forward            backward                         step
    ============  =================  ===============================  ====
    0             nothing            all-reduce of each unit, once    nothing
                                     per optimizer step
    ============  =================  ===============================  ====

Memory: nothing is saved at stage 0; each rank holds parameters, gradients and optimizer state whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.comm.collectives import Group, Pending
from meshwright.comm.mesh import Mesh
from meshwright.parallel.placement import Placement, plain_placements
from meshwright.parallel.units import UnitPlan, plan_units
from meshwright.spec.errors import UserError


@dataclass(frozen=True)
class Member:
    """One parameter's range of its unit's flat buffers."""

    placement: Placement
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.placement.local_numel

    def of(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat buffer, in the parameter's own shape; a view."""
        return flat[self.start : self.stop].view(self.placement.local_shape)


@dataclass(frozen=True)
class Segment:
    """A run of a unit's flat buffers that the optimizer treats alike."""

    decay: bool
    parameters: Tensor
    gradients: Tensor
    members: tuple[Member, ...]
    offset: int  # of the segment in the unit's buffers


class Unit:
    """One unit's flat buffers and the state of its reduction."""

    def __init__(self, plan: UnitPlan, dtype: torch.dtype, device: torch.device) -> None:
        self.name = plan.name
        self.trainable = plan.trainable
        self.members: list[Member] = []
        size = 0
        for placement in plan.placements:
            self.members.append(Member(placement, size))
            size += placement.local_numel
        self.parameters = torch.empty(size, dtype=dtype, device=device)
        # Every element is written before it is read: by a gradient's copy, or by `finish` where there is none.
        self.gradients = torch.empty(size if plan.trainable else 0, dtype=dtype, device=device)
        self.pending: Pending | None = None
        self.missing = 0  # members whose gradient of the last micro-batch is still to come

    def segments(self) -> Iterator[Segment]:
        """The decayed run and the rest, where not empty."""
        for decay in (True, False):
            members = tuple(m for m in self.members if m.placement.decay == decay)
            if members and self.trainable:
                run = slice(members[0].start, members[-1].stop)
                yield Segment(decay, self.parameters[run], self.gradients[run], members, run.start)


class Sharded:
    """A module whose parameters lie in flat unit buffers and whose gradients are summed over the data ranks.

    A step goes `begin`, backward of each micro-batch (before the last one `last_micro`), `finish`. After `finish`
    the units' gradients are the sums over all data ranks and micro-batches.
    """

    def __init__(self, module: nn.Module, group: Group, plans: Sequence[UnitPlan], device: torch.device) -> None:
        self.module = module
        self.group = group
        self.placements: dict[str, Placement] = {}
        self.units: list[Unit] = []
        self._parameters: dict[str, nn.Parameter] = {}
        self._unit_of: dict[str, tuple[Unit, Member]] = {}
        self._last = False
        for plan in plans:
            self._adopt(plan, device)
        # Backward meets the units from last to first; reductions are issued in this order on every rank, whatever
        # order the gradients arrive in, because ranks must issue collectives alike.
        self._order = [unit for unit in reversed(self.units) if unit.trainable]
        self._next = 0

    # -- a step -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget the last step's gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._last = False
        self._next = 0

    def last_micro(self) -> None:
        """The next backward is this step's last: reduce each unit once backward has left it."""
        self._last = True
        for unit in self._order:
            unit.missing = len(unit.members)

    def finish(self) -> Iterator[Unit]:
        """Reduce what is not yet reduced, and yield each unit once its sum is there.

        Exhaust it: the caller works on the units that are there while the others are still on the wire. A parameter
        that got no gradient on this rank counts as zero. A rank that had nothing to compute calls this alone and
        takes part in every reduction.
        """
        for unit in self._order[self._next :]:
            for member in unit.members:
                parameter = self._parameters[member.placement.name]
                if parameter.grad is None:
                    parameter.grad = member.of(unit.gradients).zero_()
            self._reduce(unit)
        self._next = len(self._order)
        for unit in self._order:
            if unit.pending is not None:
                unit.pending.wait()
                unit.pending = None
            yield unit

    # -- what others read ---------------------------------------------------------------------------------------

    def segments(self) -> list[Segment]:
        """What the optimizer updates: at most two runs a unit."""
        return [segment for unit in self.units for segment in unit.segments()]

    def named_parameters(self) -> Iterator[tuple[Placement, Tensor]]:
        """Each parameter's record and local part, in its own shape; a view of the unit's buffer."""
        for unit in self.units:
            for member in unit.members:
                yield member.placement, member.of(unit.parameters)

    def named_gradients(self) -> Iterator[tuple[Placement, Tensor]]:
        """Each trainable parameter's record and gradient, in its own shape; valid after `finish`."""
        for unit in self._order:
            for member in unit.members:
                yield member.placement, member.of(unit.gradients)

    @torch.no_grad()
    def fill(self, value: Callable[[Placement, Tensor], None]) -> None:
        """Let `value(record, local part)` write each parameter in place: from the seed, or from a checkpoint."""
        for placement, local in self.named_parameters():
            value(placement, local)

    # -- how it is done -----------------------------------------------------------------------------------------

    def _adopt(self, plan: UnitPlan, device: torch.device) -> None:
        originals = {p.name: self.module.get_parameter(p.name) for p in plan.placements}
        unit = Unit(plan, next(iter(originals.values())).dtype, device)
        for member in unit.members:
            placement, original = member.placement, originals[member.placement.name]
            view = member.of(unit.parameters)
            if original.device.type != "meta":
                view.copy_(original.detach())
            parameter = nn.Parameter(view, requires_grad=unit.trainable)
            for name in placement.names:
                owner, _, leaf = name.rpartition(".")
                setattr(self.module.get_submodule(owner), leaf, parameter)
            self._parameters[placement.name] = parameter
            self.placements[placement.name] = placement
            if unit.trainable:
                parameter.register_post_accumulate_grad_hook(self._arrival(unit, member))
        self.units.append(unit)

    def _arrival(self, unit: Unit, member: Member) -> Callable[[Tensor], None]:
        """A hook that autograd calls when it has accumulated a gradient of this backward into `member`."""
        view = member.of(unit.gradients)

        def arrived(parameter: Tensor) -> None:
            if parameter.grad is not view:
                # The step's first gradient: one copy into the buffer, where zeroing it beforehand and adding would
                # pass over the memory twice. Later ones autograd adds to the view in place.
                assert parameter.grad is not None
                view.copy_(parameter.grad)
                parameter.grad = view
            if self._last:
                unit.missing -= 1
                self._reduce_ready()

        return arrived

    def _reduce_ready(self) -> None:
        while self._next < len(self._order) and self._order[self._next].missing == 0:
            self._reduce(self._order[self._next])
            self._next += 1

    def _reduce(self, unit: Unit) -> None:
        unit.pending = self.group.all_reduce(unit.gradients, reason="zero.reduce", phase="backward", async_=True)


def shard(module: nn.Module, mesh: Mesh, stage: int = 0, units: Mapping[str, Sequence[str]] | None = None) -> Sharded:
    """Lay `module`'s parameters out in flat unit buffers on the mesh's device and sum its gradients over `dp`.

    The module is changed in place: its parameters are replaced by views of the buffers (references to the old ones
    are stale), with their values where they had any; parameters on the meta device are left unfilled, see
    `Sharded.fill`. `units` maps unit names to public parameter names, by default one unit a repeated block.
    Every rank must start with equal values; filling from the seed or a checkpoint sees to it.

    Raises UserError for a stage that is not available.
    """
    if stage != 0:
        raise UserError(f"zero={stage} is not available yet; use zero=0")
    placements = plain_placements(module, replicated=[axis for axis, size in mesh.sizes.items() if size > 1])
    return Sharded(module, mesh.group("dp"), plan_units(module, placements, units), mesh.device)
