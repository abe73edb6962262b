"""From a ModelSpec to a plain model."""

from __future__ import annotations

from typing import Literal

import torch

from meshwright.model.base import LanguageModel
from meshwright.model.gpt2 import GPT2
from meshwright.model.llama import Llama
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}
"""Parameters' dtype by the run's precision."""


def build(
    spec: ModelSpec,
    *,
    attention: Literal["sdpa", "explicit"] = "sdpa",
    loss: Literal["full", "chunked"] = "full",
    dropout: Literal["counter", "torch"] = "counter",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LanguageModel:
    """The model with uninitialised parameters; `meta` holds none at all. See LanguageModel for what it computes.

    dropout: where masks come from, see dropout.py. Raises UserError for dropout of attention weights by counter with
    `sdpa`, which draws its own.
    """
    assert attention in ("sdpa", "explicit") and loss in ("full", "chunked") and dropout in ("counter", "torch")
    if spec.attn_dropout and attention == "sdpa" and dropout == "counter":
        raise UserError(
            "attention: sdpa cannot drop attention weights the same way in every layout; "
            "use attention=explicit, dropout=torch, or model.attn_dropout=0"
        )
    family = {"gpt2": GPT2, "llama": Llama}[spec.family]
    return family(spec, attention, loss, dropout, dtype=dtype, device=torch.device(device))
