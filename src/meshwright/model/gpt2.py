"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each sub-layer, GELU, biases everywhere.

Parameter names and shapes are those of Hugging Face's GPT2LMHeadModel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.base import LanguageModel, attention
from meshwright.model.dropout import DropoutKey, dropout
from meshwright.model.init import residual_std
from meshwright.model.layers import Conv1D, Embedding, Head, LayerNorm
from meshwright.spec.model import ModelSpec


class Attention(nn.Module):
    """Causal self-attention: x [B, T, D] -> [B, T, D]. q, k and v share one product, and one storage in backward."""

    def __init__(self, spec: ModelSpec, index: int, kind: str, masks: str, **where: Any) -> None:
        super().__init__()
        self.head_width = spec.head_width
        self.c_attn = Conv1D(spec.hidden, 3 * spec.hidden, **where)
        self.c_proj = Conv1D(spec.hidden, spec.hidden, std=residual_std(spec.layers), **where)
        self.core = attention(kind, spec, place=3 * index + 1, masks=masks)

    def forward(self, x: Tensor, mask: Tensor | None, dropout: DropoutKey | None) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_width)) for part in self.c_attn(x).chunk(3, dim=-1))
        out: Tensor = self.c_proj(self.core(q, k, v, mask, dropout))
        return out


class MLP(nn.Module):
    """D -> F -> D with GELU in its tanh form. Backward keeps x, and F values a token before and after GELU."""

    def __init__(self, spec: ModelSpec, **where: Any) -> None:
        super().__init__()
        self.c_fc = Conv1D(spec.hidden, spec.ffn_width, **where)
        self.c_proj = Conv1D(spec.ffn_width, spec.hidden, std=residual_std(spec.layers), **where)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return out


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, index: int, kind: str, masks: str, **where: Any) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(spec.hidden, spec.norm_eps, **where)
        self.attn = Attention(spec, index, kind, masks, **where)
        self.ln_2 = LayerNorm(spec.hidden, spec.norm_eps, **where)
        self.mlp = MLP(spec, **where)
        self.attn_dropout = dropout(masks, spec.resid_dropout, place=3 * index + 2)
        self.mlp_dropout = dropout(masks, spec.resid_dropout, place=3 * index + 3)

    def forward(self, x: Tensor, mask: Tensor | None, dropout: DropoutKey | None) -> Tensor:
        x = x + self.attn_dropout(self.attn(self.ln_1(x), mask, dropout), dropout)
        return x + self.mlp_dropout(self.mlp(self.ln_2(x)), dropout)


class GPT2(LanguageModel):
    def __init__(self, spec: ModelSpec, kind: str, loss: str, masks: str, **where: Any) -> None:
        super().__init__(spec)
        self.transformer = nn.Module()
        self.transformer.wte = Embedding(spec.vocab, spec.hidden, **where)
        self.transformer.wpe = Embedding(spec.max_seq, spec.hidden, **where)
        self.transformer.h = nn.ModuleList(Block(spec, i, kind, masks, **where) for i in range(spec.layers))
        self.transformer.ln_f = LayerNorm(spec.hidden, spec.norm_eps, **where)
        self.lm_head = Head(spec.hidden, spec.vocab, chunked=loss == "chunked", **where)
        self.dropout = dropout(masks, spec.embd_dropout, place=0)
        self.tie()

    @property
    def blocks(self) -> nn.ModuleList:
        return self.transformer.h

    @property
    def ends(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("transformer.wte", "transformer.wpe"), ("transformer.ln_f", "lm_head")

    def embed(self, tokens: Tensor, positions: Tensor | None, dropout: DropoutKey | None) -> Tensor:
        length = tokens.size(1)
        if positions is None:
            if length > self.spec.max_seq:
                raise ValueError(f"{length} tokens are more than the model's {self.spec.max_seq} learned positions")
            positions = torch.arange(length, device=tokens.device)
        x = self.transformer.wte(tokens) + self.transformer.wpe(positions)
        return self.dropout(x, dropout)

    def context(
        self,
        tokens: Tensor,
        dtype: torch.dtype,
        positions: Tensor | None,
        length: int | None,
        documents: Tensor | None,
        dropout: DropoutKey | None,
    ) -> tuple[Any, ...]:
        core = next(iter(self.blocks)).attn.core
        return core.mask(tokens.size(1), dtype, tokens.device, documents), dropout

    def final_norm(self, x: Tensor) -> Tensor:
        return self.transformer.ln_f(x)

    def embedding_weight(self) -> nn.Parameter:
        return self.transformer.wte.weight
