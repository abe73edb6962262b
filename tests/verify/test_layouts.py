"""Layouts held against the plain model on one device in float64: every gradient, parameter, moment, byte."""

from __future__ import annotations

import functools

import pytest

from meshwright.predict.states import padded
from meshwright.predict.traffic import traffic
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec, RopeScaling
from meshwright.spec.run import Batch, Data, LrSchedule, Optimizer, RunSpec
from meshwright.verify.evidence import Evidence
from meshwright.verify.judge import judge
from meshwright.verify.reference import reference
from meshwright.verify.report import Report
from meshwright.verify.unequal import proof_data
from meshwright.verify.worker import collect
from verify.proofs import assert_proven, evidence_of_each

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
    "llama, sequences longer than its table": LLAMA.model_copy(update={"max_seq": 8}),
    "llama not causal": LLAMA.model_copy(update={"causal": False}),
    "gpt2": GPT2,
    "gpt2 untied": GPT2.model_copy(update={"tied": False}),
}


def make_run(
    model: ModelSpec,
    dp: int,
    sequences: int,
    micro: int = 2,
    layout: dict[str, object] | None = None,
    **options: object,
) -> RunSpec:
    return RunSpec(
        model=model,
        data=Data(seq_len=12),
        batch=Batch(sequences=sequences, micro=micro),
        layout=Layout(dp=dp, **{"zero_join": 0, **(layout or {})}),
        precision=options.pop("precision", "float64"),
        optimizer=Optimizer(clip=0.5),
        lr_schedule=LrSchedule(warmup=2),
        **options,
    )


def evidence(mesh, run: RunSpec, steps: int) -> Evidence:
    return collect(run, mesh, proof_data(run), steps)


def prove(ranks, run: RunSpec, steps: int = 2) -> Report:
    found = ranks.run(run.layout.world, evidence, run, steps)
    return judge(run, steps, found)


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


FAMILIES = {
    "llama": LLAMA,
    "llama tied": LLAMA.model_copy(update={"tied": True}),
    "gpt2": GPT2,
    "gpt2 untied": GPT2.model_copy(update={"tied": False}),
}
SEQUENCES = 11


@functools.cache
def expected(family: str) -> Evidence:
    """The plain model's two steps: the same for every layout and accumulation."""
    run = make_run(FAMILIES[family], dp=1, sequences=SEQUENCES)
    return reference(run, proof_data(run), 2)


def prove_families(ranks, dp: int, layout: dict[str, object], turn: int) -> None:
    """Of each family, with one micro-batch a step and with three in turn; `turn` says which begins."""
    runs = {}
    for place, family in enumerate(FAMILIES):
        micro = -(-SEQUENCES // (dp * (1, 3)[(turn + place) % 2]))
        runs[family] = make_run(FAMILIES[family], dp=dp, sequences=SEQUENCES, micro=micro, layout=layout)
    for (family, run), found in zip(runs.items(), evidence_of_each(ranks, list(runs.values())), strict=True):
        assert_proven(judge(run, 2, found, expected(family)), family, run.batch)


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_ladder(ranks, zero, dp):
    """Every stage, on ranks that divide the parameters or do not. Each stage and each number of ranks meets every
    family with one micro-batch a step and with three."""
    prove_families(ranks, dp, {"zero": zero}, zero + dp)


@pytest.mark.parametrize(
    "layout",
    [
        {"zero": 3, "zero_gather": "step"},
        {"zero": 3, "zero_ahead": 0},
        {"zero": 3, "zero_ahead": 9},
        {"zero": 1, "zero_shard": 2},
        {"zero": 2, "zero_shard": 2},
        {"zero": 3, "zero_shard": 2},
        {"zero": 3, "zero_shard": 1, "zero_gather": "step"},
    ],
    ids=str,
)
def test_options_of_the_ladder(ranks, layout):
    families = ("llama", "gpt2")
    runs = [make_run(FAMILIES[family], dp=4, sequences=SEQUENCES, micro=1, layout=layout) for family in families]
    for family, run, found in zip(families, runs, evidence_of_each(ranks, runs), strict=True):
        assert_proven(judge(run, 2, found, expected(family)), family)


# Parameters up to which units are joined; and how many units that makes, a tied weight's among them.
JOINS = {
    "all in one": (1_000_000, {"llama": 1, "llama tied": 2, "gpt2": 2, "gpt2 untied": 1}),
    "two": (4_000, {"llama": 2, "llama tied": 3, "gpt2": 3, "gpt2 untied": 2}),
}


@pytest.mark.parametrize("dp", [2, 3])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", JOINS)
def test_joined_units(ranks, name, zero, dp):
    """On ranks that divide no unit's parameters too."""
    join, units = JOINS[name]
    layout = {"zero": zero, "zero_join": join}
    for family in FAMILIES:
        run = make_run(FAMILIES[family], dp=dp, sequences=SEQUENCES, layout=layout)
        assert len(padded(run, run.layout)) == units[family]
    prove_families(ranks, dp, layout, zero + dp + (name == "two"))


@pytest.mark.parametrize("layout", [{"zero": 1, "zero_shard": 2}, {"zero": 0}], ids=str)
@pytest.mark.parametrize("precision", [{"precision": "bf16"}, {"precision": "bf16", "reduce_dtype": "bf16"}], ids=str)
def test_joined_units_in_two_precisions_and_two_groups(ranks, layout, precision):
    run = make_run(GPT2, dp=4, sequences=7, layout={**layout, "zero_join": 5_000}, **precision)
    report = prove(ranks, run)
    assert report.passed, report.findings


def joined_otherwise(mesh, run: RunSpec, join: int) -> Evidence:
    """The ranks join by another number than the one that is predicted with."""
    layout = run.layout.model_copy(update={"zero_join": join})
    return collect(run.model_copy(update={"layout": layout}), mesh, proof_data(run), 2)


@pytest.mark.parametrize(("zero", "join"), [(0, 0), (1, 0), (0, 9_000), (1, 9_000)])
def test_a_run_that_joins_otherwise_than_predicted_is_found(ranks, zero, join):
    run = make_run(LLAMA, dp=3, sequences=SEQUENCES, micro=4, layout={"zero": zero, "zero_join": 5_000})
    report = judge(run, 2, ranks.run(3, joined_otherwise, run, join), expected("llama"))
    assert not report.passed
    wrong = [check.what for check in report.traffic if check.expected != check.found]
    assert any("zero.reduce" in what and what.endswith("collectives") for what in wrong), wrong
    assert report.worst < 1e-10  # what is computed is right either way


@pytest.mark.parametrize(
    "layout",
    [
        {"recompute": "full"},
        {"recompute": "full", "recompute_every": 2, "zero": 1},
        {"recompute": "selective", "zero": 2},
        {"recompute": "selective", "recompute_keep": ("attention",), "zero": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recompute(ranks, layout, family):
    """Traffic as without, and activations to the byte."""
    run = make_run(FAMILIES[family], dp=2, sequences=SEQUENCES, micro=3, layout=layout)
    report = judge(run, 2, ranks.run(2, evidence, run, 2), expected(family))
    assert_proven(report)
    assert all(check.expected == check.found > 0 for check in report.activations)


@pytest.mark.parametrize("dp", [5, 7])
def test_shards_that_divide_nothing(ranks, dp):
    runs = [make_run(LLAMA, dp=dp, sequences=SEQUENCES, micro=1, layout={"zero": zero}) for zero in (1, 2, 3)]
    for run, found in zip(runs, evidence_of_each(ranks, runs), strict=True):
        assert_proven(judge(run, 2, found, expected("llama")), run.layout.zero)


def test_ranks_without_a_sequence_on_the_ladder(ranks):
    runs = [make_run(LLAMA, dp=4, sequences=2, micro=1, layout={"zero": zero}) for zero in (1, 2, 3)]
    for run, found in zip(runs, evidence_of_each(ranks, runs), strict=True):
        assert_proven(judge(run, 2, found), run.layout.zero)


@pytest.mark.parametrize(
    "precision",
    [
        {"precision": "fp32"},
        {"precision": "fp32", "reduce_dtype": "bf16"},
        {"precision": "bf16"},
        {"precision": "bf16", "reduce_dtype": "bf16"},
        {"precision": "bf16", "grad_dtype": "bf16"},
        {"precision": "bf16", "attention": "explicit"},
        {"precision": "fp16", "attention": "explicit"},
        {"precision": "fp16"},
        {"precision": "fp16", "grad_dtype": "fp16", "reduce_dtype": "fp32"},
    ],
    ids=str,
)
def test_precisions(ranks, precision):
    """At every stage within the stated bounds of float64, and not of it; traffic and states exact."""
    runs = [make_run(GPT2, dp=2, sequences=7, layout={"zero": zero}, **precision) for zero in range(4)]
    for run, found in zip(runs, evidence_of_each(ranks, runs), strict=True):
        report = judge(run, 2, found)
        assert report.passed, (run.layout.zero, report.findings)
        assert report.worst > 1e-10, run.layout.zero


@pytest.mark.parametrize(
    "precision", [{"grad_dtype": "bf16", "reduce_dtype": "fp32"}, {"reduce_dtype": "bf16"}], ids=str
)
def test_hybrid_sharding_reduces_in_its_dtype_across_groups_too(ranks, precision):
    layouts = [{"zero": zero, "zero_shard": 2} for zero in (1, 2, 3)]
    runs = [make_run(GPT2, dp=4, sequences=7, layout=layout, precision="bf16", **precision) for layout in layouts]
    for run, found in zip(runs, evidence_of_each(ranks, runs), strict=True):
        report = judge(run, 2, found)
        assert report.passed, (run.layout.zero, report.findings)
        size = {"fp32": 4, "bf16": 2}[run.reduce_dtype]
        (row,) = (row for row in traffic(run, run.layout) if row.key.reason == "zero.replicas")
        assert row.payload == size * sum(n // 2 for n in padded(run, run.layout).values())


DROPPING = GPT2.model_copy(update={"embd_dropout": 0.2, "attn_dropout": 0.1, "resid_dropout": 0.3})


def test_dropout_does_not_know_the_layout(ranks):
    assert_proven(prove(ranks, make_run(DROPPING, dp=3, sequences=7, attention="explicit")))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_dropout_in_two_bytes_is_that_of_the_reference(ranks, precision):
    report = prove(ranks, make_run(DROPPING, dp=2, sequences=7, attention="explicit", precision=precision))
    assert report.passed, report.findings


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
