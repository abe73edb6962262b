"""One layer's attention of a run over its context ranks, as predict/context.py asks for it."""

from __future__ import annotations

from meshwright.predict.context import Attention, in_passing
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec


def shared(spec: ModelSpec, layout: Layout, *, batch: int, seq: int, dtype_bytes: int) -> Attention:
    """That of `batch` sequences of `seq` tokens, of which each of the layout's context ranks has a part."""
    return Attention(
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


def borrowed(it: Attention) -> list[int]:
    """Bytes of the buffers that backward of a layer has at once from the pool of comm/scratch.py, which the CPU keeps.

    Parts of keys and values and of their gradients on their way; of gather's reduce-scatter what comes in.
    """
    if it.method == "gather":
        return [it.ring * it.kv]
    if it.method == "rsa":
        return [it.kv // 2] * (2 * min(it.ring - 1, 2) + 1)
    return [it.kv] * (in_passing(it) // it.kv)


def beside(it: Attention, *, cpu: bool) -> int:
    """Bytes that a layer's backward has beside what it keeps, its gradients, and on the CPU what is borrowed."""
    if it.method == "rsa":  # a part of the scores' gradient is computed before it stands in its columns
        return in_passing(it) + in_passing(it) // it.ring
    return in_passing(it) if it.method == "gather" or not cpu else 0
