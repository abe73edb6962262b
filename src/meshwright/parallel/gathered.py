"""Attention with all keys and values gathered (Llama 3, section 3.3.2; Megatron-LM's all-gather).

Every rank gathers all keys and values and computes its own queries' attention, part by part in the blocks of the ring.
Backward gathers them again rather than keep them, and adds the ranks' gradients up, each where the keys belong. Simple,
and the messages are large; but nothing is computed meanwhile, and a rank holds all of K and V for a moment. Grouped
heads make them small beside the queries.

    ============  ==============================  ===================================
    on the wire   forward                         backward
    ============  ==============================  ===================================
    k and v       all-gather                      all-gather
    dk and dv                                     reduce-scatter
    ============  ==============================  ===================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.parallel.blockwise import Merged, Summed, gradients, keeping, merge
from meshwright.parallel.sight import Call, Context
from meshwright.spec.traffic import Phase


def attend(context: Context, q: Tensor, kv: Tensor, causal: bool, window: int | None) -> Tensor:
    """q [B, T/cp, H, d], kv [2, B, T/cp, K, d] -> [B, T/cp, H, d]."""
    out: Tensor = _Gathered.apply(context, causal, window, q, kv)
    return out


class _Gathered(torch.autograd.Function):
    """Keeps what the ring keeps: q, kv, the output and the log-sum-exps of this rank's part."""

    @staticmethod
    def forward(ctx: Any, context: Context, causal: bool, window: int | None, q: Tensor, kv: Tensor) -> Tensor:
        return keeping(ctx, context, causal, window, q, kv, _forward)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        context, calls, micro = ctx.context, ctx.calls, ctx.micro
        q, kv, out, lse = ctx.saved_tensors
        whole = _gather(context, kv, "backward", micro)
        shares = torch.empty_like(whole)
        dq = Summed(q)
        for distance in range(context.ring.size):
            source = (context.ring.rank - distance) % context.ring.size
            theirs = calls[distance] if distance < len(calls) else ()
            gradients(dq, shares[source], theirs, grad, q, whole[source], out, lse)
        dkv = torch.empty_like(kv)
        reason = "cp.gather.dkv"
        context.ring.reduce_scatter(dkv, shares, reason=reason, phase="backward", micro=micro)
        return None, None, None, dq.result(), dkv


def _forward(context: Context, calls: Sequence[Sequence[Call]], q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    whole = _gather(context, kv, context.phase, context.micro)
    merged = Merged(q)
    for distance, theirs in enumerate(calls):
        merge(merged, theirs, q, whole[(context.ring.rank - distance) % context.ring.size])
    return merged.result()


def _gather(context: Context, kv: Tensor, phase: Phase, micro: int | None) -> Tensor:
    """All ranks' kv, [cp, 2, B, T/cp, K, d]."""
    whole = kv.new_empty((context.ring.size, *kv.shape))
    context.ring.all_gather(whole, kv, reason="cp.gather.kv", phase=phase, micro=micro)
    return whole
