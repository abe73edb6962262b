"""What a rank computes in a micro-batch, operator by operator: products of matrices by their shapes, the rest by bytes.

The products are those of `predict.flops`, and a test holds the sums of both together. The bytes are of what an operator
reads and writes in the device's memory. Where software fuses element-wise operators, a chain is one operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from meshwright.predict.context import PRODUCTS, Attention, flops, needed_flops
from meshwright.predict.flops import visible_pairs
from meshwright.spec.layout import Axis, Layout, Operators
from meshwright.spec.model import ModelSpec
from meshwright.spec.sequence import Method, Order

Written = Literal["sdpa", "explicit"]
Moves = Literal["stream", "softmax", "norm", "norm_backward", "lookup", "exponential"]

LOSS_BYTES = 28, 10
"""Moved for a logit in forward and backward of the loss: it is widened to float32, its row's largest is taken off,
exponentiated, summed, and divided; backward subtracts and narrows. The count is of Megatron-LM's vocabulary-parallel
loss, and of torch's full one within a tenth."""


class Product(NamedTuple):
    """`batch` products of matrices [m, k] and [k, n]."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


class Flash(NamedTuple):
    """Fused attention of heads of `width`: FLOPs as counted, whatever is masked, and those of pairs that are seen."""

    flops: int
    seen: float
    width: int
    backward: bool = False


class Move(NamedTuple):
    """Something that is bound by the `bytes` it reads and writes."""

    bytes: float
    kind: Moves = "stream"
    flops: int = 0


Work = Product | Flash | Move


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator; `word`: by which a recompute may keep its output."""

    name: str
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    word: Operators | None = None


def strides(layout: Layout) -> dict[Axis, int]:
    """How many devices neighbours on each axis are apart."""
    found: dict[Axis, int] = {}
    stride = 1
    for axis in layout.order:
        found[axis] = stride
        stride *= layout.size(axis)
    return found


class Shard(NamedTuple):
    """What a block's cost on one rank depends on: see `Layout` for the fields' meanings.

    region: blocks that are computed again together. micro: sequences at once. tp_stride, cp_stride: how many devices
    neighbours on these axes are apart; by default tensor ranks are neighbours, and context ranks lie behind them.
    """

    tp: int = 1
    sp: bool = False
    cp: int = 1
    cp_method: Method = "ring"
    cp_order: Order = "zigzag"
    cp_ulysses: int | None = None
    recompute: Literal["none", "full", "selective"] = "none"
    recompute_keep: tuple[Operators, ...] = ("linear",)
    region: int = 1
    micro: int = 1
    tp_stride: int = 1
    cp_stride: int | None = None

    @classmethod
    def of(cls, layout: Layout, micro: int, blocks: int = 1) -> Shard:
        """That of a resolved `layout` and stages of so many blocks."""
        stride = strides(layout)
        return cls(
            tp=layout.tp, sp=layout.sp, cp=layout.cp, cp_method=layout.cp_method, cp_order=layout.cp_order,
            cp_ulysses=layout.cp_ulysses, recompute=layout.recompute, recompute_keep=layout.recompute_keep, micro=micro,
            region=layout.region(blocks),
            tp_stride=stride["tp"], cp_stride=stride["cp"],
        )  # fmt: skip

    @property
    def layout(self) -> Layout:
        """One data rank with its context and tensor ranks."""
        return Layout(
            dp=1, tp=self.tp, sp=self.sp, cp=self.cp, cp_method=self.cp_method, cp_order=self.cp_order,
            cp_ulysses=self.cp_ulysses,
        )  # fmt: skip

    @property
    def kept(self) -> tuple[Operators, ...]:
        """Operators whose outputs a recompute starts from."""
        return self.recompute_keep if self.recompute == "selective" else ()


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the operators of a rank are made of. size: bytes of a value; fused: see constants; accumulate: bytes moved
    to add a parameter's gradient to those of other micro-batches."""

    spec: ModelSpec
    shard: Shard
    seq: int
    size: int
    attention: Written
    fused: bool
    accumulate: float = 0.0

    @property
    def tokens(self) -> int:
        """That the products see."""
        return self.shard.micro * self.seq // self.shard.cp

    @property
    def own(self) -> int:
        """Tokens between the products, of which sequence parallelism gives each tensor rank a part."""
        return self.tokens // self.shard.tp if self.shard.sp else self.tokens

    @property
    def heads(self) -> int:
        return self.spec.heads // self.shard.tp

    @property
    def kv_heads(self) -> int:
        return -(-self.spec.num_kv_heads // self.shard.tp)

    @property
    def ffn(self) -> int:
        return self.spec.ffn_width // self.shard.tp

    @property
    def words(self) -> int:
        return -(-self.spec.vocab // self.shard.tp)

    def values(self, number: float) -> float:
        """Bytes of so many values."""
        return number * self.size


def block(it: Sizes) -> list[Operator]:
    """Those of one block, in the order of forward."""
    spec, d, w = it.spec, it.spec.hidden, it.spec.head_width
    gpt2 = spec.family == "gpt2"
    found = [norm(it), _linear(it, "qkv", d, (it.heads + 2 * it.kv_heads) * w, bias=gpt2 or spec.qkv_bias)]
    if not gpt2:
        found.append(_rotate(it))
    found += _attention(it)
    found += [
        _linear(it, "out", it.heads * w, d, bias=gpt2 or spec.out_bias),
        *_residual(it),
        norm(it),
        _linear(it, "up", d, it.ffn * (1 if gpt2 else 2), bias=gpt2 or spec.mlp_bias),
        *_activation(it),
        _linear(it, "down", it.ffn, d, bias=gpt2 or spec.mlp_bias),
        *_residual(it),
    ]
    return found


def embedding(it: Sizes) -> list[Operator]:
    """Those before the first block: rows are looked up, and their gradients added up."""
    rows = it.values(2 * it.own * it.spec.hidden)
    found = [Operator("lookup", (Move(rows, "lookup"),), (Move(2 * rows, "lookup"),))]
    if it.spec.family == "gpt2":
        found.append(_moves("positions", it.values(3 * it.own * it.spec.hidden), it.values(it.own * it.spec.hidden)))
        if it.spec.embd_dropout:
            found.append(_dropout(it, it.own * it.spec.hidden))
    return found


def head(it: Sizes) -> list[Operator]:
    """Those behind the last block: a norm, the logits, and the loss."""
    logits = it.tokens * it.words
    forward, backward = LOSS_BYTES
    return [
        norm(it),
        _linear(it, "logits", it.spec.hidden, it.words),
        _moves("loss", forward * logits, backward * logits, kind="exponential"),
    ]


# -- operators -------------------------------------------------------------------------------------------------------


def _linear(it: Sizes, name: str, into: int, out: int, *, bias: bool = False) -> Operator:
    """Its backward has two products: of the input's gradient and of the weight's."""
    n = it.tokens
    backward: list[Work] = [Product(1, n, into, out), Product(1, into, out, n)]
    if bias:
        backward.append(Move(it.values(n * out)))
    if it.accumulate:
        backward.append(Move(it.accumulate * into * out))
    return Operator(name, (Product(1, n, out, into),), tuple(backward), "linear")


def _moves(
    name: str, forward: float, backward: float, word: Operators | None = None, kind: Moves = "stream"
) -> Operator:
    return Operator(name, (Move(forward, kind),), (Move(backward, kind),), word)


def norm(it: Sizes) -> Operator:
    """Forward reads and writes; backward reads the input and the gradient, writes one, and adds the residual's."""
    values = it.values(it.own * it.spec.hidden)
    return Operator("norm", (Move(2 * values, "norm"),), (Move(4 * values, "norm_backward"),))


def _dropout(it: Sizes, elements: int) -> Operator:
    both = it.values(2 * elements) + elements  # and a byte of the mask
    return _moves("dropout", both, both)


def _residual(it: Sizes) -> Iterator[Operator]:
    elements = it.own * it.spec.hidden
    if not it.spec.resid_dropout:
        yield _moves("residual", it.values(3 * elements), 0)
    elif it.fused:
        yield _moves("dropout and residual", it.values(3 * elements) + elements, it.values(2 * elements) + elements)
    else:
        yield _dropout(it, elements)
        yield _moves("residual", it.values(3 * elements), 0)


def _activation(it: Sizes) -> Iterator[Operator]:
    wide = it.values(it.tokens * it.ffn)
    if it.spec.family == "gpt2":
        yield _moves("activation", 2 * wide, 3 * wide, "activation", "exponential")
    elif it.fused:
        yield _moves("activation", 3 * wide, 5 * wide, "activation", "exponential")
    else:
        yield _moves("activation", 2 * wide, 3 * wide, "activation", "exponential")
        yield _moves("gate", 3 * wide, 6 * wide)


def _rotate(it: Sizes) -> Operator:
    """Written out: two products by element, the halves swapped and joined, a sum."""
    heads = it.values(it.tokens * (it.heads + it.kv_heads) * it.spec.head_width)
    times = 2 if it.fused else 12
    return Operator("rotate", (Move(times * heads),), (Move(times * heads),))


def _attention(it: Sizes) -> list[Operator]:
    shard, spec = it.shard, it.spec
    if shard.cp > 1:
        forward, backward, seen, seen_backward = _over_ranks(spec, shard, it.seq, it.size)
        return [_fused(spec, (forward, backward), (seen, seen_backward))]
    pairs = it.seq * it.seq
    each = 2 * shard.micro * it.heads * spec.head_width * pairs
    if it.attention == "sdpa":
        share = visible_pairs(spec, it.seq) / pairs
        one, two = (products * each for products in PRODUCTS["fused"])
        return [_fused(spec, (one, two), (one * share, two * share))]
    return _written_out(it)


def _fused(spec: ModelSpec, counted: tuple[int, int], seen: tuple[float, float]) -> Operator:
    forward, backward = (Flash(*both, spec.head_width) for both in zip(counted, seen, strict=True))
    return Operator("attention", (forward,), (backward._replace(backward=True),), "attention")


@cache
def _over_ranks(spec: ModelSpec, shard: Shard, seq: int, size: int) -> tuple[int, int, float, float]:
    """FLOPs of forward and backward on the context rank that has most, as counted and of what is seen."""
    it = Attention.of(spec, shard.layout, batch=shard.micro, seq=seq, dtype_bytes=size)
    # Dealt out in turn all have the same; in runs the last sees most.
    places = {0, shard.cp - 1}
    seen = max(needed_flops(it, place) for place in places)
    counted = max(flops(it, place) for place in places)
    return *counted, *seen


def _written_out(it: Sizes) -> list[Operator]:
    """Scores, scaled and masked; their softmax; dropout; what the values add up to."""
    batch, t, w = it.shard.micro * it.heads, it.seq, it.spec.head_width
    elements = batch * t * t
    values = it.values(elements)
    heads = it.values(it.tokens * (it.heads + 2 * it.kv_heads) * w)
    found = [
        _moves("heads apart", 2 * heads, 2 * heads),
        Operator("scores", (Product(batch, t, t, w),), (Product(batch, t, w, t), Product(batch, t, w, t)), "attention"),
    ]
    if it.fused:
        # A causal kernel reads what is seen, and writes zeros elsewhere.
        seen = visible_pairs(it.spec, t) / (t * t)
        softmax = (Move((1 + seen) * values, "softmax"),), (Move((1 + 2 * seen) * values, "softmax"),)
    else:
        found.append(_moves("scale and mask", 5 * values, 2 * values))
        softmax = (Move(2 * values, "softmax"),), (Move(3 * values, "softmax"),)
    found.append(Operator("softmax", *softmax, "softmax"))
    if it.spec.attn_dropout:
        found.append(_dropout(it, elements))
    found.append(
        Operator("values", (Product(batch, t, w, t),), (Product(batch, t, t, w), Product(batch, t, w, t)), "attention")
    )
    out = it.values(2 * it.tokens * it.heads * w)
    found.append(_moves("heads together", out, out))
    return found
