"""From parts of the sequence to heads and back (DeepSpeed-Ulysses, Jacobs et al. 2023), and a ring of that (USP).

Attention does not mix heads, so an all-to-all that takes each rank's part of the sequence with all heads and gives it
all of the sequence with some heads makes attention local; another brings the output back. A rank sends less the more
ranks there are, where with an all-gather or a ring it sends about all of K and V; but heads must divide. USP (Fang and
Zhao 2024) deals heads out over u neighbours, which have the fastest links, and lets what each of them then has go
around a ring over the others: cp = u × r.

    ============  =======================================  ============================================
    on the wire   forward                                  backward
    ============  =======================================  ============================================
    q, k and v    one all-to-all                           one all-to-all of their gradients
    the output    one all-to-all                           one all-to-all of its gradient
    usp           the ring's, of T/r and K/u heads         the ring's
    ============  =======================================  ============================================

Where there are fewer key-value heads than ranks, several ranks are sent the same one, and its gradients are added.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.parallel import ring
from meshwright.parallel.sight import Context
from meshwright.spec.sequence import shared_heads
from meshwright.spec.traffic import Phase


def attend(context: Context, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> Tensor:
    """q [B, n, H, d], k and v [B, n, K, d] -> [B, n, H, d], of n positions a rank; with ulysses the ring is of one."""
    q, kv = to_heads(context, q, k, v)
    return to_sequence(context, ring.attend(context, q, kv, causal, window))


def to_heads(context: Context, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q [B, n, H, d], k and v [B, n, K, d] -> q [B, u·n, H/u, d] and kv [2, B, u·n, K/u, d], positions ascending."""
    heads: tuple[Tensor, Tensor] = _ToHeads.apply(context, q, k, v)
    return heads


def to_sequence(context: Context, out: Tensor) -> Tensor:
    """[B, u·n, H/u, d] -> [B, n, H, d]"""
    part: Tensor = _ToSequence.apply(context, out)
    return part


class _ToHeads(torch.autograd.Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, context: Context, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ctx.context, ctx.micro, ctx.kv_heads = context, context.micro, k.size(2)
        u = context.heads.size
        own, shared = q.size(2) // u, shared_heads(k.size(2), u)

        def send() -> tuple[Tensor, Tensor]:
            message = q.new_empty((u, *q.shape[:2], own + 2 * shared, q.size(3)))
            filled = message.movedim(0, 2)  # [B, n, u, own + 2 · shared, d]
            filled[..., :own, :] = q.unflatten(2, (u, own))
            filled[..., own : own + shared, :] = _dealt(k, u)
            filled[..., own + shared :, :] = _dealt(v, u)
            whole = _exchange_positions(context, message, "qkv", context.phase, context.micro)
            kv = torch.stack((whole[:, :, own : own + shared], whole[:, :, own + shared :]))
            return whole[:, :, :own].contiguous(), kv

        return context.kept(send)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dkv: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        context, own, shared = ctx.context, dq.size(2), dkv.size(3)
        whole = torch.cat((dq, dkv[0], dkv[1]), dim=2)
        back = _exchange_heads(context, whole, "qkv", "backward", ctx.micro)  # [B, n, u, own + 2 · shared, d]
        dk, dv = (_collected(t, ctx.kv_heads) for t in (back[..., own : own + shared, :], back[..., own + shared :, :]))
        return None, back[..., :own, :].flatten(2, 3), dk, dv


class _ToSequence(torch.autograd.Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, context: Context, out: Tensor) -> Tensor:
        ctx.context, ctx.micro = context, context.micro

        def send() -> Tensor:
            return _exchange_heads(context, out, "out", context.phase, context.micro).flatten(2, 3)

        return context.kept(send)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        message = grad.unflatten(2, (ctx.context.heads.size, -1)).movedim(2, 0).contiguous()
        return None, _exchange_positions(ctx.context, message, "out", "backward", ctx.micro)


# -- key-value heads -------------------------------------------------------------------------------------------------


def _dealt(t: Tensor, u: int) -> Tensor:
    """[B, n, K, d] -> [B, n, u, K/u, d], each rank the heads that its query heads read; one, where K is less than u."""
    each = shared_heads(t.size(2), u)
    return t.repeat_interleave(max(u // t.size(2), 1), dim=2).unflatten(2, (u, each))


def _collected(t: Tensor, kv_heads: int) -> Tensor:
    """The other way for gradients: those of copies are added."""
    return t.flatten(2, 3).unflatten(2, (kv_heads, -1)).sum(3)


# -- the exchanges ---------------------------------------------------------------------------------------------------


def _exchange_positions(context: Context, message: Tensor, what: str, phase: Phase, micro: int | None) -> Tensor:
    """[u, B, n, w, d], the heads for each rank -> [B, u·n, w, d], this rank's heads of all their positions."""
    parts = torch.empty_like(message)
    context.heads.all_to_all(parts, message, reason=f"cp.ulysses.{what}", phase=phase, micro=micro)
    whole = parts.transpose(0, 1).flatten(1, 2)
    places = context.arranged(whole.size(1))
    return whole if places is None else whole.index_select(1, places.to(whole.device))


def _exchange_heads(context: Context, whole: Tensor, what: str, phase: Phase, micro: int | None) -> Tensor:
    """[B, u·n, w, d] -> [B, n, u, w, d]"""
    places = context.arranged(whole.size(1))
    if places is not None:
        whole = torch.empty_like(whole).index_copy_(1, places.to(whole.device), whole)
    message = whole.unflatten(1, (context.heads.size, -1)).transpose(0, 1).contiguous()
    parts = torch.empty_like(message)
    context.heads.all_to_all(parts, message, reason=f"cp.ulysses.{what}", phase=phase, micro=micro)
    return parts.movedim(0, 2)
