"""torchtitan: a TOML file of its job config (torchtitan/config/job_config.py)."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.convert.trainers.notes import commented, micro_batches, uneven
from meshwright.spec.layout import AXES
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import RunSpec

FLAVORS = {"llama3-8b": "8B", "llama3-70b": "70B", "llama3-405b": "405B"}
SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "naive": "GPipe"}
RECOMPUTE = {"none": "none", "full": "full", "selective": "selective"}


def written(run: RunSpec) -> str:
    """The file of a run whose layout is resolved."""
    sections = {
        "model": _model(run),
        "training": _training(run),
        "parallelism": _parallelism(run),
        "activation_checkpoint": _recompute(run),
    }
    text = "\n".join(f"[{name}]\n" + "".join(f"{line}\n" for line in lines) for name, lines in sections.items())
    return commented(_notes(run)) + text


def _flavor(run: RunSpec) -> str | None:
    return next((flavor for name, flavor in FLAVORS.items() if PRESETS[name] == run.model), None)


def _model(run: RunSpec) -> Iterator[str]:
    yield 'name = "llama3"'
    yield f'flavor = "{_flavor(run) or "debugmodel"}"'


def _training(run: RunSpec) -> Iterator[str]:
    layout = run.layout
    local = run.batch.micro if layout.pp == 1 else run.batch.micro * micro_batches(run)
    yield f"local_batch_size = {local}"
    yield f"global_batch_size = {run.batch.sequences}"
    yield f"seq_len = {run.data.seq_len}"
    yield f'mixed_precision_param = "{"bfloat16" if run.precision == "bf16" else "float32"}"'
    yield 'mixed_precision_reduce = "float32"'


def _parallelism(run: RunSpec) -> Iterator[str]:
    layout = run.layout
    replicas = layout.data_ranks if layout.zero == 0 else 1
    if layout.zero and layout.zero_shard is not None:
        replicas = layout.state_ranks // layout.zero_shard
    replicas = min(replicas, layout.data_ranks)
    yield f"data_parallel_replicate_degree = {replicas}"
    yield f"data_parallel_shard_degree = {layout.data_ranks // replicas}"
    if layout.zero:
        yield f'fsdp_reshard_after_forward = "{"always" if layout.zero == 3 else "never"}"'
    yield f"tensor_parallel_degree = {layout.tp}"
    yield f"context_parallel_degree = {layout.cp}"
    if layout.cp > 1:
        yield f'context_parallel_rotate_method = "{"allgather" if layout.cp_method == "gather" else "alltoall"}"'
    yield f"pipeline_parallel_degree = {layout.pp}"
    if layout.pp > 1:
        yield f'pipeline_parallel_schedule = "{SCHEDULES.get(layout.pp_schedule, "1F1B")}"'
        yield f"pipeline_parallel_layers_per_stage = {-(-run.model.layers // layout.stages)}"
        yield f"pipeline_parallel_microbatch_size = {run.batch.micro}"


def _recompute(run: RunSpec) -> Iterator[str]:
    yield f'mode = "{RECOMPUTE[run.layout.recompute]}"'
    if run.layout.recompute == "selective":
        yield 'selective_ac_option = "op"'


def _notes(run: RunSpec) -> Iterator[str]:
    layout = run.layout
    yield from uneven(run)
    if _flavor(run) is None:
        yield "torchtitan has no flavor of this model: add one to its llama3 args, and name it below"
    if layout.zero in (1, 2):
        yield f"torchtitan has no ZeRO {layout.zero}: FSDP that keeps parameters after forward is nearest"
    if layout.tp > 1 and not layout.sp:
        yield "torchtitan's tensor parallelism is always with sequence parallelism"
    if layout.cp > 1 and layout.cp_method not in ("gather", "ring"):
        yield f"torchtitan's context parallelism is a ring or gathers; {layout.cp_method} is not there"
    if layout.order != AXES:
        yield "torchtitan lays pipeline ranks outermost"
    if run.precision == "fp16":
        yield "torchtitan trains in bfloat16 or float32"
