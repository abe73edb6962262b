"""Llama (Touvron et al. 2023) and its kin: rotary positions, RMSNorm, SwiGLU, grouped-query heads.

The spec's fields make it Llama 2 and 3, Mistral (`window`), Qwen2 (`qkv_bias`) or Qwen3 (`qk_norm`). Parameter
names and shapes are those of Hugging Face's ...ForCausalLM classes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.base import LanguageModel, attention
from meshwright.model.dropout import DropoutKey
from meshwright.model.init import residual_std
from meshwright.model.layers import Embedding, Head, Linear, RMSNorm
from meshwright.model.rope import Rotary, rotate
from meshwright.spec.model import ModelSpec


class Attention(nn.Module):
    """Self-attention with rotary positions: x [B, T, D], cos and sin as Rotary gives them -> [B, T, D]."""

    def __init__(self, spec: ModelSpec, index: int, kind: str, **where: Any) -> None:
        super().__init__()
        self.head_width = d = spec.head_width
        self.q_proj = Linear(spec.hidden, spec.heads * d, bias=spec.qkv_bias, **where)
        self.k_proj = Linear(spec.hidden, spec.num_kv_heads * d, bias=spec.qkv_bias, **where)
        self.v_proj = Linear(spec.hidden, spec.num_kv_heads * d, bias=spec.qkv_bias, **where)
        self.o_proj = Linear(spec.heads * d, spec.hidden, bias=spec.out_bias, std=residual_std(spec.layers), **where)
        self.q_norm = RMSNorm(d, spec.norm_eps, **where) if spec.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, spec.norm_eps, **where) if spec.qk_norm else nn.Identity()
        self.core = attention(kind, spec, place=3 * index + 1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        heads = (-1, self.head_width)
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, heads)), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, heads)), cos, sin)
        v = self.v_proj(x).unflatten(-1, heads)
        out: Tensor = self.o_proj(self.core(q, k, v, mask, None))
        return out


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020). Backward keeps x, and four times F values a token: gate, silu(gate), up, product."""

    def __init__(self, spec: ModelSpec, **where: Any) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden, spec.ffn_width, bias=spec.mlp_bias, **where)
        self.up_proj = Linear(spec.hidden, spec.ffn_width, bias=spec.mlp_bias, **where)
        std = residual_std(spec.layers)
        self.down_proj = Linear(spec.ffn_width, spec.hidden, bias=spec.mlp_bias, std=std, **where)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, index: int, kind: str, **where: Any) -> None:
        super().__init__()
        self.self_attn = Attention(spec, index, kind, **where)
        self.mlp = MLP(spec, **where)
        self.input_layernorm = RMSNorm(spec.hidden, spec.norm_eps, **where)
        self.post_attention_layernorm = RMSNorm(spec.hidden, spec.norm_eps, **where)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(LanguageModel):
    def __init__(self, spec: ModelSpec, kind: str, loss: str, masks: str, **where: Any) -> None:
        super().__init__(spec)  # masks: the family has no dropout
        self.model = nn.Module()
        self.model.embed_tokens = Embedding(spec.vocab, spec.hidden, **where)
        self.model.layers = nn.ModuleList(Block(spec, i, kind, **where) for i in range(spec.layers))
        self.model.norm = RMSNorm(spec.hidden, spec.norm_eps, **where)
        self.lm_head = Head(spec.hidden, spec.vocab, chunked=loss == "chunked", **where)
        self.rotary = Rotary(spec, **where)
        self.tie()

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def ends(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("model.embed_tokens",), ("model.norm", "lm_head")

    def embed(self, tokens: Tensor, positions: Tensor | None, dropout: DropoutKey | None) -> Tensor:
        return self.model.embed_tokens(tokens)

    def context(
        self,
        tokens: Tensor,
        dtype: torch.dtype,
        positions: Tensor | None,
        length: int | None,
        documents: Tensor | None,
        dropout: DropoutKey | None,
    ) -> tuple[Any, ...]:
        cos, sin = self.rotary(tokens.size(1) if positions is None else length, positions)
        core = next(iter(self.blocks)).self_attn.core
        return cos, sin, core.mask(tokens.size(1), dtype, tokens.device, documents)

    def final_norm(self, x: Tensor) -> Tensor:
        return self.model.norm(x)

    def embedding_weight(self) -> nn.Parameter:
        return self.model.embed_tokens.weight

    def rebuild_buffers(self, device: torch.device | str) -> None:
        self.rotary.rebuild(torch.device(device))
