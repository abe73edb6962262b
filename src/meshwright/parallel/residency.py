"""Which units' parameters are whole on this rank at the moment: the gathers and the frees of ZeRO 3.

A unit is gathered when forward enters one of the modules that own its parameters, and freed when forward has left
all of them; gathered again when backward comes to their outputs, and freed once its last gradient is there. While
one unit computes, the next ones are already on the wire. Three kinds of unit are gathered once a micro-batch and not
twice: the last of forward, which backward begins with; a unit whose weight is used in several places (tied), from
its first use on; and a unit of plain embeddings, whose backward never reads the weight. In a pipeline other passes come
between a forward and its backward, so that only the last of the three holds.

Freed parameters read as NaN, without memory: a weight that is used outside the forward of the module that owns it
shows in the loss. Where no such forward used it too, it is refused in words when its gradient arrives; else it is not,
because autograd brings one gradient for all uses, and to look for NaNs in each would cost a pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.collectives import Group, Pending
from meshwright.parallel.flat import Unit
from meshwright.parallel.graph import tensors
from meshwright.parallel.placement import Placement
from meshwright.spec.errors import UserError
from meshwright.spec.traffic import Phase


class Stay:
    """One unit's presence: the modules that use it, and whether its parameters are whole."""

    def __init__(self, unit: Unit, entries: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> None:
        self.unit = unit
        self.entries = tuple(entries)
        self.parameters = tuple(parameters)
        self.tied = any(len(member.placement.names) > 1 for member in unit.members)
        self.entered: set[nn.Module] = set()  # entries that forward has come to, in any step
        self.resident = False
        self.gather: Pending | None = None
        self.left: set[nn.Module] = set()  # entries that this forward has left
        self.used = False  # in this micro-batch
        self.passed = False  # this pass has come to it
        self.done = False  # backward has been through

    @property
    def backward_reads(self) -> bool:
        """Whether backward reads the parameters: not of what is only looked up."""
        return not all(isinstance(module, nn.Embedding) for module in self.entered)


class Residency:
    """Gathers and frees the units of `module`, whose parameters must already be views of the units' buffers.

    ahead: units gathered beyond the one that computes. At once at most 1 + `ahead` units are held, and those that
    stay. regions: runs of modules that are computed again together in backward; what one gathers for that stays until
    backward has been through it, so that of a region all units are held, and `ahead` more.
    """

    def __init__(
        self,
        module: nn.Module,
        stays: Sequence[Stay],
        group: Group,
        ahead: int,
        regions: Sequence[Sequence[nn.Module]] = (),
    ) -> None:
        self.stays = {stay.unit: stay for stay in stays}
        self.group = group
        self.ahead = ahead
        self._keep_forward = self._keep_backward = False
        self._apart = False  # whether other passes come between this forward and its backward
        self._order = list(stays)
        self.freed: dict[torch.dtype, Tensor] = {}  # what freed parameters read as
        self._place = {stay: index for index, stay in enumerate(stays)}
        self._turns = _turns(stays, regions)
        self._turn = {stay: index for index, turn in enumerate(self._turns) for stay in turn}
        self._computed: set[Stay] = set()  # entered by a recompute of this micro-batch
        self._backward = False
        self._micro: int | None = None
        for stay in stays:
            self._vanish(stay)
            for entry in stay.entries:
                entry.register_forward_pre_hook(partial(self._enter, stay))
                entry.register_forward_hook(partial(self._leave, stay), always_call=True)
        module.register_forward_hook(self._forward_ends, always_call=True)

    def begin(self, micro: int, *, keep_forward: bool, keep_backward: bool) -> None:
        """A micro-batch begins. keep_…: that pass leaves units where they are."""
        self._keep_forward, self._keep_backward = keep_forward, keep_backward
        self._micro, self._backward, self._apart = micro, False, False
        self._computed.clear()
        for stay in self._order:
            stay.used = stay.done = stay.passed = False
            stay.left.clear()  # a forward need not use all of them, and a recompute ends before it has left the last

    def begin_pass(self, micro: int, *, backward: bool, keep: bool) -> None:
        """One pass of a micro-batch begins, and the other does not come next to it. keep: it leaves units where they
        are."""
        self._keep_forward = self._keep_backward = keep
        self._micro, self._backward, self._apart = micro, backward, True
        self._computed.clear()
        for stay in self._order:
            stay.done = stay.passed = False
            stay.left.clear()

    def end_pass(self) -> None:
        """It is over: free what it left behind, unless told to keep."""
        if not self._keep_forward:
            self.free_all()
        self._keep_forward = self._keep_backward = False
        self._backward, self._micro = False, None
        self._nowhere_yet()

    def end(self) -> None:
        """The micro-batch's backward is over: free what it left behind, unless told to keep."""
        keep, self._keep_forward, self._keep_backward = self._keep_backward, False, False
        self._backward, self._micro = False, None
        for stay in self._order:
            stay.used = stay.passed = False
        if not keep:
            self.free_all()

    def _nowhere_yet(self) -> None:
        """The next pass has come to no unit."""
        for stay in self._order:
            stay.passed = False

    def forget(self, unit: Unit) -> None:
        """Free one unit, whose shards have changed."""
        self._free(self.stays[unit])

    def free_all(self) -> None:
        for stay in self._order:
            self._free(stay)

    def backward_done(self, unit: Unit) -> None:
        """The unit's last gradient has arrived: nothing reads its parameters any more in this micro-batch."""
        stay = self.stays[unit]
        stay.done = True
        if not self._keep_backward:
            self._free(stay)

    def check_used(self, unit: Unit, name: str) -> None:
        """Raise UserError where a gradient arrives for a parameter that was never gathered."""
        if not self.stays[unit].used:
            raise UserError(
                f"zero=3: {name} was used outside the forward of the module that owns it, where it is not gathered; "
                "call that module, or use zero=2"
            )

    # -- forward ----------------------------------------------------------------------------------------------

    def _enter(self, stay: Stay, module: nn.Module, *_: Any) -> None:
        stay.entered.add(module)
        stay.passed = True
        self._ask(stay)
        if self._backward:  # it is computed again
            self._computed.add(stay)
            self._ask_ahead_in_backward(stay)
        else:
            place = self._place[stay]
            for following in self._order[place + 1 : place + 1 + self.ahead]:
                if not following.passed:
                    self._ask(following)
        self._await(stay)
        stay.used = stay.used or torch.is_grad_enabled()  # an evaluation in between must not hide a use elsewhere

    def _leave(self, stay: Stay, module: nn.Module, _: Any, output: Any) -> None:
        if output is None:
            return  # it failed, perhaps in a gather that still writes
        stay.left.add(module)
        training = torch.is_grad_enabled()
        if training:
            for tensor in tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._backward_enters, stay))
        if len(stay.left) < len(stay.entries):
            return
        stay.left.clear()
        stays = training and not self._apart and (stay.tied or stay is self._order[-1])
        if not (self._backward or self._keep_forward or stays):
            self._free(stay)

    def _forward_ends(self, *_: Any) -> None:
        if not (torch.is_grad_enabled() or self._backward or self._keep_forward):
            self.free_all()
            self._nowhere_yet()

    # -- backward ---------------------------------------------------------------------------------------------

    def _backward_enters(self, stay: Stay, _: Tensor) -> None:
        self._backward = True
        turn = self._turns[self._turn[stay]]
        computed_again = len(turn) == 1 or turn[-1] in self._computed
        first = stay if computed_again else turn[0]
        if first.backward_reads and not first.done:
            self._ask(first)
        self._ask_ahead_in_backward(turn[-1] if computed_again else first)
        place = self._place[stay]
        if not self._keep_backward:
            for later in self._order[place + 1 :]:
                if not later.unit.trainable and not later.tied:
                    self._free(later)  # no gradient will say that backward has left a frozen unit
        self._await(stay)

    def _ask_ahead_in_backward(self, stay: Stay) -> None:
        """Ask for the units that backward needs next after `stay`, in the order in which it needs them."""
        turn = self._turns[self._turn[stay]]
        behind = turn[turn.index(stay) + 1 :]
        asked = 0
        for following in chain(behind, *self._turns[self._turn[stay] + 1 :]):
            if asked == self.ahead:
                break
            if following.backward_reads and not following.done:
                self._ask(following)
                asked += 1

    # -- how it is done ---------------------------------------------------------------------------------------

    def _ask(self, stay: Stay) -> None:
        if stay.resident or stay.gather is not None:
            return
        whole = stay.unit.parameters
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        phase: Phase = "backward" if self._backward else "forward"
        stay.gather = self.group.all_gather(
            whole, stay.unit.parameter_shard, reason="zero.gather", phase=phase, micro=self._micro, async_=True
        )

    def _await(self, stay: Stay) -> None:
        if stay.gather is None:
            return
        stay.gather.wait()
        stay.gather, stay.resident = None, True
        for parameter, view in zip(stay.parameters, stay.unit.views, strict=True):
            parameter.data = view

    def _free(self, stay: Stay) -> None:
        if stay.gather is not None:
            stay.gather.wait()
            stay.gather = None
        elif not stay.resident:
            return
        self._vanish(stay)

    def _vanish(self, stay: Stay) -> None:
        stay.resident = False
        for parameter in stay.parameters:
            if parameter.dtype not in self.freed:
                self.freed[parameter.dtype] = torch.full((), math.nan, dtype=parameter.dtype, device=parameter.device)
            parameter.data = self.freed[parameter.dtype].expand(parameter.shape)
        stay.unit.parameters.untyped_storage().resize_(0)


def entries(module: nn.Module, placements: Sequence[Placement]) -> list[nn.Module]:
    """The modules whose forward is the use of these parameters: one that holds them all and no others, else those
    that own them."""
    names = {name for placement in placements for name in placement.names}
    owners = dict.fromkeys(name.rpartition(".")[0] for placement in placements for name in placement.names)
    common = _common([owner.split(".") for owner in owners])
    holder = module.get_submodule(common)
    prefix = f"{common}." if common else ""
    held = (prefix + name for name, _ in holder.named_parameters(remove_duplicate=False))
    callable_ = type(holder).forward is not nn.Module.forward
    if callable_ and all(name in names for name in held):
        return [holder]
    return [module.get_submodule(owner) for owner in owners]


def _turns(stays: Sequence[Stay], regions: Sequence[Sequence[nn.Module]]) -> list[list[Stay]]:
    """Units in the order in which backward needs them: from last to first, those of one region together, from its
    first to its last, because it is computed again before backward goes through it."""
    region_of = {
        module: index for index, region in enumerate(regions) for block in region for module in block.modules()
    }
    turns: list[list[Stay]] = []
    last: int | None = None
    for stay in reversed(stays):
        inside = {region_of.get(entry) for entry in stay.entries}
        region = inside.pop() if len(inside) == 1 else None
        if region is not None and region == last:
            turns[-1].insert(0, stay)
        else:
            turns.append([stay])
        last = region
    return turns


def _common(paths: Sequence[Sequence[str]]) -> str:
    """The longest common beginning of dotted names."""
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
