"""Attention a block at a time: the kernels, with the log-sum-exp by which blocks are put together.

With scores s of a query and its keys in blocks b, out_b = softmax(s_b) v_b and lse_b = log Σ exp(s_b), the whole is
lse = log Σ_b exp(lse_b) and out = Σ_b exp(lse_b − lse) · out_b (Milakov and Gimelshein 2018; Liu et al. 2023). In
backward a block needs no other's: with the whole's out and lse its weights are exp(s − lse), and the gradients that
a kernel finds are this block's share.

All tensors are q [B, n, H, d], k and v [B, m, K, d], out as q, lse [B, n, H] in float32 at least. causal: query i sees
keys 0 … i of the block, which has no more keys than queries. mask: [n, m] or [B, 1, n, m], added to the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.sight import Call, Context

_FUSED_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_FUSED_CUDA = torch.ops.aten._scaled_dot_product_flash_attention
_FUSED_CUDA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
_ROWS = 1 << 25  # scores that the written-out kernel holds at a time


def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out and lse of one block; queries that see nothing have an lse of −∞, and an out that counts for nothing."""
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    if q.device.type == "cpu":
        out, lse = _FUSED_CPU(*heads, 0.0, causal, attn_mask=mask)
        if mask is not None:  # the kernel gives them 0
            lse = lse.masked_fill(mask.isneginf().all(-1), -torch.inf)
    elif _flash(q, mask, causal, k):
        out, lse, *_ = _FUSED_CUDA(*heads, 0.0, causal, False)
    else:
        return _written_out(q, k, v, causal, mask)
    return out.transpose(1, 2), lse.transpose(1, 2)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shares of one block in the gradients of q, k and v, given the whole's out and lse for its queries."""
    heads = [t.transpose(1, 2) for t in (grad, q, k, v, out)]
    if q.device.type == "cpu":
        found = _FUSED_CPU_BACKWARD(*heads, lse.transpose(1, 2), 0.0, causal, attn_mask=mask)
    elif _flash(q, mask, causal, k):
        lse = lse.transpose(1, 2).contiguous()
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the dropout that there is none of
        lengths = (None, None, q.size(1), k.size(1))
        found = _FUSED_CUDA_BACKWARD(*heads, lse, *lengths, 0.0, causal, random, random)
    else:
        return _written_out_backward(grad, q, k, v, out, lse, causal, mask)
    dq, dk, dv = (t.transpose(1, 2) for t in found)
    return dq, dk, dv


def _flash(q: Tensor, mask: Tensor | None, causal: bool, k: Tensor) -> bool:
    """Whether the accelerator's fused kernel takes it: 16 bits, no mask, and its causal mode counts from the end."""
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.size(-1) % 8 == 0 and q.size(-1) <= 256
    return fits and mask is None and not (causal and q.size(1) != k.size(1))


class Merged:
    """The whole's out and lse for n queries, from those of blocks as they come. Held in float32 at least."""

    def __init__(self, q: Tensor) -> None:
        self._like = q
        self._wide = torch.promote_types(q.dtype, torch.float32)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """A block's out [B, n', H, d] and lse [B, n', H], for the queries `rows`. Takes `out` for its own."""
        if self._out is None or self._lse is None:
            if out.size(1) == self._like.size(1):
                self._out, self._lse = out.to(self._wide), lse
                return
            self._out = torch.zeros_like(self._like, dtype=self._wide)
            self._lse = lse.new_full(self._like.shape[:-1], -torch.inf)
        whole = self._lse[:, rows]
        # Where neither has seen a key, either may stand.
        share = torch.sigmoid(lse - whole).nan_to_num_(0.0)
        self._out[:, rows].lerp_(out.to(self._wide), share.unsqueeze(-1))
        self._lse[:, rows] = torch.logaddexp(whole, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """out in the dtype of q, and lse."""
        assert self._out is not None and self._lse is not None, "every query sees itself"
        return self._out.to(self._like.dtype), self._lse


class Summed:
    """A gradient from the shares of blocks, [B, n, heads, d] of `like`. Summed in float32 at least."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._sum: Tensor | None = None

    def add(self, rows: slice, share: Tensor) -> None:
        """Takes `share` for its own."""
        wide = torch.promote_types(self._like.dtype, torch.float32)
        if self._sum is None:
            if share.size(1) == self._like.size(1):
                self._sum = share.to(wide)
                return
            self._sum = torch.zeros_like(self._like, dtype=wide)
        self._sum[:, rows] += share

    def result(self) -> Tensor:
        """In the dtype of `like`; zeros where no block had a share."""
        return torch.zeros_like(self._like) if self._sum is None else self._sum.to(self._like.dtype)

    def into(self, out: Tensor) -> None:
        """Write the result to `out`."""
        out.zero_() if self._sum is None else out.copy_(self._sum)


# -- a method that goes block by block ---------------------------------------------------------------------------------


def keeping(
    ctx: Any,
    context: Context,
    causal: bool,
    window: int | None,
    q: Tensor,
    kv: Tensor,
    compute: Callable[[Context, Sequence[Sequence[Call]], Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Forward of an autograd function by `compute`, out and lse of the calls; keeps those, q and kv for backward."""
    calls = context.calls(q, causal, window)
    ctx.context, ctx.calls, ctx.micro = context, calls, context.micro
    out, lse = context.kept(lambda: compute(context, calls, q, kv))
    ctx.save_for_backward(q, kv, out, lse)
    return out


# -- what the blocks of one part of the keys contribute --------------------------------------------------------------


def merge(merged: Merged, calls: Sequence[Call], q: Tensor, kv: Tensor) -> None:
    """Add what the queries get from the keys kv [2, B, n, K, d] of one part."""
    k, v = kv[0], kv[1]
    for call in calls:
        part = forward(
            q[:, call.queries], k[:, call.keys], v[:, call.keys], causal=call.causal, mask=call.mask(q.dtype)
        )
        merged.add(call.queries, *part)


def gradients(
    dq: Summed, dkv: Tensor, calls: Sequence[Call], grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Add to dq what comes from the keys of one part, and fill `dkv` with what they get from the queries."""
    k, v = kv[0], kv[1]
    dk, dv = Summed(k), Summed(v)
    for call in calls:
        rows = call.queries
        shares = backward(
            grad[:, rows], q[:, rows], k[:, call.keys], v[:, call.keys], out[:, rows], lse[:, rows],
            causal=call.causal, mask=call.mask(q.dtype),
        )  # fmt: skip
        for total, place, share in zip((dq, dk, dv), (rows, call.keys, call.keys), shares, strict=True):
            total.add(place, share)
    dk.into(dkv[0])
    dv.into(dkv[1])


# -- written out, for what the fused kernels do not take -------------------------------------------------------------


def _written_out(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    wide_v = _grouped_keys(v).to(lse.dtype)
    for rows in _rows(q, k):
        scores = _scores(q[:, rows], k, rows, causal, mask)
        part = torch.logsumexp(scores, -1, keepdim=True)
        weights = (scores - part.nan_to_num(neginf=0.0)).exp_()
        out[:, rows] = _ungrouped(weights @ wide_v).to(q.dtype)
        lse[:, rows] = _ungrouped(part).squeeze(-1)
    return out, lse


def _written_out_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide, groups, scale = lse.dtype, k.size(2), q.size(-1) ** -0.5
    keys, values = _grouped_keys(k).to(wide), _grouped_keys(v).to(wide)
    dq = torch.empty_like(q)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    for rows in _rows(q, k):
        ours, g, o = (_grouped(t[:, rows], groups).to(wide) for t in (q, grad, out))
        weights = (_scores(q[:, rows], k, rows, causal, mask) - _grouped(lse[:, rows, :, None], groups)).exp_()
        # Each query head of a group has its own rows; their sums over the group are the key's.
        dv += (weights.transpose(-1, -2) @ g).sum(2, keepdim=True)
        dscores = (g @ values.transpose(-1, -2)).sub_((g * o).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
        dq[:, rows] = _ungrouped(dscores @ keys).to(q.dtype)
        dk += (dscores.transpose(-1, -2) @ ours).sum(2, keepdim=True)
    return dq, _ungrouped(dk).to(k.dtype), _ungrouped(dv).to(v.dtype)


def _rows(q: Tensor, k: Tensor) -> list[slice]:
    each = max(_ROWS // (q.size(0) * q.size(2) * k.size(1)), 1)
    return [slice(start, min(start + each, q.size(1))) for start in range(0, q.size(1), each)]


def _scores(q: Tensor, k: Tensor, rows: slice, causal: bool, mask: Tensor | None) -> Tensor:
    """[B, K, H/K, n, m] of the queries `rows`, in float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = _grouped_keys(k).to(wide)
    scores = (_grouped(q, k.size(2)).to(wide) * q.size(-1) ** -0.5) @ keys.transpose(-1, -2)
    if causal:
        places = torch.arange(k.size(1), device=q.device)
        hidden = places > torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        scores.masked_fill_(hidden, -torch.inf)
    if mask is not None:
        scores += mask[..., rows, :] if mask.dim() == 2 else mask[:, :, None, rows, :]
    return scores


def _grouped(t: Tensor, groups: int) -> Tensor:
    """[B, n, H, d] -> [B, K, H/K, n, d]"""
    return t.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)


def _grouped_keys(t: Tensor) -> Tensor:
    """[B, m, K, d] -> [B, K, 1, m, d]"""
    return t.transpose(1, 2).unsqueeze(2)


def _ungrouped(t: Tensor) -> Tensor:
    """[B, K, g, n, d] -> [B, n, K·g, d]"""
    return t.permute(0, 3, 1, 2, 4).flatten(2, 3)
