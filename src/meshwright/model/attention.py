"""Scaled dot-product attention over grouped heads (Vaswani et al. 2017, Ainslie et al. 2023), fused and written out.

Both take q [B, T, H, d] and k, v [B, T, K, d], where query heads j·H/K to (j+1)·H/K − 1 read key-value head j, and
give [B, T, H·d]. Neither has parameters: a strategy may put another in its place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.dropout import Dropout, DropoutKey


def visible(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to scores [T, T]: 0 where a query (row) sees a key (column), −∞ elsewhere.

    A query sees itself and earlier keys, the last `window` of them where a window is given.
    """
    hidden = torch.ones(length, length, dtype=torch.bool, device=device)
    hidden = hidden.triu(1) if window is None else hidden.triu(1) | hidden.tril(-window)
    return torch.zeros(length, length, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


class Sdpa(nn.Module):
    """torch's fused attention. Backward keeps q, k, v, the output and the logarithm of each row's softmax sum."""

    def __init__(self, causal: bool, window: int | None) -> None:
        super().__init__()
        self.causal, self.window = causal, window

    def mask(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """The mask that all blocks share: none where the kernel's own causal one does."""
        if self.window is None or self.window >= length:
            return None
        return visible(length, self.window, dtype, device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: DropoutKey | None) -> Tensor:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            enable_gqa=q.size(2) != k.size(2),
        )
        return out.transpose(1, 2).flatten(2)


class Explicit(nn.Module):
    """Written out, with dropout of the weights; softmax in float32 at least.

    Backward keeps q and k, v as the matrix products need them, the softmax, its dropout mask and, where dropped or
    rounded, the weights.
    """

    def __init__(self, causal: bool, window: int | None, dropout: Dropout) -> None:
        super().__init__()
        self.causal, self.window, self.dropout = causal, window, dropout

    def mask(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        return visible(length, self.window, dtype, device) if self.causal else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: DropoutKey | None) -> Tensor:
        b, t, h, d = q.shape
        groups = k.size(2)
        # The H/K query heads of a group become rows of one product, so that k and v are never repeated.
        q = (q * d**-0.5).view(b, t, groups, -1, d).permute(0, 2, 3, 1, 4).reshape(b, groups, -1, d)
        scores = (q @ k.permute(0, 2, 3, 1)).view(b, h, t, t)
        if mask is not None:
            scores = scores + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        weights = self.dropout(weights, dropout).view(b, groups, -1, t)
        out = (weights @ v.transpose(1, 2)).view(b, h, t, d)
        return out.transpose(1, 2).flatten(2)
