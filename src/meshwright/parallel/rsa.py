"""Ring self-attention in two phases (Li et al. 2021, arXiv 2105.13120; Colossal-AI).

Keys go around the ring first, until each rank has the scores of its queries with all of them; after the softmax the
values go around, and the output is summed up. Backward goes the same way, values before keys, with their gradients one
step behind. Both rings run under the products. Plain products and a plain softmax do, no kernel that merges; the
price is that each rank holds scores of T/cp × T a head, and computes what the mask then hides.

    ============  =======================================  ============================================
    on the wire   forward                                  backward
    ============  =======================================  ============================================
    k, then v     cp − 1 shifts each                       v, then k: cp − 1 shifts each
    dv, then dk                                            cp − 1 shifts each
    ============  =======================================  ============================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.parallel.ring import Behind, around
from meshwright.parallel.sight import Context
from meshwright.spec.traffic import Phase


def attend(context: Context, q: Tensor, kv: Tensor, causal: bool, window: int | None) -> Tensor:
    """q [B, n, H, d], kv [2, B, n, K, d] -> [B, n, H, d], of n = T/cp positions."""
    out: Tensor = _TwoPhases.apply(context, causal, window, q, kv)
    return out


class _TwoPhases(torch.autograd.Function):
    """Keeps q, kv and the softmax [B, K, H/K · n, T], in which keys stand by the rank that holds them."""

    @staticmethod
    def forward(ctx: Any, context: Context, causal: bool, window: int | None, q: Tensor, kv: Tensor) -> Tensor:
        ctx.context, ctx.micro = context, context.micro
        out, weights = context.kept(lambda: _forward(context, causal, window, q, kv))
        ctx.save_for_backward(q, kv, weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, None, None, *_backward(ctx.context, ctx.micro, grad, *ctx.saved_tensors)


def _forward(context: Context, causal: bool, window: int | None, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    ring, n, groups = context.ring, q.size(1), kv.size(3)
    length = n * ring.size
    rows = _rows(q * q.size(-1) ** -0.5, groups)
    scores = rows.new_empty((*rows.shape[:-1], length))
    for columns, source, k in _parts(context, kv[0], "k", context.phase, context.micro):
        part = rows @ k.permute(0, 2, 3, 1)
        hidden = context.hidden(length, source, causal, window, q.device)
        by_head = part.unflatten(2, (-1, n))  # [B, K, H/K, n, n]
        by_head.masked_fill_(hidden if hidden.dim() == 2 else hidden.unsqueeze(2), -torch.inf)
        scores[..., columns] = part
    weights = F.softmax(scores, dim=-1)  # torch's kernels widen within
    del scores
    out: Tensor | None = None
    for columns, _, v in _parts(context, kv[1], "v", context.phase, context.micro):
        part = (weights[..., columns] @ v.transpose(1, 2)).to(_wide(q))
        out = part if out is None else out.add_(part)
    assert out is not None
    return _heads(out.to(q.dtype), n), weights


def _backward(
    context: Context, micro: int | None, grad: Tensor, q: Tensor, kv: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    n, groups, scale, dkv = q.size(1), kv.size(3), q.size(-1) ** -0.5, torch.empty_like(kv)
    rows, grad = _rows(q * scale, groups), _rows(grad, groups)
    behind = Behind(context.ring, kv[1], "cp.rsa.dv", micro)
    dscores = torch.empty_like(weights)
    for columns, _, v in _parts(context, kv[1], "v", "backward", micro):
        dscores[..., columns] = grad @ v.permute(0, 2, 3, 1)
        behind.next().copy_((weights[..., columns].transpose(2, 3) @ grad).transpose(1, 2))
        behind.add(last=columns.start == _last(context, n))
    dkv[1] = behind.home(context.ring.size - 1)
    _through_softmax(dscores, weights)
    behind = Behind(context.ring, kv[0], "cp.rsa.dk", micro)
    dq = torch.zeros(rows.shape, dtype=_wide(q), device=q.device)
    for columns, _, k in _parts(context, kv[0], "k", "backward", micro):
        dq += dscores[..., columns] @ k.transpose(1, 2)
        behind.next().copy_((dscores[..., columns].transpose(2, 3) @ rows).transpose(1, 2))
        behind.add(last=columns.start == _last(context, n))
    dkv[0] = behind.home(context.ring.size - 1)
    return _heads((dq * scale).to(q.dtype), n), dkv


def _parts(
    context: Context, own: Tensor, name: str, phase: Phase, micro: int | None
) -> Iterator[tuple[slice, int, Tensor]]:
    """Each rank's part in the order in which it comes by: its columns of the scores, whose it is, and the tensor."""
    ring, n = context.ring, own.size(1)
    parts = around(ring, own, ring.size - 1, f"cp.rsa.{name}", phase, micro)
    for distance, part in enumerate(parts):
        source = (ring.rank - distance) % ring.size
        yield slice(source * n, (source + 1) * n), source, part


def _last(context: Context, n: int) -> int:
    """The first column of the part that comes by last: that of the rank ahead."""
    return (context.ring.rank + 1) % context.ring.size * n


def _through_softmax(dweights: Tensor, weights: Tensor) -> None:
    """Turn the gradient of a softmax into that of its scores, in place: w · (g − Σ w·g / Σ w).

    Σ w is 1 before rounding: see model/attention.py.
    """
    wide = _wide(weights)
    # A row of each head and query at a time would be slow, all of them another matrix as large.
    for w, g in zip(weights.unbind(1), dweights.unbind(1), strict=True):
        wider, gradient = w.to(wide), g.to(wide)
        mean = torch.linalg.vecdot(wider, gradient).div_(wider.sum(-1))
        g.copy_(gradient.sub_(mean.unsqueeze(-1)).mul_(wider))


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def _rows(t: Tensor, groups: int) -> Tensor:
    """[B, n, H, d] -> [B, K, H/K · n, d]: the query heads of a group as rows of one product."""
    return t.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _heads(t: Tensor, n: int) -> Tensor:
    """[B, K, H/K · n, d] -> [B, n, H, d]"""
    return t.unflatten(2, (-1, n)).permute(0, 3, 1, 2, 4).flatten(2, 3)
