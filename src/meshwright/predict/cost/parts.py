"""What the parts of a model cost on one rank: a block, the embedding, the head, and what goes between ranks.

A pass through a block takes as long as its operators and the collectives that they wait for, or as long as the host
takes to issue them, whichever is more. Costs are kept, so that a search pays for each kind of shard once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.predict.context import Attention, messages
from meshwright.predict.cost.constants import Constants, constants_of
from meshwright.predict.cost.cpu import shared
from meshwright.predict.cost.links import Array, Links, Numbers
from meshwright.predict.cost.operators import Operator, Shard, Sizes, Work, Written, block, embedding, head
from meshwright.predict.cost.roofline import floor, kernels, seconds
from meshwright.predict.params import tensors
from meshwright.predict.states import DTYPE_BYTES
from meshwright.spec.cluster import Cluster, Precision
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.traffic import Operation

__all__ = ["Block", "Parts", "Shard"]


@dataclass(frozen=True, slots=True)
class Block:
    """Seconds of one micro-batch's passes through a block, or an end of the model, all in.

    lines: where they go, by reason, of the three together: "compute", "recompute"; collectives that computing waits
    for, "tp" and "cp"; "host", waiting for kernels to be issued.
    """

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    lines: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recompute


@dataclass(frozen=True, slots=True)
class _Pass:
    """Seconds: of operators on the device, of the host to issue them, and of collectives by reason."""

    device: float
    host: float
    sent: dict[str, float]
    beside: bool = True

    @property
    def total(self) -> float:
        known = self.device + sum(self.sent.values())
        return max(known, self.host) if self.beside else known + self.host

    @property
    def waits(self) -> float:
        return self.total - self.device - sum(self.sent.values())


class Parts:
    """The costs of `model` on `cluster`, for sequences of `seq` tokens."""

    def __init__(
        self, model: ModelSpec, seq: int, precision: Precision, cluster: Cluster, *, attention: Written = "sdpa",
        ranks: int | None = None,
    ) -> None:  # fmt: skip
        """ranks: how many are at work, by default one a device: on CPUs they share cores."""
        cluster = shared(cluster, ranks or cluster.devices)
        self.model, self.seq, self.precision, self.cluster, self.attention = model, seq, precision, cluster, attention
        self.constants: Constants = constants_of(cluster)
        self.slower = 1 + self.constants.straggle * math.log2(cluster.devices)
        self.links = Links(cluster, self.constants)
        self.size = DTYPE_BYTES[precision]
        self.peak = cluster.device.flops[precision]
        self.rate = self.peak / self.slower  # of the slowest device, for which all wait
        self._blocks: dict[Shard, Block] = {}
        self._ends: dict[Shard, tuple[Block, Block]] = {}
        self._parameters: dict[int, tuple[int, int, int]] = {}
        self._operators: dict[Shard, list[Operator]] = {}
        self._works: dict[Work, float] = {}
        self._floors: dict[Shard, tuple[float, float]] = {}
        self._sent: dict[tuple[Operation, int, int, int], float] = {}

    # -- computing ---------------------------------------------------------------------------------------------------

    def block(self, shard: Shard) -> Block:
        """One transformer block."""
        found = self._blocks.get(shard)
        if found is None:
            found = self._blocks[shard] = self._block(shard)
        return found

    def floor(self, shard: Shard) -> tuple[float, float]:
        """Seconds that all passes of a micro-batch of one sequence through a block do not go below, whatever
        `shard.micro`, and by how much each further sequence raises that: what can be said before `block` is asked.

        Arithmetic and bytes grow evenly with sequences, and what is the larger of two such grows no slower.
        """
        shard = shard._replace(micro=1)
        found = self._floors.get(shard)
        if found is None:
            one, two = (self._floor(shard._replace(micro=micro)) for micro in (1, 2))
            found = self._floors[shard] = one, two - one
        return found

    def _floor(self, shard: Shard) -> float:
        operators = self._operators_of(shard)
        works = [work for each in operators for work in (*each.forward, *each.backward)]
        works += [work for each in again(operators, shard, self.model) for work in each.forward]
        device, size = self.cluster.device, self.size
        took = sum(floor(work, self.constants, self.rate, device.bandwidth, size) for work in works)
        if not self.constants.collectives:  # what was measured need not grow evenly
            took += sum(sums.get("tp", 0.0) for sums in self._sums(shard, "block"))
        return took

    def ends(self, shard: Shard) -> tuple[Block, Block]:
        """The embedding, and the head with its loss."""
        shard = _plain(shard)
        found = self._ends.get(shard)
        if found is None:
            it = self.sizes(shard)
            sums = self._sums(shard, "embed"), self._sums(shard, "head")
            found = self._ends[shard] = (
                self._whole(embedding(it), (), sums[0], self.constants.host),
                self._whole(head(it), (), sums[1], self.constants.host),
            )
        return found

    def sizes(self, shard: Shard) -> Sizes:
        """What the operators of a shard are made of."""
        fused, accumulate = self.constants.fused, self.constants.accumulate_bytes
        return Sizes(self.model, shard, self.seq, self.size, self.attention, fused, accumulate)

    def _block(self, shard: Shard) -> Block:
        operators = self._operators_of(shard)
        host = self.constants.host + self.constants.watched * (shard.recompute == "selective")
        spared = self._whole(operators, again(operators, shard, self.model), self._sums(shard, "block"), host)
        if shard.region == 1:
            return spared
        # Of a region's blocks only the last is spared its last product.
        repeated, sums = again(operators, shard, self.model, spared=False), self._sums(shard, "block", spared=False)
        return _mixed(spared, self._whole(operators, repeated, sums, host), 1 / shard.region)

    def _whole(
        self,
        operators: Sequence[Operator],
        repeated: Sequence[Operator],
        sent: tuple[dict[str, float], ...],
        host: float,
    ) -> Block:
        extra = self.constants.host_block
        forward = self._pass((each.forward for each in operators), host, extra, sent[0])
        recompute = self._pass((each.forward for each in repeated), host, extra if repeated else 0, sent[1])
        backward = self._pass((each.backward for each in operators), self.constants.host_backward, extra, sent[2])
        lines = {"compute": forward.device + backward.device, "recompute": recompute.device}
        for each in (forward, recompute, backward):
            for reason, time in (*each.sent.items(), ("host", each.waits)):
                lines[reason] = lines.get(reason, 0.0) + time
        return Block(forward.total, backward.total, recompute.total, lines)

    def _pass(self, works: Iterable[tuple[Work, ...]], host: float, extra: float, sent: dict[str, float]) -> _Pass:
        flat = [each for of_operator in works for each in of_operator]
        device = sum(self.seconds(each) for each in flat)
        return _Pass(device, host * kernels(flat) + extra, sent, self.constants.beside)

    def _operators_of(self, shard: Shard) -> list[Operator]:
        """Those of a block, whatever is computed again."""
        plain = _plain(shard)
        if plain not in self._operators:
            self._operators[plain] = block(self.sizes(plain))
        return self._operators[plain]

    def seconds(self, work: Work) -> float:
        """Of one piece of work on the device."""
        found = self._works.get(work)
        if found is None:
            found = seconds(work, self.constants, self.rate, self.cluster.device.bandwidth, self.size)
            self._works[work] = found
        return found

    def _one(self, operation: Operation, payload: int, ranks: int, stride: int = 1) -> float:
        """Seconds of one collective."""
        key = operation, payload, ranks, stride
        if key not in self._sent:
            self._sent[key] = float(self.collective(operation, payload, ranks, stride))
        return self._sent[key]

    # -- what computing waits for --------------------------------------------------------------------------------------

    def _sums(
        self, shard: Shard, where: str, *, spared: bool = True
    ) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Exposed collectives of tensor and context ranks in forward, recompute and backward: see predict/tensor.py."""
        if shard.tp == 1 and shard.cp == 1:
            return {}, {}, {}
        forward, recompute, backward = {"tp": 0.0}, {"tp": 0.0}, {"tp": 0.0}
        if shard.tp > 1:
            counts = _tensor_counts(shard, where, last=self.model.resid_dropout > 0 or not spared)
            hidden = shard.micro * self.seq // shard.cp * self.model.hidden * self.size
            kind: Operation = "all_gather" if shard.sp else "all_reduce"
            took = self._one(kind, hidden, shard.tp, shard.tp_stride)
            always = self.constants.overlap_tensor
            hides = always, always, max(always, self.constants.overlap_tensor_backward)
            for sums, count, part in zip((forward, recompute, backward), counts, hides, strict=True):
                sums["tp"] = count * took * (1 - part)
        if shard.cp > 1 and where == "block":
            forward["cp"], backward["cp"] = self._context(shard)
            if shard.recompute != "none" and "attention" not in shard.kept:
                recompute["cp"] = forward["cp"]
        return forward, recompute, backward

    def _context(self, shard: Shard) -> tuple[float, float]:
        """Seconds that attention over context ranks waits for messages, in forward and backward.

        A ring's messages go beside the computing of the part that is there already.
        """
        it = Attention.of(self.model, shard.layout, batch=shard.micro, seq=self.seq, dtype_bytes=self.size)
        operator = next(each for each in self._operators_of(shard) if each.name == "attention")
        computing = {"forward": self.seconds(operator.forward[0]), "backward": self.seconds(operator.backward[0])}
        exposed = {"forward": 0.0, "backward": 0.0}
        apart = shard.tp if shard.cp_stride is None else shard.cp_stride
        for each in messages(it):
            stride = apart * (it.over if each.axis == "cp.outer" else 1)
            took = each.times * self._one(each.operation, each.payload, each.ranks, stride)
            if each.operation == "shift" and it.method not in ("rsa",):
                under = min(took, computing[each.phase] * (it.ring - 1) / it.ring)
                took -= under * (1 - self.constants.contention)
            exposed[each.phase] += took
        return exposed["forward"], exposed["backward"]

    # -- between ranks -------------------------------------------------------------------------------------------------

    def collective(self, operation: Operation, payload: Numbers, ranks: Numbers, stride: Numbers = 1) -> Array:
        """Seconds of a collective: see `links.Links.collective`."""
        return self.links.collective(operation, payload, ranks, stride)

    def message(self, payload: Numbers, stride: Numbers) -> Array:
        """Seconds of a message to the device `stride` further."""
        return self.links.message(payload, stride)

    # -- once a step ---------------------------------------------------------------------------------------------------

    def parameters(self, tp: int) -> tuple[int, int, int]:
        """Parameters of the embedding, of one block and of the head that a tensor rank has; a tied table in both."""
        found = self._parameters.get(tp)
        if found is None:
            found = self._parameters[tp] = self._count(tp)
        return found

    def _count(self, tp: int) -> tuple[int, int, int]:
        one = self.model.model_copy(update={"layers": 1})
        before = inside = after = 0
        for each in tensors(one, Layout(dp=1, tp=tp)):
            if each.block is not None:
                inside += each.local_numel
            else:
                before += each.local_numel if each.tied or each.lookup else 0
                after += 0 if each.lookup else each.local_numel
        return before, inside, after

    def optimizer(self, parameters: Numbers) -> Array:
        """Seconds to update so many parameters."""
        rate = self.cluster.device.bandwidth * self.constants.update
        return self.constants.host_step + np.asarray(parameters, dtype=np.float64) * self.constants.update_bytes / rate


def _plain(shard: Shard) -> Shard:
    """The same where nothing is computed again."""
    return shard._replace(recompute="none", recompute_keep=("linear",), region=1)


def _mixed(one: Block, other: Block, part: float) -> Block:
    """What `part` of the first and the rest of the second come to, which differ in what is computed again alone."""
    lines = {reason: part * time + (1 - part) * other.lines[reason] for reason, time in one.lines.items()}
    return replace(one, recompute=part * one.recompute + (1 - part) * other.recompute, lines=lines)


def again(operators: Sequence[Operator], shard: Shard, spec: ModelSpec, *, spared: bool = True) -> list[Operator]:
    """Operators of a block whose forward runs again in backward: see parallel/recompute.py.

    spared: whether it is the last of its region, behind whose last product nothing is saved.
    """
    if shard.recompute == "none":
        return []
    keep = shard.kept
    found = [each for each in operators if each.word is None or each.word not in keep]
    if spared and "linear" not in keep and not spec.resid_dropout:
        last = max(place for place, each in enumerate(found) if each.word == "linear")
        found = found[:last]  # unless dropout saves its mask
    return found


def _tensor_counts(shard: Shard, where: str, *, last: bool) -> tuple[int, int, int]:
    """Exposed collectives of a block or an end in forward, recompute and backward, of hidden states' size each.

    last: a recompute makes the last sum too.
    """
    if where == "embed":
        return (1, 0, 1) if shard.sp else (1, 0, 0)
    if where == "head":
        return (1, 0, 2) if shard.sp else (0, 0, 1)
    whole = shard.recompute != "none" and "linear" not in shard.kept
    sums = whole * (1 + last)
    return (4, sums + 2 * whole, 6) if shard.sp else (2, sums, 2)
