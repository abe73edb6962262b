"""Micro-batches in flight on a pipeline rank: those that its stages have taken forward and not yet backward.

Each keeps what its forward has saved, so what a rank holds follows from its list of actions: 1F1B keeps min(m, p − s)
of m micro-batches on stage s of p, GPipe all m. The list is walked with the sizes of this rank's own micro-batches, of
which the last are smaller or empty. Two things are asked:

- what is kept at the fullest moment, which is behind a forward; and
- for the backward of a micro-batch on a stage, the most that there is beside it: what the others in flight keep, the
  buffers of receives that are posted and not used yet, what has been sent and is not let go, and with zero_gather=step
  the units of the rank's other stages.

Backward needs the graph of an output, not the output, and nobody needs a gradient that is sent. On the CPU messages are
let go when they have left, small ones together; an accelerator keeps the last two of each way (comm/outbox.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from meshwright.predict import activations
from meshwright.predict.activations import Saved, total
from meshwright.predict.micros import Micro, hidden_bytes, sequences_computed, sizes
from meshwright.predict.stages import actions_of, stages_on
from meshwright.predict.states import DTYPE_BYTES, padded
from meshwright.spec.batch import largest_micro
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec
from meshwright.spec.stages import Stage
from meshwright.spec.traffic import SENT_AT_ONCE, SENT_TOGETHER

CONSUMED = {"forward": "recv_activations", "backward": "recv_gradients", "backward_input": "recv_gradients"}
"""The receive whose buffer a computing action uses."""
ENDS = ("backward", "backward_weight")
"""Actions behind which a micro-batch keeps nothing."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a rank holds beside a micro-batch of size `micro` whose backward on `stage` begins, where that is most.

    others: micro-batches in flight beside it, one that is on two stages counted twice. Bytes: `activations` of these,
    `received` of posted receives, `sent` messages that are not let go, `gathered` units of other stages.
    """

    stage: Stage
    micro: Micro
    others: int
    activations: int
    received: int
    sent: int
    gathered: int

    @property
    def total(self) -> int:
        return self.activations + self.received + self.sent + self.gathered


def kept_at_once(run: RunSpec, layout: Layout, rank: int, *, cpu: bool = True) -> list[Saved]:
    """What autograd keeps on `rank` when it keeps most, of all micro-batches in flight; without pipeline ranks that is
    what its largest micro-batch keeps."""
    if layout.pp == 1:
        return activations.saved(run.model, layout, **sizes(run, _largest(run, layout, rank), cpu))
    flight = Flight(run, layout, rank, cpu=cpu)
    return [row for stage, micro in flight.fullest for row in flight.saved(flight.stages[stage], flight.micros[micro])]


def micros_at_once(run: RunSpec, layout: Layout, rank: int, *, cpu: bool = True) -> list[Micro]:
    """The sizes of the micro-batches whose tokens are there then: from the first thing that the rank does with one, be
    it to ask for its message, until its first stage has taken it backward."""
    if layout.pp == 1:
        return [_largest(run, layout, rank)]
    flight = Flight(run, layout, rank, cpu=cpu)
    return [flight.micros[micro] for micro in flight.begun]


def _largest(run: RunSpec, layout: Layout, rank: int) -> Micro:
    place = layout.coordinates(rank)["dp"]
    return largest_micro(run.batch.sequences, layout.data_ranks, place, run.batch.micro), run.data.seq_len


class Flight:
    """The list of `rank`, which is one of several pipeline ranks, walked with its micro-batches."""

    def __init__(self, run: RunSpec, layout: Layout, rank: int, *, cpu: bool) -> None:
        self.run, self.layout, self.cpu = run, layout, cpu
        self.stages = {stage.index: stage for stage in stages_on(run, layout, rank)}
        self.micros = sequences_computed(run, layout, rank)
        self.actions = [
            (kind, stage, micro)
            for kind, stage, micro in actions_of(run, layout, rank)
            if micro is not None and self.micros[micro][0]
        ]
        self._kept: dict[tuple[int, Micro], int] = {}

    def saved(self, stage: Stage, micro: Micro) -> list[Saved]:
        """What one micro-batch keeps on one stage."""
        return activations.saved(self.run.model, self.layout, **sizes(self.run, micro, self.cpu, stage))

    def kept(self, stage: int, micro: int) -> int:
        """Its bytes, by the numbers of both."""
        key = stage, self.micros[micro]
        if key not in self._kept:
            self._kept[key] = total(self.saved(self.stages[stage], key[1]))
        return self._kept[key]

    @cached_property
    def _end(self) -> int:
        """How many actions are done when most is kept."""
        now = most = end = 0
        for place, (kind, stage, micro) in enumerate(self.actions):
            if kind == "forward":
                now += self.kept(stage, micro)
                if now > most:
                    most, end = now, place + 1
            elif kind in ENDS:
                now -= self.kept(stage, micro)
        return end

    @property
    def fullest(self) -> tuple[tuple[int, int], ...]:
        """The micro-batches in flight then, by the numbers of stage and micro-batch, as they came."""
        flying: dict[tuple[int, int], None] = {}
        for kind, stage, micro in self.actions[: self._end]:
            if kind == "forward":
                flying[stage, micro] = None
            elif kind in ENDS:
                del flying[stage, micro]
        return tuple(flying)

    @property
    def begun(self) -> tuple[int, ...]:
        """The micro-batches whose tokens are there then."""
        there: dict[int, None] = {}
        for kind, stage, micro in self.actions[: self._end]:
            there[micro] = None
            if kind in ENDS and stage == min(self.stages):
                del there[micro]
        return tuple(there)

    def heaviest(self) -> list[Load]:
        """For each of the rank's stages, and each size of micro-batch, the load beside its backward."""
        found: dict[tuple[Stage, Micro], Load] = {}
        for load in self._loads():
            key = load.stage, load.micro
            if key not in found or load.total > found[key].total:
                found[key] = load
        return list(found.values())

    def _loads(self) -> Iterator[Load]:
        """That beside each backward, in order."""
        away = self.layout.offload == "activations"
        flying = kept = received = 0
        sent = _Sent(self.cpu)
        hidden = [hidden_bytes(self.run, self.layout, micro) for micro in self.micros]
        posted: set[tuple[str, int, int]] = set()
        gathered = _Gathered(self)
        for kind, stage, micro in self.actions:
            mine = 0 if away else self.kept(stage, micro)
            if kind.startswith("recv"):
                posted.add((kind, stage, micro))
                received += hidden[micro]
            elif (message := (CONSUMED.get(kind, ""), stage, micro)) in posted:
                posted.remove(message)
                received -= hidden[micro]
            elif kind.startswith("send"):
                sent.add((kind, stage), hidden[micro])
            if kind in ("backward", "backward_input"):
                beside = gathered.beside(stage)
                yield Load(
                    self.stages[stage], self.micros[micro], flying - 1, kept - mine, received, sent.bytes, beside
                )
            if kind == "forward":
                flying, kept = flying + 1, kept + mine
                gathered.forward(stage)
            elif kind in ENDS:
                flying, kept = flying - 1, kept - mine
                gathered.backward(stage)


class _Sent:
    """Bytes of messages that are not let go: see comm/outbox.py."""

    def __init__(self, cpu: bool) -> None:
        self._cpu = cpu
        self._small = 0
        self._ways: dict[tuple[str, int], deque[int]] = {}

    def add(self, way: tuple[str, int], size: int) -> None:
        self._small += size
        if self._small >= SENT_TOGETHER:
            self._small = 0
        self._ways.setdefault(way, deque(maxlen=SENT_AT_ONCE)).append(size)

    @property
    def bytes(self) -> int:
        return self._small if self._cpu else sum(map(sum, self._ways.values()))


class _Gathered:
    """Bytes of the units that stages hold whole, once gathered, until the step's last backward (zero_gather=step)."""

    def __init__(self, flight: Flight) -> None:
        run, layout = flight.run, flight.layout
        asked = layout.zero == 3 and layout.zero_gather == "step"
        self._whole = {
            index: sum(padded(run, layout, stage).values()) * DTYPE_BYTES[run.precision] if asked else 0
            for index, stage in flight.stages.items()
        }
        self._left = dict.fromkeys(flight.stages, sum(1 for batch, _ in flight.micros if batch))
        self._there: set[int] = set()

    def forward(self, stage: int) -> None:
        self._there.add(stage)

    def backward(self, stage: int) -> None:
        self._left[stage] -= 1
        if not self._left[stage]:
            self._there.discard(stage)

    def beside(self, stage: int) -> int:
        return sum(self._whole[other] for other in self._there if other != stage)
