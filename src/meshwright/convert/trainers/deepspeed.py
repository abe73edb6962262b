"""DeepSpeed: its JSON config (deepspeed.ai/docs/config-json). Pipeline stages are code there, and no option.

JSON has no comments, and DeepSpeed leaves out keys that it does not know, so notes stand under "_notes".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from meshwright.convert.trainers.notes import micro_batches, uneven
from meshwright.spec.run import RunSpec


def written(run: RunSpec) -> str:
    """The config of a run whose layout is resolved."""
    notes = list(_notes(run))
    return json.dumps(({"_notes": notes} if notes else {}) | _config(run), indent=2) + "\n"


def _config(run: RunSpec) -> dict[str, Any]:
    layout = run.layout
    found: dict[str, Any] = {
        "train_batch_size": run.batch.sequences,
        "train_micro_batch_size_per_gpu": run.batch.micro,
        "gradient_accumulation_steps": micro_batches(run),
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": run.optimizer.lr,
                "betas": list(run.optimizer.betas),
                "eps": run.optimizer.eps,
                "weight_decay": run.optimizer.weight_decay,
            },
        },
        "zero_optimization": _zero(run),
    }
    if run.optimizer.clip is not None:
        found["gradient_clipping"] = run.optimizer.clip
    if run.precision in ("bf16", "fp16"):
        found[run.precision] = {"enabled": True}
    if run.precision == "bf16":
        found["data_types"] = {"grad_accum_dtype": "fp32" if run.grad_dtype == "auto" else run.grad_dtype}
    if layout.tp > 1:
        found["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.recompute != "none":
        found["activation_checkpointing"] = {"partition_activations": layout.tp > 1 and layout.sp}
    return found


def _zero(run: RunSpec) -> dict[str, Any]:
    layout = run.layout
    found: dict[str, Any] = {"stage": layout.zero}
    if layout.zero:
        found |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
    if layout.zero == 3 and layout.zero_shard is not None:
        found["mics_shard_size"] = layout.zero_shard
    return found


def _notes(run: RunSpec) -> Iterator[str]:
    layout = run.layout
    yield from uneven(run)
    yield f"launch {layout.world} processes; data parallel ranks are what the others leave: {layout.data_ranks}"
    if layout.pp > 1:
        yield f"pipeline: build the model as PipelineModule(layers, num_stages={layout.pp}); its schedule is 1F1B"
        if layout.zero >= 2:
            yield f"DeepSpeed's pipeline goes with ZeRO 0 or 1, not {layout.zero}"
        if layout.pp_schedule != "1f1b":
            yield f"no {layout.pp_schedule} schedule there"
    if layout.cp > 1:
        yield f"sequence parallel ranks ({layout.cp}) are given in code, to DistributedAttention: Ulysses"
    if layout.recompute != "none":
        yield "which layers are computed again is said by the model's own checkpointing"
    if layout.zero_shard is not None and layout.zero < 3:
        yield f"zero_shard={layout.zero_shard}: sharding within a group is for stage 3 there"
