"""The most bytes a rank holds at once, measured over its second step, against what is predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.predict.memory import memory
from meshwright.predict.peak import moments
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Checkpoint, Data, RunSpec
from meshwright.train.trainer import Trainer
from meshwright.verify.peak import MADE, Peak, Watch, peak
from meshwright.verify.unequal import proof_data

DEEP = ModelSpec(family="llama", vocab=256, hidden=96, layers=6, heads=4, kv_heads=2, ffn=256, max_seq=64)
WIDE = DEEP.model_copy(update={"vocab": 6000, "hidden": 64})  # a head larger than several blocks
GPT2 = ModelSpec(family="gpt2", vocab=300, hidden=64, layers=4, heads=4, max_seq=64)
HEADS = ModelSpec(family="llama", vocab=16, hidden=32, layers=1, heads=8, kv_heads=8, ffn=128, max_seq=64)


def run_of(model: ModelSpec, ranks: int, accumulate: int = 1, micro: int = 1, **options: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": model,
            "data": Data(seq_len=32),
            "batch": Batch(sequences=ranks * micro * accumulate, micro=micro),
            "layout": Layout(dp=ranks, zero_join=0),
            "device": "cpu",
            "checkpoint": Checkpoint(every=0),  # nothing is saved here, so no copy is held
            **options,
        }
    )


def peaks(mesh: Mesh, run: RunSpec, layouts: list[Layout]) -> list[Peak]:
    found = []
    for layout in layouts:
        laid_out = run.model_copy(update={"layout": layout})
        fresh = Mesh.create(layout, device=mesh.device, timeout=20)  # with scratch of its own
        trainer, data = Trainer(laid_out, fresh), proof_data(laid_out)

        def step(trainer: Trainer = trainer, data: Any = data) -> None:
            trainer.update(1, trainer.accumulate(data, 0))

        step()
        found.append(peak(trainer, step))
        trainer.sharded.settle()
    return found


def compared(ranks: Any, run: RunSpec, layouts: list[Layout]) -> list[tuple[int, Peak]]:
    """Predicted and found on rank 0, for each layout; every rank within 5% of its own prediction."""
    world = layouts[0].world
    pairs = []
    for rank, found in enumerate(ranks.run(world, peaks, run, layouts)):
        for layout, one in zip(layouts, found, strict=True):
            foretold = memory(run.model_copy(update={"layout": layout}), layout, rank)
            assert one.total == pytest.approx(foretold.total, rel=0.05), (layout, rank, foretold, one)
            if rank == 0:
                pairs.append((foretold.total, one))
    return pairs


STAGES = {
    "deep": (2, run_of(DEEP, 2)),
    "deep, accumulation": (2, run_of(DEEP, 2, accumulate=2)),
    "deep, bf16": (2, run_of(DEEP, 2, precision="bf16")),
    "deep, bf16, accumulation": (2, run_of(DEEP, 2, accumulate=2, precision="bf16")),
    "deep, four ranks": (4, run_of(DEEP, 4, accumulate=2)),
    "large vocabulary": (2, run_of(WIDE, 2)),
    "large vocabulary, bf16, accumulation": (2, run_of(WIDE, 2, accumulate=2, precision="bf16")),
    "tied": (2, run_of(GPT2.model_copy(update={"layers": 6}), 2)),
}


@pytest.mark.parametrize("name", STAGES)
def test_each_stage_holds_less_than_the_one_before_and_what_is_predicted(ranks, name):
    world, run = STAGES[name]
    pairs = compared(ranks, run, [Layout(dp=world, zero=stage, zero_join=0) for stage in range(4)])
    for of in (lambda pair: pair[0], lambda pair: pair[1].total):
        zero, one, two, three = map(of, pairs)
        assert three < two < one < zero
    if name == "deep":  # of its step all but an index or a statistic is named
        for foretold, found in pairs:
            assert found.total == pytest.approx(foretold, rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "chunked"},
        {"loss": "chunked", "precision": "bf16", "grad_dtype": "bf16"},
        {"attention": "explicit"},
        {"attention": "explicit", "precision": "bf16", "reduce_dtype": "bf16"},
    ],
    ids=lambda options: ", ".join(options.values()),
)
@pytest.mark.parametrize("model", [WIDE, GPT2], ids=["llama", "gpt2"])
def test_ways_to_compute(ranks, model, options):
    """With enough tokens that activations count."""
    run = run_of(model, 2, micro=6, **options)
    compared(ranks, run, [Layout(dp=2, zero=stage, zero_join=0) for stage in (0, 1, 3)])


DROPPING = [{"attention": "explicit"}, {"attention": "explicit", "dropout": "torch"}, {"dropout": "torch"}]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", DROPPING, ids=str)
def test_dropout(ranks, options, precision):
    model = GPT2.model_copy(update={"embd_dropout": 0.1, "attn_dropout": 0.1, "resid_dropout": 0.1})
    run = run_of(model, 2, micro=6, precision=precision, **options)
    compared(ranks, run, [Layout(dp=2, zero=stage) for stage in (0, 3)])


def test_ways_to_shard(ranks):
    layouts = [
        Layout(dp=4, zero=3, zero_gather="step"),
        Layout(dp=4, zero=3, zero_ahead=0),
        Layout(dp=4, zero=3, zero_ahead=3),
        Layout(dp=4, zero=2, zero_shard=2),
    ]
    pairs = compared(ranks, run_of(DEEP, 4, accumulate=2), layouts)
    by_step, none_ahead, three_ahead, _ = (found.total for _, found in pairs)
    assert none_ahead < three_ahead < by_step


@pytest.mark.parametrize("model", [DEEP, WIDE, GPT2], ids=["deep", "large vocabulary", "tied"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_joined_units(ranks, model, precision):
    run = run_of(model, 2, accumulate=2, precision=precision)
    compared(ranks, run, [Layout(dp=2, zero=stage, zero_join=join) for stage in (0, 1) for join in (200_000, 10**6)])


RECOMPUTED = [
    {},
    {"recompute": "full"},
    {"recompute": "full", "recompute_every": "sqrt"},
    {"recompute": "selective"},
    {"recompute": "selective", "recompute_keep": ("linear", "attention")},
    {"recompute": "selective", "recompute_keep": ("linear", "attention", "softmax", "activation")},
]


@pytest.mark.parametrize(
    ("model", "stages", "options"),
    [
        (DEEP, (0, 1, 3), {}),
        (DEEP, (1,), {"attention": "explicit", "precision": "bf16"}),
        (GPT2, (0,), {"attention": "explicit"}),
    ],
    ids=["llama", "llama, explicit, bf16", "gpt2, explicit"],
)
def test_recompute(ranks, model, stages, options):
    """Of a deep model with enough tokens that activations count."""
    run = run_of(model, 2, micro=4, **options)
    for stage in stages:
        pairs = compared(ranks, run, [Layout(dp=2, zero=stage, **fields) for fields in RECOMPUTED])
        for foretold, found in pairs:
            assert found.total == pytest.approx(foretold, rel=0.01 if stage < 3 else 0.05)
        none, full, every, selective, more, most = (found.total for _, found in pairs)
        assert full < every < selective < more < most < 1.03 * none


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", DROPPING, ids=str)
def test_recompute_of_dropout(ranks, options, precision):
    model = GPT2.model_copy(update={"resid_dropout": 0.1, "attn_dropout": 0.1})
    run = run_of(model, 1, micro=4, precision=precision, **options)
    refused = {"attention"} if run.attention == "sdpa" else set()
    asked = [fields for fields in RECOMPUTED if refused.isdisjoint(fields.get("recompute_keep", ()))]
    asked += [{"recompute": "selective", "recompute_keep": ("linear", "softmax", "activation")}]
    compared(ranks, run, [Layout(dp=1, **fields) for fields in asked])


@pytest.mark.parametrize("causal", [True, False])
def test_scores_computed_again_can_be_the_peak(ranks, causal):
    """Where there is little beside them: of one layer with many heads, and hardly a vocabulary."""
    model = HEADS.model_copy(update={"causal": causal})
    run = run_of(model, 1, micro=4, attention="explicit", data=Data(seq_len=64))
    every, no_scores = ("linear", "attention", "softmax", "activation"), ("linear", "softmax", "activation")
    layouts = [Layout(dp=1, recompute="selective", recompute_keep=keep) for keep in (every, no_scores)]
    if causal:  # the scores and what the mask makes of them at once; without a mask the first only
        for layout in layouts:
            fullest = max(moments(run, layout, 4, cpu=True), key=lambda moment: moment.total)
            assert fullest.what == "recompute of block 0"
    for foretold, found in compared(ranks, run, layouts):
        assert found.total == pytest.approx(foretold, rel=0.02 if causal else 0.05)


def test_ranks_without_a_sequence(ranks):
    run = run_of(DEEP, 3).model_copy(update={"batch": Batch(sequences=2, micro=1)})
    compared(ranks, run, [Layout(dp=3, zero=stage, zero_join=0) for stage in (0, 2, 3)])


METHODS = [
    {"cp_method": "gather"},
    {"cp_method": "rsa"},
    {"cp_method": "ring", "zero": 1},
    {"cp_method": "ring", "recompute": "full"},
    {"cp_method": "ulysses", "zero": 3},
]


@pytest.mark.parametrize("model", [HEADS, GPT2], ids=["many heads", "gpt2"])
def test_context_ranks(ranks, model):
    """Of few layers with long sequences, so that what attention holds on its way counts; without it, other bytes."""
    model = model.model_copy(update={"layers": 2, "max_seq": 256})
    run = run_of(model, 1, micro=4, data=Data(seq_len=256))
    pairs = compared(ranks, run, [Layout(dp=1, cp=2, zero_join=0, **fields) for fields in METHODS])
    rsa = pairs[1][1].total
    assert all(found.total < rsa for _, found in pairs if found.total != rsa)


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_rings_of_ranks_that_deal_heads_out(ranks, packing):
    """2 × 2: what a ring of fewer positions and heads holds on its way."""
    run = run_of(HEADS.model_copy(update={"max_seq": 128}), 1, micro=2, data=Data(seq_len=128, packing=packing))
    layouts = [Layout(dp=1, cp=4, cp_method="usp", cp_ulysses=2, zero_join=0, zero=zero) for zero in (0, 3)]
    compared(ranks, run, layouts)


def test_a_watch_sees_births_deaths_and_resizing():
    kept = torch.zeros(100)
    with Watch({"kept": [kept.untyped_storage()]}) as watch:
        first = torch.empty(300)
        del first
        kept.untyped_storage().resize_(0)
        torch.empty(200)
        kept.untyped_storage().resize_(400)
        second = torch.empty(250).view(5, 50)[1:]
        del second
        torch.empty(1)
    found = watch.peak()
    assert found.categories == {"kept": 400, MADE: 1200}
    assert found.made == {"empty float32[300]": 1200}
    with Watch({"kept": [kept.untyped_storage()]}) as watch:
        kept.untyped_storage().resize_(4000)
        torch.empty(1)
    assert watch.peak().categories == {"kept": 4000, MADE: 4}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return (grad * torch.full((1000,), 2.0, dtype=torch.float64)).to(grad.dtype)


def test_a_watch_sees_inside_custom_functions():
    x = torch.zeros(1000, requires_grad=True)
    with Watch({}) as watch:
        y = Scaled.apply(x).sum()
        y.backward()
    found = watch.peak()
    assert found.where.endswith("in backward")
    assert found.made["full float64[1000]"] == 8000
