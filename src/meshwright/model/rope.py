"""Rotary position embedding (Su et al. 2021) and the published rules that stretch it beyond its training length.

Element i of a head's first half and element i of its second, (a, b), turn by the angle position · θ^(−2i/d):
(a cos − b sin, b cos + a sin). Frequencies and angles are computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from meshwright.spec.model import ModelSpec, RopeScaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [B, T, heads, d] by Rotary's cos and sin. Backward keeps those two only, not x."""
    wide = x.to(cos.dtype)
    return (wide * cos + wide.roll(x.size(-1) // 2, -1) * sin).to(x.dtype)


class Rotary(nn.Module):
    """cos and sin for a sequence, from a table of positions 0, 1, …: [n, d] each, in promote_types(dtype, float32).

    Both are as wide as a head, sin negative in the first half: what `rotate` multiplies a head and its exchanged
    halves with.

    Not parameters, not in the state dict. Moving or casting a model would round the table with the parameters, or
    leave it empty after the meta device; so both compute it anew, and a cast below float32 leaves it in float32.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        scaling = spec.rope_scaling
        self.dynamic = scaling is not None and scaling.kind == "dynamic"
        # The table serves sequences up to this length. It grows for longer ones, except with `dynamic`, where each
        # length has a table of its own.
        self.length = spec.max_seq
        if scaling is not None and scaling.kind == "dynamic":
            assert scaling.original_max_seq is not None
            self.length = min(spec.max_seq, scaling.original_max_seq)
        self.rebuild(device, torch.promote_types(dtype, torch.float32))

    def rebuild(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Compute the table anew on `device`."""
        cos, sin = self._table(self.length, device, dtype or self.cos.dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, length: int | None, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """For a sequence of `length`, or at `positions` i64[T] or [B, T] of one: cos, sin [T, 1, d] or [B, T, 1, d].

        Positions may go without a length. `dynamic` scaling, which depends on it, then takes the largest of them to be
        the last, and reads them on the host; without scaling they must be below the spec's max_seq.
        """
        if length is None:
            assert positions is not None
            length = int(positions.max()) + 1 if self.dynamic else 0
        if length > self.length and not self.dynamic:
            self.length = length
            self.rebuild(self.cos.device)
        cos, sin = self.cos, self.sin
        if length > self.length:
            cos, sin = self._table(length, cos.device, cos.dtype)
        if positions is None:
            return cos[:length, None], sin[:length, None]
        return cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2)

    def _table(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if device.type == "meta":
            empty = torch.empty(length, self.spec.head_width, dtype=dtype, device=device)
            return empty, empty.clone()
        # On the CPU whatever the device, so that all have the same bits.
        frequencies, scale = rope_frequencies(self.spec, length)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        cos, sin = (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
        return torch.cat((cos, cos), dim=-1).to(device), torch.cat((-sin, sin), dim=-1).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # What `fn` would do to the table shows on an empty one.
        probe = fn(torch.empty(0, dtype=self.cos.dtype, device=self.cos.device))
        self.rebuild(probe.device, torch.promote_types(probe.dtype, torch.float32))
        return self


def rope_frequencies(spec: ModelSpec, length: int) -> tuple[Tensor, float]:
    """Angle per position of each pair, float64[d/2], and the factor on cos and sin, for sequences of `length`."""
    d, theta, scaling = spec.head_width, spec.rope_theta, spec.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        theta = _dynamic_base(theta, d, length, scaling)
    frequencies = theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    if scaling is None or scaling.kind == "dynamic":
        return frequencies, 1.0
    if scaling.kind == "linear":  # Chen et al. 2023
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    factor = scaling.attention_factor
    return _yarn(frequencies, theta, scaling), 0.1 * math.log(scaling.factor) + 1 if factor is None else factor


def _dynamic_base(theta: float, d: int, length: int, scaling: RopeScaling) -> float:
    """NTK-aware scaling: beyond the trained length the base grows so that the slowest pair is interpolated."""
    assert scaling.original_max_seq is not None
    stretch = max(length, scaling.original_max_seq) / scaling.original_max_seq
    return float(theta * (scaling.factor * stretch - (scaling.factor - 1)) ** (d / (d - 2)))


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: wavelengths above original/low are stretched, those below original/high kept, a ramp between."""
    assert scaling.original_max_seq and scaling.low_freq_factor and scaling.high_freq_factor
    turns = scaling.original_max_seq * frequencies / (2 * math.pi)  # over the trained length
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)


def _yarn(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Peng et al. 2023: pairs that turn more than beta_fast times over the trained length are kept, those that
    turn less than beta_slow times stretched, and a linear ramp over the pairs' indices between, its ends rounded
    outwards to whole indices."""
    assert scaling.original_max_seq is not None
    d, original = 2 * len(frequencies), scaling.original_max_seq

    def index(turns: float) -> float:
        return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(index(scaling.beta_fast or 32.0)), 0)
    high = min(math.ceil(index(scaling.beta_slow or 1.0)), d - 1)
    ramp = (torch.arange(d // 2, dtype=torch.float64) - low) / (high - low if high != low else 0.001)
    stretch = ramp.clamp(0, 1)
    return frequencies / scaling.factor * stretch + frequencies * (1 - stretch)
