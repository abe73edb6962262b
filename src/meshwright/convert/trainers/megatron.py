"""Megatron-LM: arguments of pretrain_gpt.py (megatron/training/arguments.py), one a line."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.convert.trainers.notes import commented, uneven
from meshwright.spec.layout import AXES
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import RunSpec

METHODS = {"ring": "p2p", "ulysses": "a2a", "gather": "allgather", "usp": "a2a+p2p", "rsa": "p2p"}
"""--cp-comm-type by cp_method."""
SHARDED = {2: "optim_grads", 3: "optim_grads_params"}
"""--data-parallel-sharding-strategy by ZeRO stage; 1 is the distributed optimizer."""


def written(run: RunSpec) -> str:
    """The arguments of a run whose layout is resolved."""
    lines = [*_model(run.model), *_batch(run), *_layout(run)]
    return commented(_notes(run)) + "\n".join(lines) + "\n"


def _model(spec: ModelSpec) -> Iterator[str]:
    yield f"--num-layers {spec.layers}"
    yield f"--hidden-size {spec.hidden}"
    yield f"--ffn-hidden-size {spec.ffn_width}"
    yield f"--num-attention-heads {spec.heads}"
    yield f"--max-position-embeddings {spec.max_seq}"
    yield f"--norm-epsilon {spec.norm_eps:g}"
    if spec.num_kv_heads != spec.heads:
        yield "--group-query-attention"
        yield f"--num-query-groups {spec.num_kv_heads}"
    if spec.head_width * spec.heads != spec.hidden:
        yield f"--kv-channels {spec.head_width}"
    if not spec.is_tied:
        yield "--untie-embeddings-and-output-weights"
    if spec.family == "gpt2":
        yield f"--attention-dropout {spec.attn_dropout:g}"
        yield f"--hidden-dropout {spec.resid_dropout:g}"
        return
    yield "--swiglu"
    yield "--normalization RMSNorm"
    yield "--position-embedding-type rope"
    yield f"--rotary-base {spec.rope_theta:.0f}"
    yield "--disable-bias-linear"
    yield "--attention-dropout 0"
    yield "--hidden-dropout 0"
    if spec.qkv_bias:
        yield "--add-qkv-bias"
    if spec.qk_norm:
        yield "--qk-layernorm"


def _batch(run: RunSpec) -> Iterator[str]:
    yield f"--seq-length {run.data.seq_len}"
    yield f"--micro-batch-size {run.batch.micro}"
    yield f"--global-batch-size {run.batch.sequences}"
    if run.precision in ("bf16", "fp16"):
        yield f"--{run.precision}"
    if run.grad_dtype == "auto" and run.precision == "bf16":
        yield "--accumulate-allreduce-grads-in-fp32"


def _layout(run: RunSpec) -> Iterator[str]:
    layout = run.layout
    yield f"--tensor-model-parallel-size {layout.tp}"
    yield f"--pipeline-model-parallel-size {layout.pp}"
    if layout.cp > 1:
        yield f"--context-parallel-size {layout.cp}"
        yield f"--cp-comm-type {METHODS[layout.cp_method]}"
    if layout.sp:
        yield "--sequence-parallel"
    if layout.pp_chunks > 1:
        yield f"--num-layers-per-virtual-pipeline-stage {max(run.model.layers // layout.stages, 1)}"
    if layout.order == ("tp", "cp", "pp", "dp"):
        yield "--use-tp-pp-dp-mapping"
    yield from _sharding(run)
    if layout.recompute == "full":
        yield "--recompute-granularity full"
        yield "--recompute-method uniform"
        yield f"--recompute-num-layers {layout.region(run.model.layers)}"
    elif layout.recompute == "selective":
        yield "--recompute-granularity selective"


def _sharding(run: RunSpec) -> Iterator[str]:
    layout = run.layout
    yield "--overlap-grad-reduce"
    if layout.zero:
        yield "--use-distributed-optimizer"
        yield "--overlap-param-gather"
        if layout.zero_shard is not None and layout.zero_shard < layout.state_ranks:
            yield f"--num-distributed-optimizer-instances {layout.state_ranks // layout.zero_shard}"
    if layout.zero in SHARDED:
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {SHARDED[layout.zero]}"
        yield "--no-gradient-accumulation-fusion"
        yield "--ckpt-format fsdp_dtensor"


def _notes(run: RunSpec) -> Iterator[str]:
    layout = run.layout
    yield from uneven(run)
    if layout.pp > 1 and run.model.layers % layout.stages:
        yield f"{run.model.layers} layers over {layout.stages} stages: Megatron-LM wants as many in each"
    if layout.pp_schedule in ("gpipe", "naive"):
        yield f"Megatron-LM has 1F1B, interleaved or not, and no {layout.pp_schedule}"
    if layout.cp > 1 and layout.cp_method in ("rsa", "usp"):
        yield f"cp_method={layout.cp_method} is not the same there"
    if layout.recompute == "selective":
        yield "selective there computes attention's core again, and keeps all else (--recompute-modules says more)"
    if layout.order not in (AXES, ("tp", "cp", "pp", "dp")):
        yield f"ranks lie in the order {', '.join(layout.order)}, which Megatron-LM does not have"
    if run.model.family == "gpt2" and run.model.is_tied is False:
        yield "GPT-2 with a head of its own"
