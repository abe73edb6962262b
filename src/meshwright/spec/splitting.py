"""Which tensors of a model tensor parallelism cuts, and how: Megatron-LM's plan (Shoeybi et al. 2019), by name.

    columns      a matrix whose outputs are dealt out: each rank computes some of them from the whole input
    rows         a matrix whose inputs are dealt out: each rank computes a part of all outputs, and the parts are added
    vocabulary   an embedding or output head whose words are dealt out

Anything else stays whole on every rank. This file is read by the strategy and by the predictions alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.spec.cuts import Cut
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec, divisors

Style = Literal["columns", "rows", "vocabulary", "positions", "heads", "sequence"]
Option = Literal["gather_input", "gather_output", "scatter_input"]


@dataclass(frozen=True, slots=True)
class Split:
    """How the tensors of one module are cut.

    style: see above; "positions" is a table of positions, whole, of which sequence parallelism looks up a part,
    "heads" a norm or dropout of single heads, each rank's own, "sequence" a dropout that sequence parallelism gives its
    part of the sequence. fused: outputs of the tensors that are side by side in a "columns" matrix, empty for one.
    heads: heads that must not be torn apart, 0 where any number of outputs may go anywhere; fewer than ranks are held
    by several. reads: columns of one parent module with the same word here read the same input. options: for columns
    that do not stand before rows, and rows that do not stand behind columns: see parallel/products.py.
    """

    style: Style
    fused: tuple[int, ...] = ()
    heads: int = 0
    reads: str = ""
    options: tuple[Option, ...] = ()


def plan(spec: ModelSpec) -> dict[str, Split]:
    """The modules that are cut, by name with `*` for a block's number."""
    q, kv = spec.heads * spec.head_width, spec.num_kv_heads * spec.head_width
    if spec.family == "gpt2":
        block = "transformer.h.*"
        splits = {
            "transformer.wte": Split("vocabulary"),
            "transformer.wpe": Split("positions"),
            f"{block}.attn.c_attn": Split("columns", (q, kv, kv), spec.heads),
            f"{block}.attn.c_proj": Split("rows", heads=spec.heads),
            f"{block}.mlp.c_fc": Split("columns"),
            f"{block}.mlp.c_proj": Split("rows"),
            "lm_head": Split("vocabulary"),
            "dropout": Split("sequence"),
            f"{block}.attn_dropout": Split("sequence"),
            f"{block}.mlp_dropout": Split("sequence"),
        }
        if spec.attn_dropout:  # torch's fused attention has no such module
            splits[f"{block}.attn.core.dropout"] = Split("heads")
        return splits
    block = "model.layers.*"
    return {
        "model.embed_tokens": Split("vocabulary"),
        f"{block}.self_attn.q_proj": Split("columns", heads=spec.heads, reads="qkv"),
        f"{block}.self_attn.k_proj": Split("columns", heads=spec.num_kv_heads, reads="qkv"),
        f"{block}.self_attn.v_proj": Split("columns", heads=spec.num_kv_heads, reads="qkv"),
        f"{block}.self_attn.q_norm": Split("heads"),
        f"{block}.self_attn.k_norm": Split("heads"),
        f"{block}.self_attn.o_proj": Split("rows", heads=spec.heads),
        f"{block}.mlp.gate_proj": Split("columns", reads="gate, up"),
        f"{block}.mlp.up_proj": Split("columns", reads="gate, up"),
        f"{block}.mlp.down_proj": Split("rows"),
        "lm_head": Split("vocabulary"),
    }


def key_of(plan: Mapping[str, Split], module: str) -> str | None:
    """The key of `plan` that a module's name goes by: the name itself, or with `*` for its numbers."""
    starred = re.sub(r"(?<![^.])\d+(?=\.|$)", "*", module)
    return module if module in plan else starred if starred in plan else None


def found(plan: Mapping[str, Split], module: str) -> Split | None:
    """The entry of `plan` for a module's name."""
    key = key_of(plan, module)
    return None if key is None else plan[key]


def within(plan: Mapping[str, Split], modules: Iterable[str]) -> dict[str, Split]:
    """What `plan` says of `modules`, by name: for a part of the model."""
    there = {key_of(plan, module) for module in modules}
    return {key: split for key, split in plan.items() if key in there}


def cut_of(split: Split, shape: tuple[int, ...], outputs: int, tp: int, coordinate: int = 0) -> Cut | None:
    """How a tensor of `shape` is cut, of a module whose outputs run along dimension `outputs` of its matrices.

    A vector is a bias: cut with the columns, whole with the rows.
    """
    if tp == 1 or split.style in ("positions", "heads", "sequence") or (split.style == "rows" and len(shape) == 1):
        return None
    inputs = 1 - outputs
    dim = {"columns": outputs if len(shape) > 1 else 0, "rows": inputs, "vocabulary": 0}[split.style]
    copies = tp // split.heads if split.heads and split.heads < tp else 1
    return Cut("tp", dim, split.fused or (shape[dim],), tp // copies, copies=copies).at(coordinate)


def summed(split: Split | None, shape: tuple[int, ...], cut: Cut | None, sp: bool) -> str | None:
    """Over which ranks of the axis a gradient is still to be summed: "tp" all, "tp.inner" those with the same part.

    Heads' norms see their rank's heads only; with sequence parallelism whatever is whole sees its rank's part of the
    sequence only. None where every rank has the whole gradient of what it holds.
    """
    if cut is not None:
        if cut.copies == 1:
            return None
        return "tp.inner" if cut.ways > 1 else "tp"
    return "tp" if sp or (split is not None and split.style == "heads") else None


def check(spec: ModelSpec, layout: Layout, seq_len: int) -> None:
    """Raise ValueError, naming what would do, for a model or sequence that the layout's `tp` and `sp` do not divide."""
    tp = layout.tp
    if tp == 1:
        return
    kv = spec.num_kv_heads
    right = [
        n
        for n in divisors(spec.heads)
        if spec.ffn_width % n == 0
        and (kv % n == 0 or n % kv == 0)
        and (not layout.sp or (n > 1 and seq_len % (layout.cp * n) == 0))
    ]
    wrong = None
    if spec.heads % tp:
        wrong = f"{spec.heads} heads"
    elif kv % tp and tp % kv:
        wrong = f"{kv} key-value heads"
    elif spec.ffn_width % tp:
        wrong = f"the feed-forward width {spec.ffn_width}"
    if wrong is not None:
        raise ValueError(f"layout.tp={tp} does not divide {wrong}; use {_listed(right or ['1 with sp=false'])}")
    if layout.sp and layout.cp == 1 and seq_len % tp:  # beside context ranks: see spec/context.py
        near = -(-seq_len // tp) * tp
        if spec.family == "gpt2" and near > spec.max_seq:  # its positions are learned, and there are no more
            near -= tp
        ways = [f"data.seq_len={near}"] if near else []
        ways += ["sp=false", *([f"tp={_listed(right)}"] if right else [])]
        raise ValueError(
            f"layout.sp=true cuts sequences into tp={tp} equal parts, and {seq_len} tokens do not divide; use "
            f"{_listed(ways)}"
        )


def _listed(words: Sequence[object]) -> str:
    *first, last = map(str, words)
    return f"{', '.join(first)} or {last}" if first else last
