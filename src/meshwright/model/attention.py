"""Scaled dot-product attention over grouped heads (Vaswani et al. 2017, Ainslie et al. 2023), fused and written out.

Both take q [B, T, H, d] and k, v [B, T, K, d], where query heads j·H/K to (j+1)·H/K − 1 read key-value head j, and
give [B, T, H·d]. Neither has parameters: a strategy may put another in its place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.model.dropout import Dropout, DropoutKey, TorchDropout


def visible(
    length: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    causal: bool = True,
    documents: Tensor | None = None,
) -> Tensor:
    """What is added to scores [T, T]: 0 where a query (row) sees a key (column), −∞ elsewhere.

    A query sees itself and earlier keys, the last `window` of them where a window is given; not causal: all. Of
    documents i64[B, T] it sees its own only, and the result is [B, 1, T, T].
    """
    hidden = torch.ones(length, length, dtype=torch.bool, device=device)
    if causal:
        hidden = hidden.triu(1) if window is None else hidden.triu(1) | hidden.tril(-window)
    else:
        hidden.zero_()
    if documents is not None:
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


class Sdpa(nn.Module):
    """torch's fused attention. Backward keeps q, k, v, the output and the logarithm of each row's softmax sum.

    With `dropout`, the probability that a weight is dropped, torch draws the masks from its generator. On the CPU it
    then writes attention out, in float32 at least, and keeps the softmax, its mask and the dropped weights.
    """

    def __init__(self, causal: bool, window: int | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal, self.window, self.dropout = causal, window, dropout

    def mask(
        self, length: int, dtype: torch.dtype, device: torch.device, documents: Tensor | None = None
    ) -> Tensor | None:
        """The mask that all blocks share: none where the kernel's own causal one does."""
        if documents is None and (self.window is None or self.window >= length):
            return None
        return visible(length, self.window, dtype, device, causal=self.causal, documents=documents)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: DropoutKey | None) -> Tensor:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and mask is None,
            enable_gqa=q.size(2) != k.size(2),
        )
        return out.transpose(1, 2).flatten(2)


class Explicit(nn.Module):
    """Written out, with dropout of the weights; softmax in float32 at least.

    Backward keeps q, k and v, each once as the matrix products need them, the softmax in the model's dtype, its
    dropout mask and, where dropped, the weights: what Korthikanti et al. (2022, arXiv 2205.05198, section 4.1) count.
    """

    def __init__(self, causal: bool, window: int | None, dropout: Dropout | TorchDropout) -> None:
        super().__init__()
        self.causal, self.window, self.dropout = causal, window, dropout

    def mask(
        self, length: int, dtype: torch.dtype, device: torch.device, documents: Tensor | None = None
    ) -> Tensor | None:
        if documents is None and not self.causal:
            return None
        return visible(length, self.window, dtype, device, causal=self.causal, documents=documents)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: DropoutKey | None) -> Tensor:
        b, t, h, d = q.shape
        groups = k.size(2)
        # The H/K query heads of a group become rows of one product, so that k and v are never repeated.
        q = (q * d**-0.5).view(b, t, groups, -1, d).permute(0, 2, 3, 1, 4).reshape(b, groups, -1, d)
        # Products of several sequences and heads copy k and v into such rows; copied always, a k that is a part of a
        # larger storage never keeps all of it.
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        scores = (q @ k.transpose(2, 3)).view(b, h, t, t)
        if mask is not None:
            scores = scores + mask
        weights = self.dropout(softmax(scores), dropout).view(b, groups, -1, t)
        out = (weights @ v).view(b, h, t, d)
        return out.transpose(1, 2).flatten(2)


def softmax(scores: Tensor) -> Tensor:
    """Over the last dimension, computed in float32 at least. Backward keeps the result in the dtype of `scores`."""
    narrow = scores.dtype != torch.promote_types(scores.dtype, torch.float32)
    weights: Tensor = _NarrowSoftmax.apply(scores) if narrow else F.softmax(scores, dim=-1)
    return weights


class _NarrowSoftmax(torch.autograd.Function):
    """The softmax w of narrow scores, whose gradient w · (g − Σ w·g / Σ w) is computed in float32 from rounded w.

    Σ w is 1 before rounding. Left out, as torch does, it would give scores a gradient where g is the same for all
    of a row's weights, which changes nothing (softmax ignores what is added to a whole row).
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = F.softmax(scores, dim=-1)  # torch's kernels widen within and round once, at the end
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (weights,) = ctx.saved_tensors
        n = weights.size(-1)
        result = torch.empty_like(weights)
        # Float32 copies of a few rows at a time stay in a CPU's cache; an accelerator wants more of them.
        rows = max((1 << 15 if weights.device.type == "cpu" else 1 << 24) // n, 1)
        parts = (tensor.reshape(-1, n).split(rows) for tensor in (weights, grad, result))
        for w, g, out in zip(*parts, strict=True):
            w, g = w.float(), g.float()
            mean = torch.linalg.vecdot(w, g).div_(w.sum(dim=-1))
            out.copy_(g.sub_(mean[:, None]).mul_(w))
        return result
