"""Floating-point operations of a model: a multiply-add is two. Matrix products only, as usual; the rest is noise.

Two figures for two uses. `counted` is what a model executes, and equals torch's FlopCounterMode: attention
over the full square whatever is masked, and what fused kernels compute twice. `model_flops` is the numerator of
model FLOPs utilisation (Chowdhery et al. 2022, appendix B): what the mathematics needs, so causal attention
counts half, a window counts what it lets see, and nothing that is computed again counts. Neither counts the
embedding, which is a lookup; both count the head, tied or not.

Backward is twice forward, so a whole forward once more would be a third of forward and backward. Recompute takes
less: the head is never computed again, nor the last product of a region behind which nothing is saved, nor what is
kept; and the fused attention's backward is two and a half times its forward.

Documents packed into sequences change nothing in what one device executes, which computes whole squares and masks
them. Context ranks leave out blocks that only queries and keys of different documents meet in, so `counted` is the most
they execute. What the mathematics needs depends on the text: `model_flops` is told how long the documents are, or
takes each sequence for one, which is the most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from meshwright.predict.context import Attention
from meshwright.predict.context import flops as over_ranks
from meshwright.predict.params import whole
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.stages import Stage


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of one forward and one backward pass, and of what backward computes again before it can go on."""

    forward: int
    backward: int
    recompute: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recompute

    def __add__(self, other: Flops) -> Flops:
        """Those of both."""
        return Flops(self.forward + other.forward, self.backward + other.backward, self.recompute + other.recompute)

    def times(self, ranks: int) -> Flops:
        """Those of as many ranks that compute the same."""
        return Flops(self.forward * ranks, self.backward * ranks, self.recompute * ranks)

    @property
    def recompute_share(self) -> float:
        """What is computed again as a part of forward and backward: a third where all of forward is."""
        return self.recompute / (self.forward + self.backward)


def linear_weights(spec: ModelSpec) -> int:
    """Elements of all weights that a token is multiplied with, the head's among them."""
    return spec.layers * sum(_block_weights(spec)) + spec.vocab * spec.hidden


def _block_weights(spec: ModelSpec, tp: int = 1) -> list[int]:
    """Elements of what a tensor rank has of the weights of a block, in the order of forward."""
    d, f = spec.hidden, spec.ffn_width // tp
    q, kv = (-(-heads // tp) * spec.head_width for heads in (spec.heads, spec.num_kv_heads))
    mlp = [d * f] * (2 if spec.family == "gpt2" else 3)  # SwiGLU has a gate beside up and down
    return [d * (q + 2 * kv), q * d, *mlp]


def counted(
    spec: ModelSpec,
    *,
    batch: int,
    seq: int,
    attention: Literal["sdpa", "explicit"] = "sdpa",
    loss: Literal["full", "chunked"] = "full",
    layout: Layout | None = None,
    place: int = 0,
    stage: Stage | None = None,
) -> Flops:
    """FLOPs that the plain model executes on `batch` sequences of `seq` tokens, loss included; or a rank of `layout`,
    at `place` among its context ranks. What is computed again is by the recompute of `layout`, if any. stage: those of
    one stage of a pipeline alone.

    Tensor ranks share the products, and all compute alike: what is filled up of the vocabulary, and the key-value heads
    that several hold, is done by each. Context ranks share the tokens; attention by the order of positions.
    The fused attention's backward computes the scores again, so it has five products for the forward's two; the
    written-out one keeps them and has four. A chunked loss computes the head's gradients while it has the logits, in
    forward. torch's counter does not know the CPU's fused kernel, nor `addmm_`; told of them, it agrees.
    """
    layout, stage = layout or Layout(), stage or whole(spec)
    tokens, tp, layers = batch * seq // layout.cp, layout.tp, len(stage.blocks)
    head = -(-spec.vocab // tp) * spec.hidden if stage.last else 0
    linear = 2 * tokens * (layers * sum(_block_weights(spec, tp)) + head)
    product = 2 * batch * (spec.heads // tp) * spec.head_width * seq * seq
    of_layer = 2 * product, (5 if attention == "sdpa" else 4) * product
    if layout.cp > 1:
        of_layer = over_ranks(Attention.of(spec, layout, batch=batch, seq=seq, dtype_bytes=4), place)
    early = 4 * tokens * head if loss == "chunked" else 0
    forward, backward = (passes * linear + layers * of_layer[passes - 1] for passes in (1, 2))
    again = _recompute(spec, layout, layers, tokens, of_layer[0])
    return Flops(forward + early, backward - early, again)


def _recompute(spec: ModelSpec, layout: Layout, layers: int, tokens: int, attention: int) -> int:
    """FLOPs that the regions of so many blocks compute again, `attention` being those of a block's two products of
    it."""
    if layout.recompute == "none":
        return 0
    keep = layout.kept_operators
    weights = [] if "linear" in keep else _block_weights(spec, layout.tp)
    block = 2 * tokens * sum(weights) + (0 if "attention" in keep else attention)
    # A region's last product comes behind its last saved tensor, unless dropout saves its mask after it.
    spared = 2 * tokens * weights[-1] if weights and not spec.resid_dropout else 0
    return layers * block - -(-layers // layout.region(layers)) * spared


def visible_pairs(spec: ModelSpec, seq: int) -> float:
    """Query-key pairs of a sequence that count: T², half of it if causal, what the window leaves of that.

    A window of w leaves T·w - w²/2 (w at most T): the continuous count, which is T²/2 at w = T.
    """
    if not spec.causal:
        return float(seq * seq)
    width = min(spec.window or seq, seq)
    return seq * width - width * width / 2


def model_flops(spec: ModelSpec, *, seq: int, documents: Mapping[int, int] | None = None) -> float:
    """FLOPs a token of a sequence of `seq` tokens, forward and backward (twice forward), for utilisation.

    documents: of sequences that they are packed into, how many there are of each length.
    """
    return spec.layers * block_flops(spec, seq, documents) + head_flops(spec)


def block_flops(spec: ModelSpec, seq: int, documents: Mapping[int, int] | None = None) -> float:
    """Those of one block."""
    parts = documents or {seq: 1}
    pairs = sum(number * visible_pairs(spec, length) for length, number in parts.items())
    tokens = sum(number * length for length, number in parts.items())
    return 3 * (2 * sum(_block_weights(spec)) + 4 * spec.heads * spec.head_width * pairs / tokens)


def head_flops(spec: ModelSpec) -> float:
    """Those of the head."""
    return 3 * 2 * spec.vocab * spec.hidden


def utilisation(
    spec: ModelSpec,
    seq: int,
    tokens_per_second_per_device: float,
    peak: float,
    documents: Mapping[int, int] | None = None,
) -> float:
    """Model FLOPs utilisation: a device's `model_flops` a second over its `peak` FLOPs a second."""
    return model_flops(spec, seq=seq, documents=documents) * tokens_per_second_per_device / peak
