"""Initial weights as a function of (seed, name, element index) alone.

Any range of any tensor can be filled without making the rest, so every layout of a run starts from the same bits.

A normal value is a sum of 12 uniform 16-bit integers, shifted and scaled to mean 0 and variance 1 (Irwin–Hall with
n = 12): bounded by ±6 standard deviations, skewness 0, excess kurtosis −0.1, steps of 2⁻¹⁶ standard deviations.
The sum is integer arithmetic and the scaling one float64 multiplication, so there is no transcendental function
whose vectorised and scalar forms, or CPU and GPU forms, could round differently. The uniforms are the 16-bit
quarters of three outputs of SplitMix64 (Steele, Lea and Flood 2014), a counter-based generator: its output `j`
is a mixing function of `key + j · golden`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

STD = 0.02  # of GPT-2 (Radford et al. 2019) and of the published Llama configurations


@dataclass(frozen=True, slots=True)
class Init:
    """How one tensor starts: normal with mean 0 and `std`, all ones, or all zeros."""

    kind: Literal["normal", "ones", "zeros"]
    std: float = 0.0


def residual_std(layers: int) -> float:
    """Standard deviation for projections into the residual stream, which adds up 2 of them a block (GPT-2)."""
    return STD / math.sqrt(2 * layers)


def initial(model: nn.Module) -> dict[str, Init]:
    """The start of every parameter of a plain model by public name, in the model's order; a tied one appears once.

    Each layer of meshwright.model.layers says how its own parameters start.
    """
    inits: dict[str, Init] = {}
    for prefix, module in model.named_modules():
        if hasattr(module, "inits"):
            inits |= {f"{prefix}.{name}": init for name, init in module.inits().items()}
    return {name: inits[name] for name, _ in model.named_parameters()}


@torch.no_grad()
def initialise_(model: nn.Module, seed: int) -> None:
    """Fill every parameter of a plain model in place."""
    inits = initial(model)
    for name, parameter in model.named_parameters():
        assert parameter.is_contiguous()
        fill_(parameter.view(-1), inits[name], seed=seed, name=name, start=0)


@torch.no_grad()
def fill_(flat: Tensor, init: Init, *, seed: int, name: str, start: int) -> None:
    """Fill `flat` (1-dim, any floating dtype, any device) with elements [start, start + numel) of tensor `name`.

    Elements are counted in C order of the whole tensor. Values are computed in float64, then rounded to the dtype.
    """
    assert flat.dim() == 1 and start >= 0
    fill_rows_(flat.view(1, -1), init, seed=seed, name=name, start=start, stride=0)


@torch.no_grad()
def fill_rows_(rows: Tensor, init: Init, *, seed: int, name: str, start: int, stride: int) -> None:
    """The same for `rows` [r, n] of any strides: row i has elements [start + i · stride, start + i · stride + n)."""
    if init.kind != "normal":
        rows.fill_(1.0 if init.kind == "ones" else 0.0)
        return
    key = _key(seed, name)
    scale = init.std / math.sqrt(2**32 - 1)  # 12 uniforms on 0..65535 have variance 12 · (2³² − 1)/12
    # Temporaries of a chunk stay in a CPU's cache; an accelerator wants larger ones.
    chunk = 1 << 15 if rows.device.type == "cpu" else 1 << 24
    width = max(min(rows.size(1), chunk), 1)
    height = chunk // width
    for top in range(0, rows.size(0), height):
        for left in range(0, rows.size(1), width):
            part = rows[top : top + height, left : left + width]
            below = torch.arange(part.size(0), device=rows.device)[:, None] * stride
            elements = torch.arange(part.size(1), device=rows.device) + below + (start + top * stride + left)
            total = _sum_of_12(key, elements)
            part.copy_(total.sub_(12 * 65535 // 2).to(torch.float64).mul_(scale))


def _key(seed: int, name: str) -> int:
    """64 bits that tell the stream of one tensor under one seed from any other."""
    return signed(int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little"))


def _sum_of_12(key: int, elements: Tensor) -> Tensor:
    """For each of `elements` (int64, overwritten) the sum of its 12 uniforms on 0..65535; int64 of their shape.

    Element `e` uses outputs 3e + 1 to 3e + 3 of the stream. Integers wrap around modulo 2⁶⁴ as SplitMix64 wants.
    """
    state = elements.mul_(signed(3 * GOLDEN)).add_(key)
    lanes = None  # two sums side by side, in the lower and the upper 32 bits
    for _ in range(3):
        word = mix64_(state.add_(signed(GOLDEN)).clone())
        quarters = (word & _EVEN_QUARTERS).add_(word.bitwise_right_shift_(16).bitwise_and_(_EVEN_QUARTERS))
        lanes = quarters if lanes is None else lanes.add_(quarters)
    assert lanes is not None
    return (lanes & 0xFFFFFFFF).add_(lanes.bitwise_right_shift_(32))


GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ / golden ratio, odd: SplitMix64's step
_EVEN_QUARTERS = 0x0000FFFF0000FFFF


def signed(word: int) -> int:
    """The same 64 bits read as two's complement, the only 64-bit integers torch computes with."""
    word &= 2**64 - 1
    return word - 2**64 if word >= 2**63 else word


def mix64_(z: Tensor) -> Tensor:
    """SplitMix64's mixing function, in place on int64."""
    _xorshift_(z, 30).mul_(signed(0xBF58476D1CE4E5B9))
    _xorshift_(z, 27).mul_(signed(0x94D049BB133111EB))
    return _xorshift_(z, 31)


def _xorshift_(z: Tensor, bits: int) -> Tensor:
    # torch shifts arithmetically: mask off the copies of the sign bit.
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))
