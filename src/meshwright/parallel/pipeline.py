"""Pipeline parallelism: one engine that does what a schedule says (schedule/), whichever schedule it is.

The model's blocks are cut into stages (stage.py), stage s on a rank of `pp`; micro-batches go through them one after
the other, so that all ranks compute at once, each another micro-batch (Huang et al. 2018, GPipe; Narayanan et al. 2019,
PipeDream, and 2021, interleaved stages).

    =================  ==========================================  ====================================================
    action             what is done                                what is sent, and in which phase
    =================  ==========================================  ====================================================
    recv_activations   room is made for a stage's input            nothing: the message may come from now on
    forward            its wait; the stage's forward               nothing
    send_activations   the output leaves                           hidden states [B, T, D], forward
    recv_gradients     room is made for the output's gradient
    backward           its wait; the stage's backward              nothing
    send_gradients     the input's gradient leaves                 the same size, backward
    reduce             the stage's gradients are all there         see zero.py
    =================  ==========================================  ====================================================

Receives are posted before they are needed and nobody waits for sends, so a message travels under computation where the
schedule leaves it time. Each direction between two ranks has a communicator of its own for activations and one for
gradients; schedule/check.py proves of a schedule that it cannot end in a deadlock.

Between a forward and its backward a stage keeps what autograd saved, and the root of its graph, not the output itself:
that is let go when it has left (on an accelerator two messages later). Stages on one rank hand tensors over.

Memory a rank: the parameters and states of its stages only; activations of as many micro-batches as the schedule has in
flight there at most (GPipe: all m; 1F1B: min(m, p − s)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.comm.collectives import Group, Pending
from meshwright.comm.mesh import Mesh
from meshwright.comm.outbox import Outbox
from meshwright.schedule.actions import Action, Schedule
from meshwright.spec.errors import UserError
from meshwright.spec.traffic import Phase


class Passes(Protocol):
    """What a stage's passes are, for the engine that says when."""

    def shape(self, micro: int) -> Sequence[int] | None:
        """Of a micro-batch's hidden states; None where it is empty on this rank, and nobody computes it."""

    def forward(self, stage: int, micro: int, hidden: Tensor | None) -> Tensor:
        """From a stage's input, None on the first stage, to its output; on the last stage what backward begins with."""

    def before_backward(self, stage: int, micro: int, last: bool) -> None:
        """A stage's backward comes next, its `last` of the step or not; also of an empty micro-batch."""

    def after_backward(self, stage: int, micro: int) -> None:
        """It is over."""


@dataclass
class _Flight:
    """One micro-batch on one stage, from its forward to its backward."""

    hidden: Tensor | None = None  # the stage's input, a leaf
    coming: Pending | None = None  # the input on its way here
    root: GradientEdge | None = None  # where backward begins, whether or not the output is there still
    output: Tensor | None = None  # until it is sent
    gradient: Tensor | None = None  # of the output
    back: Pending | None = None  # that on its way here
    sent_back: Tensor | None = None  # the input's gradient, until it is sent


_PHASES: dict[str, Phase] = {"activations": "forward", "gradients": "backward"}


class Pipeline:
    """This rank's part of a pipeline whose schedule has been checked. All ranks of `pp` must make one together.

    dtype: of hidden states. Raises UserError for a schedule of other ranks, or one that this engine cannot run.
    """

    def __init__(self, mesh: Mesh, schedule: Schedule, dtype: torch.dtype) -> None:
        if len(schedule.ranks) != mesh.sizes["pp"]:
            raise UserError(
                f"pp_schedule: {schedule.name} is for {len(schedule.ranks)} pipeline ranks, and there are "
                f"{mesh.sizes['pp']}"
            )
        apart = [action for actions in schedule.ranks for action in actions if action.kind.startswith("backward_")]
        if apart:
            raise UserError(
                f"pp_schedule: {schedule.name} computes gradients of inputs and of weights apart, which is not "
                "available yet; use whole backwards"
            )
        self.mesh, self.schedule, self.dtype = mesh, schedule, dtype
        self.place = mesh.coords["pp"]
        self.actions = schedule.ranks[self.place]
        self.last_stage = len(schedule.stages) - 1
        self._last_backward = {action.stage: action.micro for action in self.actions if action.kind == "backward"}
        ways = mesh.channels("pp", [tuple(channel) for channel in schedule.channels]) if len(schedule.ranks) > 1 else {}
        self._activations: dict[int, Group] = {}  # by the stage that they leave
        self._gradients: dict[int, Group] = {}  # by the stage whose input they are of
        for stage in range(self.last_stage):
            source, target = schedule.stages[stage], schedule.stages[stage + 1]
            if source != target and self.place in (source, target):
                self._activations[stage] = ways[source, target, "activations"]
                self._gradients[stage + 1] = ways[target, source, "gradients"]
        self._flights: dict[tuple[int, int | None], _Flight] = {}  # by stage and micro-batch
        self._outbox = Outbox("nobody" if mesh.checked else "thread" if mesh.device.type == "cpu" else "stream")

    def run(self, passes: Passes) -> None:
        """Do all actions of a step up to the optimizer's, which is the caller's."""
        self._begin()
        for action in self.actions:
            with self.mesh.tracing.span("action", *action):
                self._do(action, passes)
        with self.mesh.tracing.span("wait", "pp.sends"):
            self._end()

    def run_forward(self, passes: Passes) -> None:
        """Let all micro-batches go forward in the schedule's order, and nothing back; gradients must be off."""
        self._begin()
        for action in self.actions:
            if action.kind in ("recv_activations", "forward", "send_activations"):
                self._do(action, passes)
                if action.kind == "forward" and (flight := self._flights.get((action.stage, action.micro))):
                    flight.hidden = None  # nothing will come back for it
        self._end()

    # -- actions ----------------------------------------------------------------------------------------------------

    def _do(self, action: Action, passes: Passes) -> None:
        if action.kind in ("reduce", "step"):
            return  # sums begin within the last backward, and the optimizer is the caller's
        assert action.micro is not None
        kind, stage, micro = action
        if kind == "send_gradients":
            self._hand_back(stage, micro)
            return
        shape = passes.shape(micro)
        if kind == "backward":
            passes.before_backward(stage, micro, micro == self._last_backward[stage])
            if shape is not None:
                self._backward(stage, micro)
            passes.after_backward(stage, micro)
        elif shape is None:
            return
        elif kind == "forward":
            self._forward(stage, micro, passes)
        elif kind == "recv_activations":
            flight = self._flight(stage, micro)
            flight.hidden = self._room(shape)
            flight.coming = self._receive(self._activations[stage - 1], flight.hidden, "activations", micro)
        elif kind == "send_activations":
            flight = self._flight(stage, micro)
            assert flight.output is not None
            output, flight.output = flight.output, None
            self._send(self._activations[stage], output, "activations", micro)
        else:
            assert kind == "recv_gradients", action
            flight = self._flight(stage, micro)
            flight.gradient = self._room(shape)
            flight.back = self._receive(self._gradients[stage + 1], flight.gradient, "gradients", micro)

    def _forward(self, stage: int, micro: int, passes: Passes) -> None:
        flight = self._flight(stage, micro)
        if flight.coming is not None:
            flight.coming.wait()
            flight.coming = None
        if flight.hidden is not None:
            flight.hidden.requires_grad_(torch.is_grad_enabled())
        output = passes.forward(stage, micro, flight.hidden)
        if output.requires_grad:
            flight.root = get_gradient_edge(output)
        if stage == self.last_stage:
            return
        flight.output = output.detach().contiguous()
        if stage not in self._activations:  # the next stage is on this rank
            self._flight(stage + 1, micro).hidden = flight.output
            flight.output = None

    def _hand_back(self, stage: int, micro: int) -> None:
        """Send the gradient of a stage's input, where the micro-batch has gone through it."""
        flight = self._flights.pop((stage, micro), None)
        if flight is not None:
            assert flight.sent_back is not None
            self._send(self._gradients[stage], flight.sent_back, "gradients", micro)

    def _backward(self, stage: int, micro: int) -> None:
        flight = self._flights[stage, micro]
        if flight.back is not None:
            flight.back.wait()
            flight.back = None
        root, gradient = flight.root, flight.gradient
        flight.root = flight.gradient = None
        assert root is not None, (stage, micro)
        torch.autograd.backward((root,), (gradient,))
        hidden, flight.hidden = flight.hidden, None
        if stage == 0:
            del self._flights[stage, micro]
            return
        assert hidden is not None and hidden.grad is not None
        if stage in self._gradients:
            flight.sent_back = hidden.grad.contiguous()
        else:  # the stage before is on this rank
            self._flight(stage - 1, micro).gradient = hidden.grad
            del self._flights[stage, micro]

    # -- how it is done ---------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Forget a step that was given up in the middle."""
        self._flights.clear()

    def _end(self) -> None:
        self._outbox.drain()
        self._flights.clear()

    def _flight(self, stage: int, micro: int) -> _Flight:
        return self._flights.setdefault((stage, micro), _Flight())

    def _room(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.mesh.device)

    def _send(self, way: Group, tensor: Tensor, what: str, micro: int) -> None:
        reason, phase = f"pp.{what}", _PHASES[what]
        sent = way.send(tensor, 1 - way.rank, reason=reason, phase=phase, micro=micro, async_=True)
        self._outbox.post(sent, way, tensor.numel() * tensor.element_size())

    def _receive(self, way: Group, tensor: Tensor, what: str, micro: int) -> Pending:
        return way.recv(tensor, 1 - way.rank, reason=f"pp.{what}", phase=_PHASES[what], micro=micro, async_=True)
