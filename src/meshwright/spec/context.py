"""What goes with context ranks: sequence lengths, heads and the other options of a run. What does not is said in words.

Who holds which positions is in spec/sequence.py; this file is about a whole run.
"""

from __future__ import annotations

import math

from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec, divisors
from meshwright.spec.sequence import granule
from meshwright.spec.words import join


def grain(layout: Layout) -> int:
    """What must divide a sequence's length, so that all ranks hold as many tokens wherever the layout cuts it.

    Sequence parallelism cuts what a context rank has once more.
    """
    return math.lcm(granule(layout.cp, layout.cp_order), layout.cp * (layout.tp if layout.sp else 1))


def check(spec: ModelSpec, layout: Layout, seq_len: int) -> None:
    """Raise ValueError, naming what would do, for a model or sequence that the layout's context ranks cannot share."""
    if layout.cp == 1:
        return
    _check_heads(spec, layout)
    _check_length(spec, layout, seq_len)
    if spec.attn_dropout:
        raise ValueError(
            f"model.attn_dropout={spec.attn_dropout} does not go with cp above 1: the fused attention, whose parts "
            "the context ranks put together, would draw masks of its own; use model.attn_dropout=0, or cp=1"
        )


def _check_length(spec: ModelSpec, layout: Layout, seq_len: int) -> None:
    each = grain(layout)
    if seq_len % each == 0:
        return
    near = -(-seq_len // each) * each
    if spec.family == "gpt2" and near > spec.max_seq:  # its positions are learned, and there are no more
        near -= each
    ways = [f"data.seq_len={near}"] if near else []
    if layout.cp_order == "zigzag" and seq_len % grain(layout.model_copy(update={"cp_order": "contiguous"})) == 0:
        ways.append("layout.cp_order=contiguous or striped")
    ways.append("fewer context ranks")
    beside = f" and sp over tp={layout.tp}" if layout.sp else ""
    raise ValueError(
        f"layout.cp={layout.cp} with cp_order={layout.cp_order}{beside} needs sequences that {each} divides, and "
        f"{seq_len} tokens do not divide; use {join(ways)}"
    )


def _check_heads(spec: ModelSpec, layout: Layout) -> None:
    """Each tensor rank's heads are dealt out over the ranks that `ulysses` and `usp` exchange them among."""
    ranks = layout.head_ranks
    heads, kv_heads = spec.heads // layout.tp, -(-spec.num_kv_heads // layout.tp)
    fit = [n for n in divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0]
    if ranks in (1, *fit):
        return
    wrong = f"{heads} heads" if heads % ranks else f"{kv_heads} key-value heads"
    of = f" that each of tp={layout.tp} has" if layout.tp > 1 else ""
    if layout.cp_method == "usp":
        asked, right = (
            f"cp_ulysses={ranks}",
            [f"cp_ulysses={n}" for n in fit if 1 < n < layout.cp and layout.cp % n == 0],
        )
    else:
        asked, right = f"cp={ranks} with cp_method=ulysses", [f"cp={n}" for n in fit if n > 1]
    raise ValueError(f"layout.{asked} does not divide the {wrong}{of}; use {join([*right, 'cp_method=ring'])}")
