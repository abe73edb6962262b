"""Runs written for other trainers: only options that exist there, with the layout's numbers, and what is otherwise."""

import json
import re
import tomllib
from typing import Any

import pytest
import yaml

from meshwright.convert.trainers import TRAINERS
from meshwright.spec.layout import Layout
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import RunSpec

DEEP = {"tp": 4, "cp": 2, "dp": 4, "pp": 2, "pp_schedule": "interleaved", "pp_chunks": 4, "sp": True, "zero": 1}


def a_run(model: str = "llama3-8b", micro: int = 2, **layout: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": PRESETS[model], "precision": "bf16", "data": {"seq_len": min(8192, PRESETS[model].max_seq)},
            "batch": {"sequences": 64, "micro": micro}, "layout": Layout(**({"dp": 8} | layout)),
        }
    )  # fmt: skip


def arguments(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}


# megatron/training/arguments.py and the config classes that it takes arguments from
MEGATRON = [
    "num-layers",
    "hidden-size",
    "ffn-hidden-size",
    "num-attention-heads",
    "group-query-attention",
    "num-query-groups",
    "kv-channels",
    "max-position-embeddings",
    "norm-epsilon",
    "untie-embeddings-and-output-weights",
    "swiglu",
    "normalization",
    "position-embedding-type",
    "rotary-base",
    "disable-bias-linear",
    "attention-dropout",
    "hidden-dropout",
    "add-qkv-bias",
    "qk-layernorm",
    "seq-length",
    "micro-batch-size",
    "global-batch-size",
    "bf16",
    "fp16",
    "accumulate-allreduce-grads-in-fp32",
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "cp-comm-type",
    "sequence-parallel",
    "num-layers-per-virtual-pipeline-stage",
    "use-tp-pp-dp-mapping",
    "overlap-grad-reduce",
    "use-distributed-optimizer",
    "overlap-param-gather",
    "num-distributed-optimizer-instances",
    "use-megatron-fsdp",
    "data-parallel-sharding-strategy",
    "no-gradient-accumulation-fusion",
    "ckpt-format",
    "recompute-granularity",
    "recompute-method",
    "recompute-num-layers",
]


def test_megatron() -> None:
    found = arguments(TRAINERS["megatron"](a_run(**DEEP, recompute="full")))
    assert {name.removeprefix("--") for name in found} <= set(MEGATRON)
    assert found["--tensor-model-parallel-size"] == "4" and found["--pipeline-model-parallel-size"] == "2"
    assert found["--context-parallel-size"] == "2" and found["--cp-comm-type"] == "p2p"
    assert found["--num-layers-per-virtual-pipeline-stage"] == "4"  # 32 layers, 8 stages
    assert "--sequence-parallel" in found and "--use-distributed-optimizer" in found
    assert found["--micro-batch-size"] == "2" and found["--global-batch-size"] == "64"
    assert found["--recompute-granularity"] == "full" and found["--num-query-groups"] == "8"


@pytest.mark.parametrize(("zero", "strategy"), [(0, None), (1, None), (2, "optim_grads"), (3, "optim_grads_params")])
def test_megatron_shards(zero: int, strategy: str | None) -> None:
    found = arguments(TRAINERS["megatron"](a_run(zero=zero)))
    assert found.get("--data-parallel-sharding-strategy") == strategy
    assert ("--use-distributed-optimizer" in found) == (zero > 0)


def test_torchtitan() -> None:
    text = TRAINERS["torchtitan"](a_run(**DEEP | {"zero": 3, "zero_shard": 4}))
    found = tomllib.loads(text)
    parallel = found["parallelism"]
    assert parallel["data_parallel_replicate_degree"] * parallel["data_parallel_shard_degree"] == 4
    assert parallel["data_parallel_replicate_degree"] == 2  # 8 data and context ranks, 4 of which shard
    assert parallel["tensor_parallel_degree"] == 4 and parallel["pipeline_parallel_degree"] == 2
    assert parallel["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert parallel["pipeline_parallel_layers_per_stage"] == 4
    assert found["training"]["local_batch_size"] == 16 and parallel["pipeline_parallel_microbatch_size"] == 2
    assert found["model"]["flavor"] == "8B"
    assert "ZeRO 1" in TRAINERS["torchtitan"](a_run(zero=1))


def test_deepspeed() -> None:
    found = json.loads(TRAINERS["deepspeed"](a_run(zero=3, zero_shard=4)))
    assert found["train_batch_size"] == 64 and found["train_micro_batch_size_per_gpu"] == 2
    assert found["gradient_accumulation_steps"] == 4  # 64 = 2 × 4 × 8 ranks
    assert found["zero_optimization"]["stage"] == 3 and found["zero_optimization"]["mics_shard_size"] == 4
    assert found["bf16"] == {"enabled": True} and found["data_types"] == {"grad_accum_dtype": "fp32"}
    notes = json.loads(TRAINERS["deepspeed"](a_run(**DEEP)))["_notes"]
    assert any("num_stages=2" in note for note in notes) and any("Ulysses" in note for note in notes)


def test_nanotron() -> None:
    text = TRAINERS["nanotron"](a_run(**DEEP))
    found = yaml.safe_load(text)
    parallel = found["parallelism"]
    assert (parallel["dp"], parallel["tp"], parallel["pp"], parallel["context_parallel_size"]) == (4, 4, 2, 2)
    assert parallel["tp_mode"] == "REDUCE_SCATTER" and parallel["pp_engine"] == "1f1b"
    assert found["tokens"]["micro_batch_size"] * found["tokens"]["batch_accumulation_per_replica"] * 4 == 64
    assert found["optimizer"]["zero_stage"] == 1
    assert "no interleaved" in text
    assert "not 3" in TRAINERS["nanotron"](a_run(zero=3))


@pytest.mark.parametrize("name", TRAINERS)
def test_what_does_not_divide_is_said(name: str) -> None:
    assert "no multiple" in TRAINERS[name](a_run(micro=3))
    assert "no multiple" not in TRAINERS[name](a_run())


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("model", ["gpt2-xl", "qwen3-8b", "llama2-7b"])
def test_every_model_can_be_written(name: str, model: str) -> None:
    text = TRAINERS[name](a_run(model, dp=8).model_copy(update={"layout": Layout(dp=8)}))
    assert re.search(r"\d", text)
