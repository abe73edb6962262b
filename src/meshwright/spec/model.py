"""What a model is: two families, described by numbers alone.

Sizes carry the field's names. The letters in comments elsewhere are `D` hidden, `H` heads, `K` kv_heads,
`F` ffn, `V` vocab, `T` sequence length.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(gt=0, lt=2**31)]
Probability = Annotated[float, Field(ge=0, lt=1)]


class RopeScaling(BaseModel):
    """How rotary frequencies are stretched beyond the length a model was trained at.

    `linear`: Chen et al. 2023, positions divided by `factor`. `dynamic`: NTK-aware, the base grows with the
    length once it exceeds `original_max_seq`. `yarn`: Peng et al. 2023. `llama3`: the Llama 3.1 rule.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["linear", "dynamic", "yarn", "llama3"] = Field(description="which rule")
    factor: Annotated[float, Field(ge=1)] = Field(description="how many times longer")
    original_max_seq: Count | None = Field(None, description="length before stretching; all but linear need it")
    low_freq_factor: float | None = Field(None, description="llama3: wavelengths above original/low are stretched")
    high_freq_factor: float | None = Field(None, description="llama3: wavelengths below original/high are kept")
    beta_fast: float | None = Field(None, description="yarn: rotations above which nothing is stretched (32)")
    beta_slow: float | None = Field(None, description="yarn: rotations below which all is stretched (1)")
    attention_factor: float | None = Field(None, description="yarn: scale of cos and sin (0.1 ln(factor) + 1)")

    @model_validator(mode="after")
    def _needs(self) -> Self:
        needed = {
            "linear": (),
            "dynamic": ("original_max_seq",),
            "yarn": ("original_max_seq",),
            "llama3": ("original_max_seq", "low_freq_factor", "high_freq_factor"),
        }[self.kind]
        allowed = {
            "linear": (),
            "dynamic": ("original_max_seq",),
            "yarn": ("original_max_seq", "beta_fast", "beta_slow", "attention_factor"),
            "llama3": ("original_max_seq", "low_freq_factor", "high_freq_factor"),
        }[self.kind]
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name in needed and value is None:
                raise ValueError(f"rope scaling {self.kind!r} needs {name}")
            if name not in ("kind", "factor", *allowed) and value is not None:
                raise ValueError(f"rope scaling {self.kind!r} has no {name}; leave it out")
        return self


class ModelSpec(BaseModel):
    """One transformer language model. Fields that a family does not have must be left at their defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: Literal["gpt2", "llama"] = Field(description="gpt2 (LayerNorm, learned positions, GELU) or llama")
    vocab: Count = Field(description="vocabulary size V")
    hidden: Count = Field(description="width of the residual stream D")
    layers: Annotated[int, Field(gt=0, le=10_000)] = Field(description="number of blocks L")
    heads: Count = Field(description="query heads H")
    kv_heads: Count | None = Field(None, description="key-value heads K; as many as heads by default")
    head_dim: Count | None = Field(None, description="width of a head; hidden / heads by default")
    ffn: Count | None = Field(None, description="feed-forward width F; 4 × hidden by default (gpt2), needed for llama")
    max_seq: Count = Field(description="longest sequence; the number of learned positions in gpt2")
    norm_eps: Annotated[float, Field(gt=0)] = Field(1e-5, description="added to the variance in norms")
    tied: bool | None = Field(None, description="output head shares the embedding; default yes for gpt2, no for llama")
    causal: bool = Field(True, description="a position sees only itself and earlier ones")
    # gpt2
    embd_dropout: Probability = Field(0.0, description="gpt2: dropout after the embeddings")
    attn_dropout: Probability = Field(0.0, description="gpt2: dropout of attention weights")
    resid_dropout: Probability = Field(0.0, description="gpt2: dropout before each residual addition")
    # llama
    qkv_bias: bool = Field(False, description="llama: biases of the q, k and v projections (Qwen2)")
    out_bias: bool = Field(False, description="llama: bias of the attention output projection")
    mlp_bias: bool = Field(False, description="llama: biases of the feed-forward projections")
    qk_norm: bool = Field(False, description="llama: RMSNorm of each query and key head (Qwen3)")
    window: Count | None = Field(None, description="llama: a position sees only the last `window` ones (Mistral)")
    rope_theta: Annotated[float, Field(gt=0)] = Field(10000.0, description="llama: base of the rotary frequencies")
    rope_scaling: RopeScaling | None = Field(None, description="llama: stretching of the rotary frequencies")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"heads={self.heads} does not divide hidden={self.hidden}; or give head_dim")
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; use one of {divisors(self.heads)}"
            )
        if self.window is not None and not self.causal:
            raise ValueError("window needs causal attention; leave window out or set causal: true")
        if self.family == "gpt2":
            self._gpt2()
        else:
            self._llama()
        return self

    def _gpt2(self) -> None:
        if self.num_kv_heads != self.heads:
            raise ValueError("gpt2 has no grouped heads; leave kv_heads out")
        if self.head_width * self.heads != self.hidden:
            raise ValueError(
                f"gpt2 needs head_dim × heads = hidden; leave head_dim out or use {self.hidden // self.heads}"
            )
        self._refuse_changed(
            "gpt2", "qkv_bias", "out_bias", "mlp_bias", "qk_norm", "window", "rope_theta", "rope_scaling"
        )

    def _llama(self) -> None:
        if self.ffn is None:
            raise ValueError("llama needs ffn, the feed-forward width")
        if self.head_width % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_width}")
        self._refuse_changed("llama", "embd_dropout", "attn_dropout", "resid_dropout")

    def _refuse_changed(self, family: str, *names: str) -> None:
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{family} has no {name}; leave it out")

    # What the optional fields come to, so that no reader repeats the defaults.

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def ffn_width(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def drops(self) -> bool:
        """Whether training drops anything."""
        return max(self.embd_dropout, self.attn_dropout, self.resid_dropout) > 0

    @property
    def is_tied(self) -> bool:
        return self.family == "gpt2" if self.tied is None else self.tied


def divisors(n: int) -> list[int]:
    """The positive divisors of `n`, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
