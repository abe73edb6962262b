"""nanotron: a YAML config (src/nanotron/config/config.py, parallelism_config.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from meshwright.convert.trainers.notes import commented, micro_batches, uneven
from meshwright.spec.layout import AXES
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import RunSpec

ENGINES = {"1f1b": "1f1b", "gpipe": "afab", "naive": "afab", "interleaved": "1f1b"}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "float64": "float64"}


def written(run: RunSpec) -> str:
    """The sections of a config that a run with a resolved layout says something of."""
    layout = run.layout
    config: dict[str, Any] = {
        "model": {"dtype": DTYPES[run.precision], "model_config": _model(run.model)},
        "tokens": {
            "sequence_length": run.data.seq_len,
            "micro_batch_size": run.batch.micro,
            "batch_accumulation_per_replica": micro_batches(run),
            "train_steps": run.steps,
        },
        "optimizer": {
            "zero_stage": min(layout.zero, 1),
            "accumulate_grad_in_fp32": run.grad_dtype == "auto",
            "clip_grad": run.optimizer.clip,
            "weight_decay": run.optimizer.weight_decay,
        },
        "parallelism": {
            "dp": layout.data_ranks,
            "tp": layout.tp,
            "pp": layout.pp,
            "context_parallel_size": layout.cp,
            "expert_parallel_size": 1,
            "pp_engine": ENGINES.get(layout.pp_schedule, "1f1b"),
            "tp_mode": "REDUCE_SCATTER" if layout.sp else "ALL_REDUCE",
            "tp_linear_async_communication": layout.sp,
            "recompute_layer": layout.recompute == "full",
        },
    }
    return commented(_notes(run)) + yaml.safe_dump(config, sort_keys=False)


def _model(spec: ModelSpec) -> dict[str, Any]:
    return {
        "is_llama_config": True,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn_width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.max_seq,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.is_tied,
        "vocab_size": spec.vocab,
    }


def _notes(run: RunSpec) -> Iterator[str]:
    layout = run.layout
    yield from uneven(run)
    if run.model.family != "llama":
        yield "nanotron's model is a Llama: GPT-2's sizes are written into it"
    if layout.zero > 1:
        yield f"nanotron has ZeRO 0 and 1, not {layout.zero}: gradients and parameters stay whole"
    if layout.pp_chunks > 1:
        yield "nanotron has no interleaved schedule: 1F1B of one stage a rank is written"
    if layout.cp > 1 and layout.cp_method != "ring":
        yield f"nanotron's context parallelism is a ring, not {layout.cp_method}"
    if layout.recompute == "selective":
        yield "nanotron computes whole layers again or nothing: nothing is written, which holds more"
    if layout.order != AXES:
        yield "nanotron lays its ranks in an order of its own"
