"""Training on one device: whether all of a model can be trained there, and what adapters beside frozen weights take.

LoRA (Hu et al. 2021, arXiv 2106.09685) freezes the model and trains two thin matrices beside each product: only those
have gradients and moments, so what is left are the weights in 16 bits, 13.5 GB for 7 billion. QLoRA (Dettmers et al.
2023, arXiv 2305.14314) keeps the products' weights in 4-bit NormalFloat, with a scale of 8 bits for each 64 of them and
a float32 for each 256 scales: 4.127 bits a weight; a product widens its own for as long as it lasts.

Activations are those of training the whole model with blocks computed again, one sequence at once: a frozen weight
needs no gradient, but what is saved for the adapters' is of the same size. So these figures are near, not exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.predict.memory import memory
from meshwright.predict.params import TensorSpec, count, tensors
from meshwright.predict.states import STATES, gradient_bytes, master_bytes
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import RunSpec

RANK = 16
SCALES = 8 / 64 + 32 / (64 * 256)
"""Bits a weight that QLoRA's scales take: a byte for each 64 weights, a float32 for each 256 of these."""


@dataclass(frozen=True)
class Adapter:
    """Training adapters on one device. Bytes of frozen weights, of the adapters with their gradients and moments, and
    of activations and all else at the fullest moment."""

    bits: int
    rank: int
    trained: int
    base: int
    states: int
    activations: int

    @property
    def total(self) -> int:
        return self.base + self.states + self.activations


def adapter(run: RunSpec, bits: Literal[4, 16], rank: int = RANK) -> Adapter:
    """Adapters of `rank` beside all products of the blocks of `run`'s model, whose weights are kept in so many bits."""
    run = run.model_copy(update={"precision": "bf16", "grad_dtype": "auto"})
    trained = adapter_parameters(run.model, rank)
    products = sum(each.numel for each in _products(run.model))
    base = 2 * count(run.model)
    widened = 0
    if bits == 4:
        base = round(2 * (count(run.model) - products) + products * (4 + SCALES) / 8)
        widened = 2 * max(each.numel for each in _products(run.model))
    states = trained * (2 + gradient_bytes(run) + 3 * master_bytes(run))
    layout = Layout(dp=1, recompute="full")
    batch = run.batch.model_copy(update={"sequences": 1, "micro": 1})
    held = memory(run.model_copy(update={"layout": layout, "batch": batch}), layout, 0, "cuda")
    beside = sum(size for name, size in held.categories.items() if name not in STATES)
    return Adapter(bits, rank, trained, base, states, beside + widened)


def adapter_parameters(spec: ModelSpec, rank: int) -> int:
    """Elements of two matrices beside each product of the blocks: from its inputs to `rank`, and on to its outputs."""
    return sum(rank * sum(each.shape) for each in _products(spec))


def _products(spec: ModelSpec) -> list[TensorSpec]:
    return [each for each in tensors(spec) if each.block is not None and len(each.shape) == 2]
