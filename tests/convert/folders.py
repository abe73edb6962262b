"""Hugging Face folders without transformers: the tensors that a config.json asks for, random."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from meshwright.convert import names
from meshwright.spec.huggingface import from_config

GPT2 = {"model_type": "gpt2", "vocab_size": 37, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 2,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}  # fmt: skip
LLAMA = {"model_type": "llama", "vocab_size": 37, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}  # fmt: skip


def weights(config: dict, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = names.parameters(from_config(config))
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def folder(where: Path, config: dict, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    where.mkdir()
    (where / "config.json").write_text(json.dumps(config))
    save_file(weights(config) if tensors is None else tensors, where / "model.safetensors", metadata={"format": "pt"})
    return where


def parted(where: Path, config: dict) -> Path:
    """The same in two files and an index."""
    where.mkdir()
    (where / "config.json").write_text(json.dumps(config))
    tensors = weights(config)
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == file}, where / file)
    (where / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return where
