"""Hugging Face folders with small random models, made by transformers; and what several ranks save of them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from meshwright.spec.run import RunSpec
from meshwright.train import checkpoint, state
from meshwright.train.trainer import Trainer
from meshwright.verify.unequal import UnequalData

_LLAMA = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
CONFIGS = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 97, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 4},
    "llama": _LLAMA | {
        "model_type": "llama", "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2": _LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": _LLAMA | {
        "model_type": "qwen3", "head_dim": 12, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
        },
    },
    "mistral": _LLAMA | {"model_type": "mistral", "sliding_window": 7},
}  # fmt: skip


def make(folder: Path, config: dict, dtype: torch.dtype = torch.float32, **options: object) -> torch.nn.Module:
    """A model with random weights, nothing near its neutral value, saved in `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, **ids)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.08 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, **options)
    return model


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All that the safetensors library finds in `folder`."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def settings(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def step_from(mesh, run: RunSpec, out: Path) -> None:
    """On each rank: go on from the imported checkpoint by one step, and save that."""
    trainer = Trainer(run, mesh)
    start = out / "checkpoints" / "step-00000000"
    found = checkpoint.manifest_of(start)
    state.check_fits(trainer, found)
    checkpoint.read(start, state.held_parts(trainer), found)
    state.restored(trainer, found.meta)
    data = UnequalData(run.model.vocab, run.data.seq_len, run.seed)
    trainer.update(0, trainer.accumulate(data, 0))
    trainer.sharded.settle()
    saver = checkpoint.Saver(out / "checkpoints", mesh, state.saved_parts(trainer), keep=2, background=False)
    saver.save(1, state.meta(trainer, 1, state.Counts()))
    saved = saver.wait()
    assert saved.error is None, saved.error
