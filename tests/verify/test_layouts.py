"""Layouts held against the plain model on one device in float64: every gradient, parameter, moment, byte."""

from __future__ import annotations

import pytest

from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec, RopeScaling
from meshwright.spec.run import Batch, Data, LrSchedule, Optimizer, RunSpec
from meshwright.verify.evidence import Evidence
from meshwright.verify.judge import judge
from meshwright.verify.reference import reference
from meshwright.verify.report import Report
from meshwright.verify.unequal import proof_data
from meshwright.verify.worker import collect

LLAMA = ModelSpec(family="llama", vocab=37, hidden=24, layers=2, heads=4, kv_heads=2, ffn=40, max_seq=32)
GPT2 = ModelSpec(family="gpt2", vocab=37, hidden=24, layers=2, heads=4, max_seq=32)
MODELS = {
    "llama": LLAMA,
    "llama tied, q/k norm, biases": LLAMA.model_copy(
        update={"tied": True, "qk_norm": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
    ),
    "llama window, rope scaling": LLAMA.model_copy(
        update={"window": 5, "rope_scaling": RopeScaling(kind="linear", factor=2.0)}
    ),
    "llama not causal": LLAMA.model_copy(update={"causal": False}),
    "gpt2": GPT2,
    "gpt2 untied": GPT2.model_copy(update={"tied": False}),
}


def make_run(model: ModelSpec, dp: int, sequences: int, micro: int = 2, **options: object) -> RunSpec:
    return RunSpec(
        model=model,
        data=Data(seq_len=12),
        batch=Batch(sequences=sequences, micro=micro),
        layout=Layout(dp=dp),
        precision="float64",
        optimizer=Optimizer(clip=0.5),
        lr_schedule=LrSchedule(warmup=2),
        **options,
    )


def evidence(mesh, run: RunSpec, steps: int) -> Evidence:
    return collect(run, mesh, proof_data(run), steps)


def prove(ranks, run: RunSpec, steps: int = 2) -> Report:
    found = ranks.run(run.layout.world, evidence, run, steps)
    return judge(run, steps, found, reference(run, proof_data(run), steps))


def assert_proven(report: Report) -> None:
    assert report.passed, report.findings
    assert report.worst < 1e-10
    assert all(check.expected == check.found for check in (*report.traffic, *report.states))


@pytest.mark.parametrize("name", MODELS)
def test_models(ranks, name):
    assert_proven(prove(ranks, make_run(MODELS[name], dp=2, sequences=7)))


@pytest.mark.parametrize("dp", [1, 3, 4, 5, 7])
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_ranks_that_divide_nothing(ranks, model, dp):
    """11 sequences over dp ranks in micro-batches of 2: parts differ, and at dp = 7 some micro-batches are empty."""
    assert_proven(prove(ranks, make_run(model, dp=dp, sequences=11)))


def test_ranks_without_a_sequence(ranks):
    """Two sequences on four ranks: two ranks compute nothing, and take part in every reduction."""
    assert_proven(prove(ranks, make_run(LLAMA, dp=4, sequences=2, micro=1)))


@pytest.mark.parametrize("sequences", [4, 12])
def test_accumulation(ranks, sequences):
    """One and three micro-batches a step."""
    assert_proven(prove(ranks, make_run(GPT2, dp=2, sequences=sequences)))


def test_dropout_does_not_know_the_layout(ranks):
    model = GPT2.model_copy(update={"embd_dropout": 0.2, "attn_dropout": 0.1, "resid_dropout": 0.3})
    assert_proven(prove(ranks, make_run(model, dp=3, sequences=7, attention="explicit")))


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_ways_to_compute(ranks, attention, loss):
    assert_proven(prove(ranks, make_run(LLAMA, dp=2, sequences=5, attention=attention, loss=loss)))


def test_no_clipping(ranks):
    run = make_run(LLAMA, dp=2, sequences=5)
    run = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"clip": None})})
    assert_proven(prove(ranks, run))


def test_clipping_is_active_in_these_proofs(ranks):
    run = make_run(LLAMA, dp=1, sequences=5)
    assert min(reference(run, proof_data(run), 2).norms) > 0.5


def test_fp32_is_within_its_bound_and_not_exact(ranks):
    run = make_run(GPT2, dp=2, sequences=7)
    run = run.model_copy(update={"precision": "fp32"})
    report = prove(ranks, run)
    assert report.passed, report.findings
    assert report.worst > 1e-10
