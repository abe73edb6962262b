"""What a rank of a pipeline does, one thing after another: the words in which every schedule is written.

A model is cut into stages, a batch into micro-batches, and a schedule is one list of actions for each rank. The runtime
executes these lists, `timeline` times them, the command line draws them, and `check` proves that they fit together: it
is one value, so what is predicted, run and drawn cannot differ. Actions know nothing of how a schedule came to be: a
backward may be whole or in two parts (zero-bubble, Qi et al. 2023), and stages may be dealt out to ranks in any order,
looped (Narayanan et al. 2021) or in a V.

    ==================  ===========================================================  ===============================
    kind                what happens, for micro-batch i on stage s                   waits for
    ==================  ===========================================================  ===============================
    forward             the stage's output is computed, activations are kept         its input, from stage s − 1
    backward            gradients of input and weights; activations are freed        its output's gradient, from s + 1
    backward_input      the input's gradient alone                                   the same
    backward_weight     the weights' gradients; activations are freed                backward_input on this rank
    send_activations    the stage's output goes to stage s + 1                       nothing: it goes beside computing
    recv_activations    a receive of the stage's input from s − 1 is *posted*        nothing: who needs it waits
    send_gradients      the gradient of the stage's input goes to stage s − 1        nothing
    recv_gradients      a receive of the gradient of its output from s + 1 is posted nothing
    reduce              the stage's gradients are summed over data ranks             the same on all data ranks
    step                the optimizer                                                all ranks
    ==================  ===========================================================  ===============================

Stages that are neighbours and on one rank hand tensors over without a message. A *channel* is all messages of one kind
from one rank to another, and first in, first out. Two ranks that each have a stage behind the other's, as with two
ranks and several chunks, have channels of one kind in both directions: each needs a queue of its own, or a receive that
was posted early would stand before the send that it waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_activations",
    "recv_activations",
    "send_gradients",
    "recv_gradients",
    "reduce",
    "step",
]
Payload = Literal["activations", "gradients"]

COMPUTING: frozenset[Kind] = frozenset({"forward", "backward", "backward_input", "backward_weight"})
SENDS: frozenset[Kind] = frozenset({"send_activations", "send_gradients"})
RECEIVES: frozenset[Kind] = frozenset({"recv_activations", "recv_gradients"})
ONCE: frozenset[Kind] = frozenset({"reduce", "step"})
"""Of a whole batch, and not of a micro-batch."""


class Action(NamedTuple):
    """One thing that a rank does. `micro` is None for reduce and step; the stage of step is the rank's first."""

    kind: Kind
    stage: int
    micro: int | None

    def __str__(self) -> str:
        return words(self)


class Channel(NamedTuple):
    """All messages of one kind from one rank to another, first in, first out."""

    source: int
    target: int
    payload: Payload


@dataclass(frozen=True)
class Schedule:
    """Who does what, in which order.

    stages: the rank of each stage. ranks: the actions of each rank. Nothing is proven of it until `check` has.
    """

    name: str
    stages: tuple[int, ...]
    micros: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def pipeline_ranks(self) -> int:
        return len(self.ranks)

    @cached_property
    def chunks(self) -> int:
        """Stages of the rank that has most of them."""
        return max(map(len, self._of_rank), default=0)

    @cached_property
    def _of_rank(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(stage for stage, holder in enumerate(self.stages) if holder == rank)
            for rank in range(len(self.ranks))
        )

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank has, ascending: its chunks."""
        return self._of_rank[rank]

    @cached_property
    def channels(self) -> tuple[Channel, ...]:
        """All that the schedule uses, each once, in an order that is the same on every rank."""
        found: dict[Channel, None] = {}
        for stage in range(1, len(self.stages)):
            before, behind = self.stages[stage - 1], self.stages[stage]
            if before != behind:
                found[Channel(before, behind, "activations")] = None
                found[Channel(behind, before, "gradients")] = None
        return tuple(found)


# -- both ends of a message -----------------------------------------------------------------------------------------


def partner(message: Action) -> Action:
    """The receive of a send, the send of a receive."""
    kind, stage, micro = message
    if kind == "send_activations":
        return Action("recv_activations", stage + 1, micro)
    if kind == "recv_activations":
        return Action("send_activations", stage - 1, micro)
    if kind == "send_gradients":
        return Action("recv_gradients", stage - 1, micro)
    assert kind == "recv_gradients", message
    return Action("send_gradients", stage + 1, micro)


# -- in words -------------------------------------------------------------------------------------------------------


def words(action: Action) -> str:
    """ "forward of micro-batch 3 on stage 1", "send of micro-batch 3's activations from stage 1 to stage 2"."""
    kind, stage, micro = action
    match kind:
        case "step":
            return "step"
        case "reduce":
            return f"reduce of stage {stage}"
        case "send_activations" | "send_gradients":
            return f"send of {payload(action)} from stage {stage} to stage {partner(action).stage}"
        case "recv_activations" | "recv_gradients":
            return f"receive of {payload(action)} from stage {partner(action).stage} on stage {stage}"
        case _:
            part = {"backward_input": " for the input", "backward_weight": " for the weights"}.get(kind, "")
            return f"{kind.partition('_')[0]}{part} of micro-batch {micro} on stage {stage}"


def payload(message: Action) -> str:
    """ "micro-batch 3's activations"."""
    return f"micro-batch {message.micro}'s {message.kind.partition('_')[2]}"
