"""The sums of gradients over the ranks: when each unit's begins, what it holds, and when it has to be over.

A gradient is copied into its unit's flat buffer as autograd accumulates it. When the unit's last one is there, the sum
starts, in the order in which backward meets the units. Stages 0 and 1 have a whole buffer for each unit and reduce once
a step; 2 and 3 lend a unit one from its first gradient in backward until its sum is over, reduce in every micro-batch,
and add the shard to the step's sum. With hybrid sharding the shards' sums then go once a step across the groups.

Who calls for a gradient is a hook of autograd's, which costs a small model more than the gradient. So it is there for a
step's first gradient, which goes into the buffer, and for the last, which may begin a sum; in between autograd adds to
the buffer by itself.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwright.comm.collectives import Group, Pending
from meshwright.parallel.flat import Member, Reduction, Unit
from meshwright.spec.errors import UserError
from meshwright.spec.run import UNDER_WAY


class _Call:
    """Autograd's call at each gradient of a parameter; it may rest where autograd adds to the buffer by itself."""

    def __init__(self, unit: Unit, index: int, parameter: nn.Parameter, arrived: Callable[[Tensor], None]) -> None:
        self._unit, self._index, self._arrived = unit, index, arrived
        self._parameter = weakref.ref(parameter)  # which holds its hooks, and these hold all else
        self._handle: RemovableHandle | None = None
        self._view: Tensor | None = None  # while it rests, the parameter's part of the buffer
        self.begin()

    def begin(self) -> None:
        """Call at the next gradient."""
        self._view = None
        if self._handle is None and (parameter := self._parameter()) is not None:
            self._handle = parameter.register_post_accumulate_grad_hook(self._arrived)

    def rest(self) -> None:
        """Call no more, where a gradient has been put into the buffer and the next is added there."""
        parameter = self._parameter()
        if self._handle is None or parameter is None or parameter.grad is None or not self._unit.arrived[self._index]:
            return
        self._view = parameter.grad
        self._handle.remove()
        self._handle = None

    def check(self) -> None:
        """Raise UserError where somebody has taken away what autograd was to add to."""
        parameter = self._parameter()
        if self._view is not None and parameter is not None and parameter.grad is not self._view:
            name = self._unit.members[self._index].placement.name
            raise UserError(f"zero: {name}.grad was set between two micro-batches of a step; leave it until its end")


class Reducer:
    """Sums the gradients of `units`, trainable ones in the order of forward, each given with its parameters.

    group: the ranks that shard among themselves; replicas: those that hold the same shards, if there are others.
    arrives is called with each gradient's unit and member and may refuse it; left with a unit whose last gradient of
    a micro-batch that reduces has arrived.
    """

    def __init__(
        self,
        units: Sequence[tuple[Unit, Sequence[nn.Parameter]]],
        stage: int,
        group: Group,
        replicas: Group | None,
        *,
        arrives: Callable[[Unit, Member], None],
        left: Callable[[Unit], None],
    ) -> None:
        self.stage, self.group, self.replicas = stage, group, replicas
        self._arrives, self._left = arrives, left
        # Backward meets the units from last to first; reductions are issued in this order on every rank, whatever
        # order the gradients arrive in, because ranks must issue collectives alike.
        self._order = [unit for unit, _ in reversed(units)]
        self._next = len(self._order)
        self._micro: int | None = None
        self._reduces = False  # whether this micro-batch's backward reduces
        self._under_way: deque[Unit] = deque()
        self._calls = [
            _Call(unit, index, parameter, self._arrival(unit, index))
            for unit, parameters in units
            for index, parameter in enumerate(parameters)
        ]

    # -- a step -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget the last step's sums, also those of a step that was given up in the middle."""
        self._reduces = False
        for call in self._calls:
            call.begin()
        for unit in self._order:
            self._settle(unit)
            if self.stage >= 2 and unit.gradients is not None:
                self.group.scratch.give(unit.gradients)
                unit.gradients = None
            unit.arrived = [False] * len(unit.members)
            unit.summed = False

    def micro(self, index: int, *, last: bool) -> None:
        """Micro-batch `index` comes next. last: no other one follows in this step."""
        self._micro = index
        self._reduces = last or self.stage >= 2
        if self._reduces:
            for call in self._calls:
                call.check()
                call.begin()
            self._next = 0
            for unit in self._order:
                unit.missing = len(unit.members)

    def end_micro(self) -> None:
        """The micro-batch's backward is over: reduce what is not yet reduced, where it reduces at all."""
        if self._reduces:
            while self._next < len(self._order):
                self._reduce(self._order[self._next])
                self._next += 1
            self._reduces = False
        elif self.stage < 2:
            for call in self._calls:
                call.rest()

    @property
    def begun(self) -> bool:
        """Whether every unit's sum of this step is there or under way."""
        return all(unit.reduction is not None or unit.summed for unit in self._order)

    def sums(self) -> Iterator[Unit]:
        """Yield each unit once its sum is there, while the others are still on the wire."""
        if self.replicas is not None:
            yield from self._across_replicas(self.replicas)
            return
        for unit in self._order:
            self._settle(unit)
            yield unit

    # -- a gradient arrives -----------------------------------------------------------------------------------

    def _arrival(self, unit: Unit, index: int) -> Callable[[Tensor], None]:
        """A hook that autograd calls when it has accumulated a gradient of this backward into a parameter."""
        member = unit.members[index]
        lasting = None if unit.gradients is None else member.of(unit.gradients)

        def arrived(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None and not gradient.requires_grad, "backward(create_graph=True) is not supported"
            self._check_announced(unit)
            self._arrives(unit, member)
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

    def _check_announced(self, unit: Unit) -> None:
        if self._reduces and unit.missing == 0:
            raise UserError("zero: a second backward in one micro-batch; add the losses up, or make it a micro-batch")
        if self.stage >= 2 and not self._reduces:
            raise UserError(f"zero={self.stage}: a backward outside a micro-batch; call micro() before its forward")

    def _backward_left(self, unit: Unit) -> None:
        self._left(unit)
        while self._next < len(self._order) and self._order[self._next].missing == 0:
            self._reduce(self._order[self._next])
            self._next += 1

    def _lend(self, unit: Unit) -> None:
        """Whole gradients for a unit that backward has come to, in the dtype of their reduction (stages 2 and 3)."""
        if self._next == 0:  # what the last micro-batch left under way had this one's forward to come through
            while self._under_way:
                self._settle(self._under_way[0])
        unit.gradients = self._take(unit.padded, unit.reduce_dtype, unit)
        unit.gradients[unit.size :].zero_()

    def _take(self, size: int, dtype: torch.dtype, unit: Unit) -> Tensor:
        return self.group.scratch.take(size, dtype, unit.parameters.device)

    # -- a sum begins -----------------------------------------------------------------------------------------

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
        if narrows or (self.stage == 1 and whole.device.type == "cpu"):  # there a reduce-scatter holds a copy
            self._make_room(unit)
        if narrows:
            wire = self._take(whole.numel(), unit.reduce_dtype, unit)
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

    # -- and is over ------------------------------------------------------------------------------------------

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
                wire = self._take(wire.numel(), unit.reduce_dtype, unit)
                wire.copy_(unit.gradient_shard)
            sum_ = replicas.all_reduce(wire, reason="zero.replicas", phase="backward", async_=True)
            pending.append((unit, wire, sum_))
        for unit, wire, sum_ in pending:
            sum_.wait()
            if wire.dtype != unit.gradient_shard.dtype:
                unit.gradient_shard.copy_(wire)
                self.group.scratch.give(wire)
            yield unit
