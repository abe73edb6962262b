"""What attention over `cp` ranks moves, keeps and computes in a layer: see the table in parallel/context.py.

All of it follows from the sizes of one layer's attention on one rank, and from the plan of calls in spec/sequence.py
that the run reads too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from meshwright.predict.rows import row
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.sequence import Method, Order, Plan, head_ranks, ring_plan, shared_heads, spans, visible_pairs
from meshwright.spec.traffic import Operation, Phase, TrafficRow

PRODUCTS = {"fused": (2, 5), "written out": (2, 4)}
"""Matrix products of a call's forward and backward; the fused kernel's backward computes the scores again."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention over `cp` ranks, for `batch` sequences of `length` positions, on each of the ranks.

    heads, kv_heads: those of a rank before it deals them out, behind tensor parallelism. width: of a head. size: bytes
    of an element. inner: usp's ranks that deal heads out.
    """

    method: Method
    cp: int
    order: Order
    batch: int
    length: int
    heads: int
    kv_heads: int
    width: int
    size: int
    inner: int = 1
    causal: bool = True
    window: int | None = None

    @classmethod
    def of(cls, spec: ModelSpec, layout: Layout, *, batch: int, seq: int, dtype_bytes: int) -> Self:
        """That of `batch` sequences of `seq` tokens, of which each of the layout's context ranks has a part."""
        return cls(
            method=layout.cp_method,
            cp=layout.cp,
            order=layout.cp_order,
            batch=batch,
            length=seq,
            heads=spec.heads // layout.tp,
            kv_heads=-(-spec.num_kv_heads // layout.tp),
            width=spec.head_width,
            size=dtype_bytes,
            inner=layout.cp_ulysses or 1,
            causal=spec.causal,
            window=spec.window,
        )

    @property
    def over(self) -> int:
        """Ranks that deal heads out among themselves."""
        return head_ranks(self.method, self.cp, self.inner)

    @property
    def ring(self) -> int:
        """Parts of the sequence once heads are dealt out."""
        return self.cp // self.over

    @property
    def own_heads(self) -> int:
        return self.heads // self.over

    @property
    def own_kv_heads(self) -> int:
        return shared_heads(self.kv_heads, self.over)

    def elements(self, heads: int) -> int:
        """Of a tensor of so many heads, for the positions that a rank has while it computes."""
        return self.batch * self.length // self.ring * heads * self.width

    @property
    def kv(self) -> int:
        """Bytes of keys and values together, as they go around."""
        return 2 * self.elements(self.own_kv_heads) * self.size

    @property
    def q(self) -> int:
        """Bytes of the queries, and of the output."""
        return self.elements(self.own_heads) * self.size

    @property
    def scores(self) -> int:
        """Elements of T/cp × T for every head of every sequence."""
        return self.batch * self.own_heads * self.length // self.ring * self.length


# -- what moves -----------------------------------------------------------------------------------------------------


class Message(NamedTuple):
    """So many collectives of a kind in a layer, all of one payload."""

    operation: Operation
    axis: str
    ranks: int
    reason: str
    phase: Phase
    payload: int
    times: int


def messages(it: Attention) -> list[Message]:
    """Of one layer, forward and backward."""
    found = [*_exchanges(it), *_ring(it)] if it.over > 1 else [*_ring(it)]
    return [each for each in found if each.times and each.ranks > 1]


def traffic(it: Attention, layers: int, micro: int | None, recomputed: int = 0) -> list[TrafficRow]:
    """The rows of one micro-batch on a rank, the same on all of `cp`.

    recomputed: layers whose attention is computed again in backward, which sends what forward has sent; none where a
    recompute keeps attention.
    """
    found = []
    for operation, axis, ranks, reason, phase, payload, times in messages(it):
        found.append(row(operation, axis, ranks, reason, phase, [payload] * (times * layers), micro))
        if phase == "forward":
            found.append(row(operation, axis, ranks, reason, "recompute", [payload] * (times * recomputed), micro))
    return [each for each in found if each is not None]


def _exchanges(it: Attention) -> Iterator[Message]:
    axis = "cp" if it.over == it.cp else "cp.inner"
    part = it.batch * it.length // it.cp * it.width * it.size  # of one head
    for phase in ("forward", "backward"):
        qkv = it.over * (it.own_heads + 2 * it.own_kv_heads) * part
        yield Message("all_to_all", axis, it.over, "cp.ulysses.qkv", phase, qkv, 1)
        yield Message("all_to_all", axis, it.over, "cp.ulysses.out", phase, it.heads * part, 1)


def _ring(it: Attention) -> Iterator[Message]:
    axis, n = "cp" if it.ring == it.cp else "cp.outer", it.ring
    if it.method == "gather":
        yield Message("all_gather", axis, n, "cp.gather.kv", "forward", n * it.kv, 1)
        yield Message("all_gather", axis, n, "cp.gather.kv", "backward", n * it.kv, 1)
        yield Message("reduce_scatter", axis, n, "cp.gather.dkv", "backward", n * it.kv, 1)
        return
    if it.method == "rsa":
        for name in ("k", "v"):
            yield Message("shift", axis, n, f"cp.rsa.{name}", "forward", it.kv // 2, n - 1)
            yield Message("shift", axis, n, f"cp.rsa.{name}", "backward", it.kv // 2, n - 1)
            yield Message("shift", axis, n, f"cp.rsa.d{name}", "backward", it.kv // 2, n - 1)
        return
    shifts = len(_plan(it, 0)) - 1
    yield Message("shift", axis, n, "cp.ring.kv", "forward", it.kv, shifts)
    yield Message("shift", axis, n, "cp.ring.kv", "backward", it.kv, shifts)
    yield Message("shift", axis, n, "cp.ring.dkv", "backward", it.kv, shifts)  # the last one home


# -- what is kept ---------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """A tensor that a layer's attention makes: what it is, bytes; the word of recompute that would keep it, if any."""

    what: str
    bytes: int
    by: Literal["attention"] | None = None


def kept(it: Attention) -> list[Kept]:
    """What a layer's attention keeps for backward on a rank, its output among it, which the next layer keeps too."""
    dealt: Literal["attention"] | None = "attention" if it.over > 1 else None
    found = [Kept("q", it.q, dealt), Kept("k and v in one", it.kv, dealt)]
    if it.method == "rsa":
        found += [Kept("softmax", it.scores * it.size, "attention"), Kept("output", it.q, "attention")]
        return found
    found.append(Kept("output by head" if it.over > 1 else "output", it.q, "attention"))
    rows = it.elements(it.own_heads) // it.width
    found.append(Kept("log-sum of each softmax row", rows * max(it.size, 4), "attention"))
    if it.over > 1:
        found.append(Kept("output", it.q, "attention"))
    return found


def in_passing(it: Attention) -> int:
    """Bytes that a rank holds beside these at the fullest moment of a layer's backward, gradients aside: parts of
    keys and values on the way, and their gradients; all of them with gather; the scores' gradient with rsa."""
    if it.ring == 1:
        return 0
    if it.method == "gather":
        return 2 * it.ring * it.kv
    if it.method == "rsa":
        return it.scores * it.size
    return sum(borrowed(it))


def borrowed(it: Attention) -> list[int]:
    """Bytes of the buffers that backward of a layer has at once from the pool of comm/scratch.py, which the CPU keeps.

    Parts of keys and values, the next under way while one computes, and of their gradients, one more; of gather's
    reduce-scatter what comes in.
    """
    if it.method == "gather":
        return [it.ring * it.kv]
    shifts, part = (it.ring - 1, it.kv // 2) if it.method == "rsa" else (len(_plan(it, 0)) - 1, it.kv)
    return [part] * (2 * min(shifts, 2) + (shifts > 0))


def beside(it: Attention, *, cpu: bool) -> int:
    """Bytes that a layer's backward has beside what it keeps, its gradients, and on the CPU what is borrowed."""
    if it.method == "rsa":  # a part of the scores' gradient is computed before it stands in its columns
        return in_passing(it) + in_passing(it) // it.ring
    return in_passing(it) if it.method == "gather" or not cpu else 0


def mask(it: Attention, *, packed: bool) -> int:
    """Bytes of the largest mask that a call adds to its scores, and of what is hidden, a byte each, that it is made of;
    for each sequence with documents packed into it. Which calls need one depends on these; rsa hides without."""
    if it.method == "rsa":
        return 0
    calls = [block for theirs in _plan(it, 0) for block in theirs]
    masked = [block.pairs for block in calls if packed or block.mode == "masked"]
    return (it.batch if packed else 1) * max(masked, default=0) * (it.size + 1)


# -- what is computed -----------------------------------------------------------------------------------------------


def flops(it: Attention, rank: int) -> tuple[int, int]:
    """FLOPs of a layer's forward and backward on `rank` of cp, as torch's counter has them: causal calls in full."""
    if it.method == "rsa":
        pairs, products = it.length // it.cp * it.length, PRODUCTS["written out"]
    else:
        pairs, products = (
            sum(block.pairs for theirs in _plan(it, rank // it.over) for block in theirs),
            PRODUCTS["fused"],
        )
    each = 2 * it.batch * it.own_heads * it.width * pairs
    return products[0] * each, products[1] * each


def needed_flops(it: Attention, rank: int) -> tuple[int, int]:
    """Those of the pairs that are seen, which kernels with a causal mode come near."""
    held = spans(it.length, it.cp, rank // it.over, it.order, inner=it.over)
    pairs = visible_pairs(held, it.length, causal=it.causal, window=it.window)
    each = 2 * it.batch * it.own_heads * it.width * pairs
    return 2 * each, 5 * each


def _plan(it: Attention, place: int) -> Plan:
    return ring_plan(it.length, it.cp, place, it.order, inner=it.over, causal=it.causal, window=it.window)
