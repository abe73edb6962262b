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

Context ranks hold the same weights as data ranks do, and a sum over both is one sum: where `cp` is above 1, all this
goes over the ranks of `dp` and `cp` together, and the data ranks that this file speaks of are these.

With hybrid sharding the data ranks are groups of `shard` neighbours that shard among themselves, and hold what the
other groups hold: sums then also go once a step across the groups.

Sums, not means: whoever updates divides by the valid tokens of the global batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from meshwright.comm.mesh import Mesh
from meshwright.parallel.flat import Member, Piece, Precision, Unit
from meshwright.parallel.graph import leaves
from meshwright.parallel.partial import PartialSums
from meshwright.parallel.placement import Placement, plain_placements, put_together
from meshwright.parallel.recompute import Recompute
from meshwright.parallel.reducer import Reducer
from meshwright.parallel.residency import Residency, Stay, entries
from meshwright.parallel.units import UnitPlan, plan_units
from meshwright.spec.errors import UserError
from meshwright.spec.layout import STATE_AXES

_EXHAUST = "exhaust it before publish and the next step: for unit in sharded.finish(): ..."
_SHARDED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules whose parameters lie in units


@dataclass(frozen=True)
class Options:
    """How a stage is carried out.

    shard: ranks that shard among themselves, neighbours; None: all data and context ranks. gather: "micro" frees stage
    3's parameters after each pass, "step" keeps them, once gathered, until the step's last backward. ahead: units that
    stage 3 gathers before they are needed. join: stages 0 and 1 join default units until one holds as many parameters.
    """

    precision: Precision = field(default_factory=Precision)
    shard: int | None = None
    gather: Literal["micro", "step"] = "micro"
    ahead: int = 1
    join: int = 0


class Sharded:
    """A module whose parameters lie in flat unit buffers and whose gradients are summed over the data ranks.

    A step goes `begin`; for each micro-batch `micro`, forward, backward, `end_micro`; then `finish`, which gives the
    trainable units and must be exhausted; and when the shards' `master` weights are updated, `publish` of each unit.
    After `finish` the units' `gradient_shard`s are the sums over all data ranks and micro-batches. docs/zero.md has a
    whole example. At stage 3 every rank must run every micro-batch, with no valid token if it has none, and use the
    same modules in it; below, a rank without one may leave out its forward and backward.

    From stage 1 on a weight may be used in the forward of the module that owns it only: elsewhere it may not be there
    yet. At stage 3 it reads as NaN elsewhere: an L2 term over `module.parameters()` in the loss makes the loss NaN,
    without an error, if forward uses the weights too. At stages 2 and 3 `p.grad` is None after backward, so that
    torch's optimizers over `module.parameters()` change nothing: update `unit.master` from `unit.gradient_shard`.
    Buffers (BatchNorm's, say) are neither moved to the mesh's device nor shared. What `requires_grad` says when the
    module is sharded holds: units are trainable or frozen from then on.
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
        self.mesh = mesh
        self.stage = stage
        self.options = options
        self.group, self.replicas = mesh.group(*STATE_AXES), None
        if options.shard not in (None, self.group.size):
            self.group, self.replicas = mesh.split(STATE_AXES, options.shard)
        self.device = mesh.device
        self._begun = False
        self._owed: set[Unit] = set()  # trainable ones whose sum of this step nobody has taken yet
        self._untaken = False  # whether `finish` was called and its result not looked at
        self.placements: dict[str, Placement] = {}
        self.units: list[Unit] = []
        self._parameters: dict[str, nn.Parameter] = {}
        for plan in plans:
            self._adopt(plan)
        trained = [(unit, self._of(unit)) for unit in self.units if unit.trainable]
        self._reducer = Reducer(
            trained, stage, self.group, self.replicas, arrives=self._check_used, left=self._backward_left
        )
        self._partial = PartialSums(mesh, [unit for unit, _ in trained])
        self._residency: Residency | None = None
        planned = list(zip(self.units, plans, strict=True))
        if stage == 3:
            stays = [Stay(unit, entries(module, plan.placements), self._of(unit)) for unit, plan in planned]
            self._residency = Residency(module, stays, self.group, options.ahead, regions)
        elif stage:
            for unit, plan in planned:
                for part in plan.parts:  # of a joined unit, whichever comes first
                    for entry in entries(module, part):
                        entry.register_forward_pre_hook(partial(self._arrived, unit))
            module.register_forward_pre_hook(self._settle_unless_training)
            module.register_forward_hook(self._forward_ends)
        if stage:
            for part in module.modules():
                part.register_state_dict_pre_hook(self._before_state_dict)

    # -- a step -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget the last step's gradients, also those of a step that was given up in the middle.

        Raises UserError where the last step's `finish` was called and not iterated over.
        """
        if self._untaken:
            self._untaken = False
            raise UserError(f"zero={self.stage}: finish() gives units one by one as their sums arrive; {_EXHAUST}")
        self._begun = True
        self._owed = {unit for unit in self.units if unit.trainable}
        for parameter in self._parameters.values():
            parameter.grad = None
        if self._residency is not None:
            self._residency.end()
            self._residency.free_all()  # also what the last step was told to keep until its end
        self._reducer.begin()

    def micro(self, index: int = 0, *, last: bool) -> None:
        """Micro-batch `index` comes next. last: no other one follows in this step."""
        if not self._begun:
            raise UserError(f"zero={self.stage}: a micro-batch outside a step; call begin() before its first one")
        self._reducer.micro(index, last=last)
        if self._residency is not None:
            by_step = self.options.gather == "step"
            self._residency.begin(index, keep_forward=by_step, keep_backward=by_step and not last)

    def forward(self, index: int) -> None:
        """The forward of micro-batch `index` comes next, and its backward not right after it: see `backward`.

        For pipelines, in the place of `micro`: each pass begins with one of the two and ends with `end_pass`.
        """
        if not self._begun:
            raise UserError(f"zero={self.stage}: a micro-batch outside a step; call begin() before its first one")
        if self._residency is not None:
            self._residency.begin_pass(index, backward=False, keep=self.options.gather == "step")

    def backward(self, index: int, *, last: bool) -> None:
        """The backward of micro-batch `index` comes next. last: no other one follows in this step."""
        self._reducer.micro(index, last=last)
        if self._residency is not None:
            self._residency.begin_pass(index, backward=True, keep=self.options.gather == "step" and not last)

    def end_pass(self, *, backward: bool) -> None:
        """The pass is over. After a backward what is not yet reduced is, where it reduces at all."""
        if backward:
            self._reducer.end_micro()
        if self._residency is not None:
            self._residency.end_pass()

    def end_micro(self) -> None:
        """The micro-batch's backward is over: reduce what is not yet reduced, where it reduces at all.

        A parameter that got no gradient on this rank counts as zero.
        """
        self._reducer.end_micro()
        if self._residency is not None:
            self._residency.end()

    def finish(self) -> Iterator[Unit]:
        """Yield each trainable unit once its sum is there; the last micro-batch must have begun.

        Exhaust it: the caller works on the units that are there while the others are still on the wire. Raises
        UserError for a second time in one step, which would add up what has been added up.
        """
        if not self._begun:
            raise UserError(f"zero={self.stage}: finish() outside a step; call begin() before its first micro-batch")
        self._begun = False
        self.end_micro()
        assert self._reducer.begun, (
            "the step's last micro-batch was not announced: call micro(last=True) before its forward"
        )
        self.settle()  # of units that no forward here has used, before an update writes to them
        self._untaken = True
        return self._sums()

    def _sums(self) -> Iterator[Unit]:
        self._untaken = False
        for unit in self._partial.sums(self._reducer.sums()):
            self._owed.discard(unit)
            yield unit

    def publish(self, unit: Unit) -> None:
        """Let every rank have what this rank's shard of `unit.master` now is, by the time it needs it.

        Raises UserError for a trainable unit that this step's `finish` has not given yet.
        """
        if unit in self._owed:
            raise UserError(f"zero={self.stage}: publish of {unit.name} before finish() gave it; {_EXHAUST}")
        self._publish(unit)

    @torch.no_grad()
    def _publish(self, unit: Unit) -> None:
        self._arrived(unit)  # published twice in a row: what the former gather sends is about to change
        if unit.master is not unit.parameter_shard:
            unit.parameter_shard.copy_(unit.master)
        if self.stage in (1, 2):
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
        self.settle()  # the gathers under way send what is written to here
        for unit in self.units:
            for piece in unit.pieces:
                value(piece, piece.of(unit.master))
            self._publish(unit)  # between steps or in one that was given up
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
                yield member.placement, self._uncut(member.placement, member.of(flat), what)

    def _uncut(self, placement: Placement, part: Tensor, what: str) -> Tensor:
        """The whole of a parameter that is cut over `tp`."""
        if not placement.cuts:
            return part
        group = self.mesh.group("tp")
        parts = part.new_empty((group.size, *part.shape))
        group.all_gather(parts, part.contiguous(), reason=f"tp.collect.{what}", phase="step")
        return put_together(list(parts), placement)

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

    # -- how a module is laid out ---------------------------------------------------------------------------------

    def _adopt(self, plan: UnitPlan) -> None:
        originals = {p.name: self.module.get_parameter(p.name) for p in plan.placements}
        dtype = next(iter(originals.values())).dtype
        unit = Unit(plan, self.stage, self.group.size, self.group.rank, dtype, self.options.precision, self.device)
        for piece in unit.pieces:
            original = originals[piece.placement.name]
            if original.device.type != "meta":
                piece.of(unit.master).copy_(original.detach().flatten()[piece.start : piece.stop])
            elif piece.placement.cuts:
                piece.of(unit.master).zero_()  # nobody fills what stands behind the end of the whole
        for member, view in zip(unit.members, unit.views, strict=True):
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
        if unit.master is not unit.parameter_shard:
            unit.parameter_shard.copy_(unit.master)
        self.units.append(unit)

    def _of(self, unit: Unit) -> list[nn.Parameter]:
        return [self._parameters[member.placement.name] for member in unit.members]

    # -- gradients arrive -----------------------------------------------------------------------------------------

    def _check_used(self, unit: Unit, member: Member) -> None:
        """Raise UserError for a gradient of a parameter that was used before it was there."""
        if self._residency is not None:
            self._residency.check_used(unit, member.placement.name)
        elif unit.gather is not None:
            raise self._used_early(member)

    def _used_early(self, member: Member) -> UserError:
        return UserError(
            f"zero={self.stage}: {member.placement.name} was used outside the forward of the module that owns "
            "it, before its update was there; call that module, or use zero=0"
        )

    def _backward_left(self, unit: Unit) -> None:
        if self._residency is not None:
            self._residency.backward_done(unit)

    # -- updated parameters arrive under the next forward (stages 1 and 2) ------------------------------------------

    @staticmethod
    def _arrived(unit: Unit, *_: object) -> None:
        if unit.gather is not None:
            unit.gather.wait()
            unit.gather = None

    def _settle_unless_training(self, *_: object) -> None:
        # In training a weight used elsewhere and not in its module is noticed when forward ends; here nothing would.
        if not torch.is_grad_enabled():
            self.settle()

    def _forward_ends(self, _: nn.Module, __: object, output: object) -> None:
        """Wait for units that forward has not entered; raise UserError if it used one all the same.

        Backward would find that too, but often torch first, in words about an in-place operation.
        """
        late = [unit for unit in self.units if unit.gather is not None]
        if not late:
            return
        used = set(map(id, leaves(output)))
        self.settle()
        for unit in late:
            for member, parameter in zip(unit.members, self._of(unit), strict=True):
                if id(parameter) in used:
                    raise self._used_early(member)

    # -- who reads the module itself --------------------------------------------------------------------------------

    def _before_state_dict(self, *_: object) -> None:
        if self.stage == 3:
            raise UserError(
                "zero=3: state_dict() would hold no values, as parameters are whole only while they compute; take them "
                "from Sharded.named_parameters() on all ranks, or use zero=2"
            )
        self.settle()


def shard(
    module: nn.Module,
    mesh: Mesh,
    stage: int = 0,
    units: Mapping[str, Sequence[str]] | None = None,
    options: Options = Options(),
    recompute: Recompute | None = None,
    placements: Mapping[str, Placement] | None = None,
) -> Sharded:
    """Lay `module`'s parameters out in flat unit buffers on the mesh's device; sum its gradients over `dp` and `cp`.

    The module is changed in place: its parameters are replaced by views of the buffers (references to the old ones
    are stale), with their values where they had any; parameters on the meta device are left unfilled, see
    `Sharded.fill`. Buffers stay where they are, and what `requires_grad` says now holds. Every rank must start with
    equal values, which nothing checks; filling from the seed or a checkpoint sees to it. `units` maps unit names to
    public parameter names, in the order in which forward meets them; by default one unit a repeated block, joined as
    `options.join` says. recompute: what has been attached to the module, if anything. placements: the parameters'
    records, where other strategies have cut them.

    Raises UserError for a module of which a part is sharded already, for `shard` ranks that do not divide the data
    ranks, for `join` at stages 2 and 3, for units that miss a parameter, and for a stage or option that there is not.
    """
    if stage not in (0, 1, 2, 3):
        raise UserError(f"zero={stage}: there is no such stage; use 0, 1, 2 or 3")
    if options.gather not in ("micro", "step"):
        raise UserError(f"zero_gather={options.gather}: use micro or step")
    if options.ahead < 0:
        raise UserError(f"zero_ahead={options.ahead}: use 0 or more")
    if not _SHARDED.isdisjoint(module.modules()):
        raise UserError(f"zero={stage}: the module, or a part of it, is sharded already; shard a new one")
    ranks = mesh.group(*STATE_AXES).size
    if options.shard is not None and (stage == 0 or ranks % options.shard):
        kinds = " and ".join({"dp": "data", "cp": "context"}[axis] for axis in STATE_AXES if mesh.sizes[axis] > 1)
        divides = f"{options.shard} does not divide {ranks} {kinds or 'data'} ranks"
        raise UserError(f"zero_shard={options.shard}: {divides if stage else 'stage 0 shards nothing'}")
    if options.join and stage > 1:
        raise UserError(f"zero_join={options.join}: units are joined at stages 0 and 1 only, and this is stage {stage}")
    if placements is None:
        placements = plain_placements(module, replicated=[axis for axis, size in mesh.sizes.items() if size > 1])
    regions = recompute.regions if recompute is not None else ()
    plans = plan_units(module, placements, units, options.join)
    if stage:
        _check_companions(module, plans)
    _SHARDED.update(module.modules())
    return Sharded(module, mesh, stage, plans, options, regions)


def _check_companions(module: nn.Module, plans: Sequence[UnitPlan]) -> None:
    """Raise UserError where a layer reads parameters of another one in a unit that may not be there yet."""
    unit_of = {name.rpartition(".")[0]: plan.name for plan in plans for p in plan.placements for name in p.names}
    names = {layer: name for name, layer in module.named_modules()}
    for name, layer in module.named_modules():
        for other in getattr(layer, "companions", ()):
            if unit_of[name] != unit_of[names[other]]:
                raise UserError(
                    f"zero: {name} and {names[other]} are computed together and must be in one unit; train or freeze "
                    "both, or use zero=0"
                )
