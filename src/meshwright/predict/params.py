"""Which parameters a model has: names, shapes and units, without building it.

Names and shapes are those of Hugging Face's checkpoints of the family, in the order of the module tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.spec.cuts import Cut, local_shape
from meshwright.spec.joining import joined
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.splitting import Split, cut_of, found, plan, summed
from meshwright.spec.stages import Stage, stages

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter. `unit` names what it is reduced (and later gathered) together with, where units are not joined.

    block: which one it is in, if in one. tied: it is used in several places. lookup: only its rows are looked up, so
    that backward never reads it. cut: how it is dealt out over the tensor ranks, as the first of them has it. summed:
    the ranks ("tp", "tp.inner") over which its gradient is still to be summed after backward.
    """

    name: str
    shape: Shape
    unit: str
    block: int | None = None
    tied: bool = False
    lookup: bool = False
    cut: Cut | None = None
    summed: str | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def local_shape(self) -> Shape:
        """Of what a rank holds of it; a cut that does not divide is filled up."""
        return local_shape(self.shape, self.cuts)

    @property
    def local_numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def cuts(self) -> tuple[Cut, ...]:
        return () if self.cut is None else (self.cut,)

    @property
    def decay(self) -> bool:
        """Weight decay is for matrices."""
        return len(self.shape) >= 2


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Parameters that are reduced together, in the order in which they lie in the flat buffer: decayed ones first."""

    tensors: tuple[TensorSpec, ...]

    @property
    def numel(self) -> int:
        """Elements that a rank holds of them where ZeRO cuts nothing."""
        return sum(t.local_numel for t in self.tensors)

    @property
    def tied(self) -> bool:
        """Whether a parameter is used in several places: the unit joins no other, and at ZeRO 3 stays once gathered,
        but in a pipeline, whose stages have one of these places each."""
        return any(t.tied for t in self.tensors)

    @property
    def lookup(self) -> bool:
        """Whether backward reads none of it, so that at ZeRO 3 it is not gathered again."""
        return all(t.lookup for t in self.tensors)


def whole(spec: ModelSpec) -> Stage:
    """All of a model as one stage."""
    return stages((spec.layers,))[0]


def tensors(spec: ModelSpec, layout: Layout | None = None, stage: Stage | None = None) -> tuple[TensorSpec, ...]:
    """All parameters in the order of the module tree; a tied weight stands once, under the embedding's name.

    layout: by whose `tp` and `sp` they are cut. stage: of a pipeline, whose parameters alone are asked for. A tied
    table is both ends' then: the first looks rows of it up, the last multiplies with it.
    """
    tp, sp = (1, False) if layout is None else (layout.tp, layout.sp)
    return _tensors(spec, stage or whole(spec), tp, sp)


@lru_cache(maxsize=64)
def _tensors(spec: ModelSpec, stage: Stage, tp: int, sp: bool) -> tuple[TensorSpec, ...]:
    family = _gpt2 if spec.family == "gpt2" else _llama
    found = (_at_an_end(tensor, stage) for tensor in family(spec, stage.blocks))
    held = [tensor for tensor in found if tensor is not None]
    if tp == 1:
        return tuple(held)
    splits = plan(spec)
    return tuple(_dealt_out(tensor, splits, tp, sp, spec) for tensor in held)


def _at_an_end(tensor: TensorSpec, stage: Stage) -> TensorSpec | None:
    """A tensor as `stage` has it, None for one before or behind the blocks that it does not have."""
    if tensor.block is not None:
        return tensor
    if tensor.tied:
        here = stage.first or stage.last
        return replace(tensor, lookup=not stage.last) if here else None
    return tensor if (stage.first if tensor.lookup else stage.last) else None


def _dealt_out(tensor: TensorSpec, splits: dict[str, Split], tp: int, sp: bool, spec: ModelSpec) -> TensorSpec:
    module = tensor.name.rpartition(".")[0]
    split = found(splits, module)
    # GPT-2's blocks have matrices [in, out], all else [out, in]; a table of words has them first either way.
    outputs = 1 if spec.family == "gpt2" and tensor.block is not None else 0
    cut = None if split is None else cut_of(split, tensor.shape, outputs, tp)
    return replace(tensor, cut=cut, summed=summed(split, tensor.shape, cut, sp))


def count(spec: ModelSpec) -> int:
    """Number of parameters, a tied weight counted once."""
    return sum(t.numel for t in tensors(spec))


def embedding_count(spec: ModelSpec) -> int:
    """Parameters that are only looked up: the token and position tables; a tied table is also the head, so not."""
    return sum(t.numel for t in tensors(spec) if t.lookup)


def units(
    spec: ModelSpec, join: int = 0, layout: Layout | None = None, stage: Stage | None = None
) -> dict[str, UnitSpec]:
    """The units by name, in the order in which forward meets them.

    join: units are joined until a rank holds as many parameters of each (see spec/joining.py), except the tied one;
    never those of two stages. layout, stage: as for `tensors`.
    """
    tp, sp = (1, False) if layout is None else (layout.tp, layout.sp)
    return dict(_units(spec, join, stage or whole(spec), tp, sp))


@lru_cache(maxsize=256)
def _units(spec: ModelSpec, join: int, stage: Stage, tp: int, sp: bool) -> dict[str, UnitSpec]:
    groups: dict[str, list[TensorSpec]] = {}
    for tensor in _tensors(spec, stage, tp, sp):
        groups.setdefault(tensor.unit, []).append(tensor)
    sizes = ((name, sum(t.local_numel for t in group)) for name, group in groups.items())
    tied = {name for name, group in groups.items() if any(t.tied for t in group)}
    return {
        name: UnitSpec(tuple(sorted((t for member in members for t in groups[member]), key=lambda t: not t.decay)))
        for name, members in joined(sizes, join, alone=tied).items()
    }


def unit_counts(
    spec: ModelSpec, join: int = 0, layout: Layout | None = None, stage: Stage | None = None
) -> dict[str, int]:
    """Number of parameters of each unit that a rank holds where ZeRO cuts nothing."""
    tp, sp = (1, False) if layout is None else (layout.tp, layout.sp)
    return dict(_unit_counts(spec, join, stage or whole(spec), tp, sp))


@lru_cache(maxsize=256)
def _unit_counts(spec: ModelSpec, join: int, stage: Stage, tp: int, sp: bool) -> dict[str, int]:
    return {name: unit.numel for name, unit in _units(spec, join, stage, tp, sp).items()}


def segments(spec: ModelSpec, join: int = 0) -> int:
    """Number of flat segments: a unit has one for decayed and one for other parameters, where it has such."""
    return sum(len({t.decay for t in unit.tensors}) for unit in units(spec, join).values())


def rotary_length(spec: ModelSpec, seq: int) -> int:
    """Positions in the rotary table once sequences of `seq` tokens have gone through the model: it grows with them.

    But dynamic scaling's is right up to the length that the model was trained at only, and longer sequences make a
    table of their own.
    """
    scaling = spec.rope_scaling
    if scaling is not None and scaling.kind == "dynamic" and scaling.original_max_seq is not None:
        return min(spec.max_seq, scaling.original_max_seq)
    return max(spec.max_seq, seq)


def buffer_count(spec: ModelSpec, seq: int) -> int:
    """Elements the model holds beside parameters: Llama's rotary table, cos and sin as wide as a head each."""
    return 0 if spec.family == "gpt2" else 2 * rotary_length(spec, seq) * spec.head_width


def _gpt2(spec: ModelSpec, blocks: range) -> Iterator[TensorSpec]:
    d, f = spec.hidden, spec.ffn_width
    yield _table("transformer.wte.weight", spec)
    yield TensorSpec("transformer.wpe.weight", (spec.max_seq, d), "embedding", lookup=True)
    block: list[tuple[str, Shape]] = [  # linear weights are [in, out] in this family
        ("ln_1.weight", (d,)), ("ln_1.bias", (d,)),
        ("attn.c_attn.weight", (d, 3 * d)), ("attn.c_attn.bias", (3 * d,)),
        ("attn.c_proj.weight", (d, d)), ("attn.c_proj.bias", (d,)),
        ("ln_2.weight", (d,)), ("ln_2.bias", (d,)),
        ("mlp.c_fc.weight", (d, f)), ("mlp.c_fc.bias", (f,)),
        ("mlp.c_proj.weight", (f, d)), ("mlp.c_proj.bias", (d,)),
    ]  # fmt: skip
    for i in blocks:
        for name, shape in block:
            yield TensorSpec(f"transformer.h.{i}.{name}", shape, f"blocks.{i}", block=i)
    yield TensorSpec("transformer.ln_f.weight", (d,), "head")
    yield TensorSpec("transformer.ln_f.bias", (d,), "head")
    if not spec.is_tied:
        yield TensorSpec("lm_head.weight", (spec.vocab, d), "head")


def _llama(spec: ModelSpec, blocks: range) -> Iterator[TensorSpec]:
    d = spec.hidden
    yield _table("model.embed_tokens.weight", spec)
    block = list(_llama_block(spec))
    for i in blocks:
        for name, shape in block:
            yield TensorSpec(f"model.layers.{i}.{name}", shape, f"blocks.{i}", block=i)
    yield TensorSpec("model.norm.weight", (d,), "head")
    if not spec.is_tied:
        yield TensorSpec("lm_head.weight", (spec.vocab, d), "head")


def _table(name: str, spec: ModelSpec) -> TensorSpec:
    """The token table; tied, it is the head's weight too."""
    tied = spec.is_tied
    return TensorSpec(name, (spec.vocab, spec.hidden), "tied" if tied else "embedding", tied=tied, lookup=not tied)


def _llama_block(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    d, f = spec.hidden, spec.ffn_width
    q, kv = spec.heads * spec.head_width, spec.num_kv_heads * spec.head_width
    for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        yield from _linear(f"self_attn.{name}", out, d, spec.qkv_bias)
    yield from _linear("self_attn.o_proj", d, q, spec.out_bias)
    if spec.qk_norm:
        yield "self_attn.q_norm.weight", (spec.head_width,)
        yield "self_attn.k_norm.weight", (spec.head_width,)
    yield from _linear("mlp.gate_proj", f, d, spec.mlp_bias)
    yield from _linear("mlp.up_proj", f, d, spec.mlp_bias)
    yield from _linear("mlp.down_proj", d, f, spec.mlp_bias)
    yield "input_layernorm.weight", (d,)
    yield "post_attention_layernorm.weight", (d,)


def _linear(name: str, out: int, into: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)
