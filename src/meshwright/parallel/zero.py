"""ZeRO (Rajbhandari et al. 2020) over flat unit buffers: one ladder of four stages.

Data ranks compute parts of the global batch and need the sum of their gradients. Stage 0 keeps everything on every
rank: plain data parallelism, overlapped (Li et al. 2020). Stage 1 cuts each unit's flat buffer into equal shards and
updates one shard a rank, so optimizer states are held once in all. Stage 2 also keeps only the shard of the summed
gradients; stage 3 (FSDP, Zhao et al. 2023) also that of the parameters, and gathers a unit when it is needed.

    =====  ==============================  =================================  ==============================
    stage  forward                         backward                           step
    =====  ==============================  =================================  ==============================
    0      nothing                         all-reduce of each unit, once      nothing
    1      (waits for the step's gather)   reduce-scatter of each unit, once  all-gather of each unit
    2      (waits for the step's gather)   reduce-scatter of each unit, in    all-gather of each unit
                                           every micro-batch
    3      all-gather of each unit         all-gather of each unit, then      nothing
                                           reduce-scatter; every micro-batch
    =====  ==============================  =================================  ==============================

A unit's reduction starts as soon as backward has left it, while earlier layers still run backward; the gather of
updated parameters runs under the next forward. The literature also counts stage 1 as an all-reduce and a gather, 1.5
times the traffic of stage 0; with a reduce-scatter it is the same as stage 0.

Memory a rank, Ψ parameters, N ranks, g bytes a gradient, K = 12 bytes of master weights and moments: (2 + g + K)Ψ at
stage 0, (2 + g + K/N)Ψ at 1, (2 + (g + K)/N)Ψ at 2, (2 + g + K)Ψ/N at 3 for two-byte parameters. In between stand the
whole gradients of the units that backward is in (stages 2, 3) and the gathered units (3).

With hybrid sharding the data ranks are groups of `shard` neighbours that shard among themselves, and hold what the
other groups hold: sums then also go once a step across the groups.

Sums, not means: whoever updates divides by the valid tokens of the global batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from meshwright.comm.collectives import Group, Pending
from meshwright.comm.mesh import Mesh
from meshwright.parallel.flat import Member, Piece, Precision, Reduction, Unit
from meshwright.parallel.placement import Placement, plain_placements
from meshwright.parallel.recompute import Recompute
from meshwright.parallel.residency import Residency, Stay, entries
from meshwright.parallel.units import UnitPlan, plan_units
from meshwright.spec.errors import UserError
from meshwright.spec.run import UNDER_WAY


@dataclass(frozen=True)
class Options:
    """How a stage is carried out.

    shard: ranks that shard among themselves, neighbours on `dp`; None: all of them. gather: "micro" frees stage 3's
    parameters after each pass, "step" keeps them, once gathered, until the step's last backward. ahead: units that
    stage 3 gathers before they are needed.
    """

    precision: Precision = field(default_factory=Precision)
    shard: int | None = None
    gather: Literal["micro", "step"] = "micro"
    ahead: int = 1


class Sharded:
    """A module whose parameters lie in flat unit buffers and whose gradients are summed over the data ranks.

    A step goes `begin`; for each micro-batch `micro`, forward, backward, `end_micro`; then `finish`; and when the
    shards' `master` weights are updated, `publish` of each unit. After `finish` the units' `gradient_shard`s are the
    sums over all data ranks and micro-batches. At stage 3 every rank must run every micro-batch, with no valid token if
    it has none, and use the same modules in it; below, a rank without one may leave out its forward and backward.
    A weight may be used in the forward of the module that owns it only: elsewhere it may not be there yet.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        stage: int,
        plans: Sequence[UnitPlan],
        options: Options = Options(),
        regions: Sequence[Sequence[nn.Module]] = (),
    ) -> None:
        self.module = module
        self.stage = stage
        self.options = options
        if options.shard is None or options.shard == mesh.sizes["dp"]:
            self.group, self.replicas = mesh.group("dp"), None
        else:
            self.group, self.replicas = mesh.split("dp", options.shard)
        self.device = mesh.device
        self.placements: dict[str, Placement] = {}
        self.units: list[Unit] = []
        self._parameters: dict[str, nn.Parameter] = {}
        for plan in plans:
            self._adopt(plan)
        # Backward meets the units from last to first; reductions are issued in this order on every rank, whatever
        # order the gradients arrive in, because ranks must issue collectives alike.
        self._order = [unit for unit in reversed(self.units) if unit.trainable]
        self._next = len(self._order)
        self._micro: int | None = None
        self._reduces = False  # whether this micro-batch's backward reduces
        self._under_way: deque[Unit] = deque()
        self._residency: Residency | None = None
        if stage == 3:
            stays = [Stay(unit, entries(module, unit, self.units), self._of(unit)) for unit in self.units]
            self._residency = Residency(module, stays, self.group, options.ahead, regions)
        elif stage:
            for unit in self.units:
                for entry in entries(module, unit, self.units):
                    entry.register_forward_pre_hook(partial(self._arrived, unit))
            module.register_forward_pre_hook(self._settle_unless_training)

    # -- a step -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget the last step's gradients, also those of a step that was given up in the middle."""
        for parameter in self._parameters.values():
            parameter.grad = None
        if self._residency is not None:
            self._residency.end()
        self._reduces = False
        for unit in self._order:
            self._settle(unit)
            if self.stage >= 2 and unit.gradients is not None:
                self.group.scratch.give(unit.gradients)
                unit.gradients = None
            unit.arrived = [False] * len(unit.members)
            unit.summed = False
        self._next = len(self._order)

    def micro(self, index: int = 0, *, last: bool) -> None:
        """Micro-batch `index` comes next. last: no other one follows in this step."""
        self._micro = index
        self._reduces = last or self.stage >= 2
        if self._reduces:
            self._next = 0
            for unit in self._order:
                unit.missing = len(unit.members)
        if self._residency is not None:
            by_step = self.options.gather == "step"
            self._residency.begin(index, keep_forward=by_step, keep_backward=by_step and not last)

    def end_micro(self) -> None:
        """The micro-batch's backward is over: reduce what is not yet reduced, where it reduces at all.

        A parameter that got no gradient on this rank counts as zero.
        """
        if self._reduces:
            while self._next < len(self._order):
                self._reduce(self._order[self._next])
                self._next += 1
            self._reduces = False
        if self._residency is not None:
            self._residency.end()

    def finish(self) -> Iterator[Unit]:
        """Yield each unit once its sum is there; the last micro-batch must have begun.

        Exhaust it: the caller works on the units that are there while the others are still on the wire.
        """
        self.end_micro()
        begun = all(unit.reduction is not None or unit.summed for unit in self._order)
        assert begun, "the step's last micro-batch was not announced: call micro(last=True) before its forward"
        self.settle()  # of units that no forward here has used, before an update writes to them
        if self.replicas is not None:
            yield from self._across_replicas(self.replicas)
            return
        for unit in self._order:
            self._settle(unit)
            yield unit

    @torch.no_grad()
    def publish(self, unit: Unit) -> None:
        """Let every rank have what this rank's shard of `unit.master` now is, by the time it needs it."""
        if unit.master is not unit.parameter_shard:
            unit.parameter_shard.copy_(unit.master)
        if self.stage in (1, 2):
            self._arrived(unit)  # a rank that had nothing to compute has not entered the unit since the last gather
            unit.gather = self.group.all_gather(
                unit.parameters, unit.parameter_shard, reason="zero.gather", phase="step", async_=True
            )
        elif self._residency is not None:
            self._residency.forget(unit)  # a forward without a backward may have left the former values there

    def settle(self) -> None:
        """Wait for the gathers under way, so that whoever reads the parameters now reads updated ones."""
        for unit in self.units:
            self._arrived(unit)

    @property
    def every_rank_computes(self) -> bool:
        """Whether a rank must run forward and backward in a micro-batch that has no sequence for it."""
        return self.stage == 3 and self.group.size > 1

    @property
    def copies(self) -> tuple[int, int]:
        """How many ranks hold the same shards as this one, and which of them it is."""
        group = self.group if self.stage == 0 else self.replicas
        return (1, 0) if group is None else (group.size, group.rank)

    # -- what others read and write ------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, value: Callable[[Piece, Tensor], None]) -> None:
        """Let `value(piece, flat tensor)` write each piece of the master shards in place, then publish them all."""
        for unit in self.units:
            for piece in unit.pieces:
                value(piece, piece.of(unit.master))
            self.publish(unit)
        self.settle()

    def whole(self, shard: Callable[[Unit], Tensor | None], what: str) -> Iterator[tuple[Placement, Tensor]]:
        """Each parameter's record and, in its own shape, the whole of what `shard(unit)` is this rank's shard of.

        Collective, a unit at a time: all ranks must exhaust it. The tensors are valid until the next one. Units for
        which `shard` gives None are left out.
        """
        for unit in self.units:
            mine = shard(unit)
            if mine is None:
                continue
            flat = mine
            if self.stage:
                flat = torch.empty(unit.padded, dtype=mine.dtype, device=mine.device)
                self.group.all_gather(flat, mine, reason=f"zero.collect.{what}", phase="step")
            for member in unit.members:
                yield member.placement, member.of(flat)

    def named_parameters(self) -> Iterator[tuple[Placement, Tensor]]:
        """Each parameter's record and value as the optimizer holds it, whole; collective, see `whole`."""
        return self.whole(lambda unit: unit.master, "parameters")

    def named_gradients(self) -> Iterator[tuple[Placement, Tensor]]:
        """Each trainable parameter's record and summed gradient, whole; valid after `finish`; collective."""
        return self.whole(lambda unit: unit.gradient_shard if unit.trainable else None, "gradients")

    def storages(self) -> dict[str, list[Tensor]]:
        """The tensors held between steps, by the names that memory prediction uses."""
        return {
            "parameters": [t for unit in self.units for t in (unit.parameters, unit.parameter_shard)],
            "gradients": [t for unit in self.units for t in (unit.gradients, unit.gradient_shard) if t is not None],
            "master weights": [unit.master for unit in self.units if unit.master is not unit.parameter_shard],
            "scalars": list(self._residency.freed.values()) if self._residency is not None else [],
        }

    # -- gradients ------------------------------------------------------------------------------------------------

    def _adopt(self, plan: UnitPlan) -> None:
        originals = {p.name: self.module.get_parameter(p.name) for p in plan.placements}
        dtype = next(iter(originals.values())).dtype
        unit = Unit(plan, self.stage, self.group.size, self.group.rank, dtype, self.options.precision, self.device)
        for piece in unit.pieces:
            original = originals[piece.placement.name]
            if original.device.type != "meta":
                piece.of(unit.master).copy_(original.detach().flatten()[piece.start : piece.stop])
        for index, (member, view) in enumerate(zip(unit.members, unit.views, strict=True)):
            placement, original = member.placement, originals[member.placement.name]
            if self.stage < 3 and original.device.type != "meta":
                view.copy_(original.detach())
            # Stage 3 gathers again what autograd has saved: `data` leaves behind the counter of in-place writes.
            parameter = nn.Parameter(view.data if self.stage == 3 else view, requires_grad=unit.trainable)
            for name in placement.names:
                owner, _, leaf = name.rpartition(".")
                setattr(self.module.get_submodule(owner), leaf, parameter)
            self._parameters[placement.name] = parameter
            self.placements[placement.name] = placement
            if unit.trainable:
                parameter.register_post_accumulate_grad_hook(self._arrival(unit, index))
        if unit.master is not unit.parameter_shard:
            unit.parameter_shard.copy_(unit.master)
        self.units.append(unit)

    def _of(self, unit: Unit) -> list[nn.Parameter]:
        return [self._parameters[member.placement.name] for member in unit.members]

    def _arrival(self, unit: Unit, index: int) -> Callable[[Tensor], None]:
        """A hook that autograd calls when it has accumulated a gradient of this backward into a parameter."""
        member = unit.members[index]
        lasting = None if unit.gradients is None else member.of(unit.gradients)

        def arrived(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None and not gradient.requires_grad, "backward(create_graph=True) is not supported"
            self._check_announced(unit)
            self._check_used(unit, member)
            if unit.gradients is None:
                self._lend(unit)
                assert unit.gradients is not None
            view = member.of(unit.gradients) if lasting is None else lasting
            if not unit.arrived[index]:
                # One copy into the buffer, where zeroing it beforehand and adding would pass over the memory twice.
                view.copy_(gradient)
                unit.arrived[index] = True
            elif gradient.data_ptr() != view.data_ptr():
                view.add_(gradient)
            # Where it can, autograd adds later micro-batches' gradients to the view in place.
            stays = self.stage < 2 and view.dtype == gradient.dtype
            parameter.grad = view if stays else None
            if self._reduces:
                unit.missing -= 1
                if unit.missing == 0:
                    self._backward_left(unit)

        return arrived

    def _backward_left(self, unit: Unit) -> None:
        if self._residency is not None:
            self._residency.backward_done(unit)
        while self._next < len(self._order) and self._order[self._next].missing == 0:
            self._reduce(self._order[self._next])
            self._next += 1

    def _check_announced(self, unit: Unit) -> None:
        if self._reduces and unit.missing == 0:
            raise UserError("zero: a second backward in one micro-batch; add the losses up, or make it a micro-batch")
        if self.stage >= 2 and not self._reduces:
            raise UserError(f"zero={self.stage}: a backward outside a micro-batch; call micro() before its forward")

    def _check_used(self, unit: Unit, member: Member) -> None:
        if self._residency is not None:
            self._residency.check_used(unit, member.placement.name)
        elif unit.gather is not None:
            raise UserError(
                f"zero={self.stage}: {member.placement.name} was used outside the forward of the module that owns "
                "it, before its update was there; call that module, or use zero=0"
            )

    def _lend(self, unit: Unit) -> None:
        """Whole gradients for a unit that backward has come to, in the dtype of their reduction (stages 2 and 3)."""
        if self._next == 0:  # what the last micro-batch left under way had this one's forward to come through
            while self._under_way:
                self._settle(self._under_way[0])
        unit.gradients = self._take(unit.padded, unit.reduce_dtype)
        unit.gradients[unit.size :].zero_()

    def _take(self, size: int, dtype: torch.dtype) -> Tensor:
        return self.group.scratch.take(size, dtype, self.device)

    def _reduce(self, unit: Unit) -> None:
        """Start the sum over the ranks of what this rank has; what it has no gradient for counts as zero."""
        if unit.gradients is None:
            self._lend(unit)
        whole = unit.gradients
        assert whole is not None
        for index, member in enumerate(unit.members):
            if not unit.arrived[index]:
                member.of(whole).zero_()
                unit.arrived[index] = True
        if self.stage < 2:
            self._reduce_once(unit, whole)
        else:
            self._reduce_micro(unit, whole)

    def _reduce_once(self, unit: Unit, whole: Tensor) -> None:
        """Stages 0 and 1: into `gradient_shard`, in place where the reduction has the gradients' dtype."""
        wire, result = whole, unit.gradient_shard
        lent: list[Tensor] = []
        narrows = unit.reduce_dtype != whole.dtype
        if narrows or (self.stage == 1 and self.device.type == "cpu"):  # there a reduce-scatter holds a copy
            self._make_room(unit)
        if narrows:
            wire = self._take(whole.numel(), unit.reduce_dtype)
            wire.copy_(whole)
            result = wire[unit.start : unit.start + unit.gradient_shard.numel()]
            lent.append(wire)
        if self.stage == 0:
            pending = self.group.all_reduce(wire, reason="zero.reduce", phase="backward", async_=True)
        else:
            pending = self._scatter(result, wire, None)
        unit.reduction = Reduction(pending, result, tuple(lent))

    def _reduce_micro(self, unit: Unit, whole: Tensor) -> None:
        """Stages 2 and 3: the sum of one micro-batch, to be added to the step's; the whole gradients go back after."""
        self._settle(unit)
        self._make_room(unit)
        result = unit.gradient_shard
        if unit.summed or whole.dtype != result.dtype:
            result = whole[unit.start : unit.start + result.numel()]
        unit.reduction = Reduction(self._scatter(result, whole, self._micro), result, (whole,))
        unit.gradients = None
        unit.arrived = [False] * len(unit.members)

    def _make_room(self, unit: Unit) -> None:
        """Before a reduction that holds buffers: wait for the oldest, so that at most UNDER_WAY hold some."""
        while len(self._under_way) >= UNDER_WAY:
            self._settle(self._under_way[0])
        self._under_way.append(unit)

    def _scatter(self, result: Tensor, wire: Tensor, micro: int | None) -> Pending:
        return self.group.reduce_scatter(result, wire, reason="zero.reduce", phase="backward", micro=micro, async_=True)

    def _settle(self, unit: Unit) -> None:
        """Wait for the unit's reduction, add it to the step's sum, and give back its buffers."""
        reduction, unit.reduction = unit.reduction, None
        if reduction is None:
            return
        if unit in self._under_way:
            self._under_way.remove(unit)
        reduction.pending.wait()
        if reduction.result.data_ptr() != unit.gradient_shard.data_ptr():
            if unit.summed:
                unit.gradient_shard.add_(reduction.result)
            else:
                unit.gradient_shard.copy_(reduction.result)
        unit.summed = True
        for buffer in reduction.lent:
            self.group.scratch.give(buffer)

    def _across_replicas(self, replicas: Group) -> Iterator[Unit]:
        """Hybrid sharding: once a step, sum the shards over the groups that hold the same ones."""
        pending: list[tuple[Unit, Tensor, Pending]] = []
        for unit in self._order:
            self._settle(unit)
            wire = unit.gradient_shard
            if unit.reduce_dtype != wire.dtype:
                wire = self._take(wire.numel(), unit.reduce_dtype)
                wire.copy_(unit.gradient_shard)
            sum_ = replicas.all_reduce(wire, reason="zero.replicas", phase="backward", async_=True)
            pending.append((unit, wire, sum_))
        for unit, wire, sum_ in pending:
            sum_.wait()
            if wire.dtype != unit.gradient_shard.dtype:
                unit.gradient_shard.copy_(wire)
                self.group.scratch.give(wire)
            yield unit

    # -- updated parameters arrive under the next forward (stages 1 and 2) ------------------------------------------

    @staticmethod
    def _arrived(unit: Unit, *_: object) -> None:
        if unit.gather is not None:
            unit.gather.wait()
            unit.gather = None

    def _settle_unless_training(self, *_: object) -> None:
        # In training a weight used elsewhere and not in its module is noticed by its gradient; here nothing would.
        if not torch.is_grad_enabled():
            self.settle()


def shard(
    module: nn.Module,
    mesh: Mesh,
    stage: int = 0,
    units: Mapping[str, Sequence[str]] | None = None,
    options: Options = Options(),
    recompute: Recompute | None = None,
) -> Sharded:
    """Lay `module`'s parameters out in flat unit buffers on the mesh's device and sum its gradients over `dp`.

    The module is changed in place: its parameters are replaced by views of the buffers (references to the old ones
    are stale), with their values where they had any; parameters on the meta device are left unfilled, see
    `Sharded.fill`. `units` maps unit names to public parameter names, in the order in which forward meets them; by
    default one unit a repeated block. Every rank must start with equal values; filling from the seed or a checkpoint
    sees to it. recompute: what has been attached to the module, if anything.

    Raises UserError for `shard` ranks that do not divide the data ranks, and for units that miss a parameter.
    """
    assert stage in (0, 1, 2, 3), stage
    ranks = mesh.sizes["dp"]
    if options.shard is not None and (stage == 0 or ranks % options.shard):
        why = "stage 0 shards nothing" if stage == 0 else f"{options.shard} does not divide {ranks} data ranks"
        raise UserError(f"zero_shard={options.shard}: {why}")
    placements = plain_placements(module, replicated=[axis for axis, size in mesh.sizes.items() if size > 1])
    regions = recompute.regions if recompute is not None else ()
    return Sharded(module, mesh, stage, plan_units(module, placements, units), options, regions)
