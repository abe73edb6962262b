"""The ranks of a pipeline have together what the whole model has: parameters, states, checkpoints, FLOPs, messages."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from meshwright.predict import activations, flops
from meshwright.predict.params import count, tensors, unit_counts, units
from meshwright.predict.report import executed
from meshwright.predict.stages import stages_of, stages_on, tensors_on
from meshwright.predict.states import buffers, checkpoint_copy, padded, partial_sums, shards, states
from meshwright.predict.traffic import traffic
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, RunSpec

LLAMA = ModelSpec(family="llama", vocab=101, hidden=24, layers=7, heads=4, kv_heads=2, ffn=28, max_seq=64, qk_norm=True)
GPT2 = ModelSpec(family="gpt2", vocab=101, hidden=24, layers=7, heads=4, max_seq=64)
SPECS = {"llama": LLAMA, "llama tied": LLAMA.model_copy(update={"tied": True}), "gpt2": GPT2}
INTERLEAVED = {"pp_schedule": "interleaved", "pp_chunks": 3}
PIPELINES: dict[str, dict[str, Any]] = {
    "two": {"pp": 2},
    "four": {"pp": 4, "pp_split": "layers"},
    "by hand": {"pp": 3, "pp_split": (1, 5, 1)},
    "interleaved": {"pp": 2, **INTERLEAVED},
}


def run_of(model: ModelSpec, **fields: Any) -> RunSpec:
    fields.setdefault("batch", Batch(sequences=6, micro=1))
    fields.setdefault("data", Data(seq_len=16))
    return RunSpec(model=model, **fields)


def first_ranks(layout: Layout) -> list[int]:
    """One rank of each place in the pipeline."""
    return [layout.rank_at({"pp": place}) for place in range(layout.pp)]


def table(spec: ModelSpec) -> int:
    return spec.vocab * spec.hidden if spec.is_tied else 0


@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_stages_have_every_tensor_once_but_a_tied_table_twice(spec: ModelSpec, pipeline: dict[str, Any]) -> None:
    run, layout = run_of(spec), Layout(dp=1, **pipeline)
    every = Counter(tensor.name for rank in first_ranks(layout) for tensor in tensors_on(run, layout, rank))
    expected = Counter(tensor.name for tensor in tensors(spec))
    expected.update(tensor.name for tensor in tensors(spec) if tensor.tied)
    assert every == expected
    held = sum(tensor.numel for rank in first_ranks(layout) for tensor in tensors_on(run, layout, rank))
    assert held == count(spec) + table(spec)


def test_a_tied_table_is_looked_up_first_and_multiplied_with_last() -> None:
    layout = Layout(dp=1, pp=3, pp_split=(3, 2, 2))
    first, second, last = (units(GPT2, stage=stage) for stage in stages_of(GPT2, layout, 16))
    assert list(first) == ["tied", "embedding", "blocks.0", "blocks.1", "blocks.2"]
    assert (first["tied"].lookup, last["tied"].lookup) == (True, False)
    assert "tied" not in second and first["tied"].tied and last["tied"].tied
    assert list(last) == ["tied", "blocks.5", "blocks.6", "head"]


def test_units_of_two_stages_are_never_joined() -> None:
    first, last = stages_of(LLAMA, Layout(dp=1, pp=2, pp_split=(3, 4)), 16)
    assert list(units(LLAMA, 10**9)) == ["embedding..head"]
    assert list(units(LLAMA, 10**9, stage=first)) == ["embedding..blocks.2"]
    assert list(units(LLAMA, 10**9, stage=last)) == ["blocks.3..head"]
    assert sum(unit_counts(LLAMA, 10**9, stage=first).values()) + sum(
        unit_counts(LLAMA, 10**9, stage=last).values()
    ) == count(LLAMA)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_states_add_up(spec: ModelSpec, pipeline: dict[str, Any], stage: int) -> None:
    """To the whole model's, but for a tied table's second copy, the step counters, and what each stage has itself."""
    run = run_of(spec)
    one, many = Layout(dp=2, zero=stage, zero_join=0), Layout(dp=2, zero=stage, zero_join=0, **pipeline)
    whole, held = states(run, one), Counter[str]()
    for rank in first_ranks(many):
        held.update(states(run, many, rank))
    twice = padded(run, one)["tied"] if spec.is_tied else 0
    copies = {"parameters": 4, "gradients": 4, "master weights": 0, "adam moments": 8}
    cut = {"parameters": stage == 3, "gradients": stage >= 2, "master weights": stage > 0, "adam moments": stage > 0}
    for name, size in copies.items():
        more = twice * size // (shards(one) if cut[name] else 1)
        assert held[name] == whole[name] + more, name
    assert held["scalars"] == 4 * many.pp + (4 * many.stages if stage == 3 else 0)


def test_each_stage_has_a_rotary_table() -> None:
    run = run_of(LLAMA)
    one = buffers(run)
    assert one == 2 * 64 * 6 * 4
    assert [buffers(run, Layout(dp=1, pp=2, **INTERLEAVED), rank) for rank in range(2)] == [3 * one] * 2
    assert buffers(run, Layout(dp=1)) == buffers(run, Layout(dp=1, pp=2), 1) == one
    assert buffers(run_of(GPT2), Layout(dp=1, pp=2), 1) == 0


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=1, pp=4),
        Layout(dp=2, pp=2, zero=1),
        Layout(dp=3, pp=2, tp=4, zero=3, sp=True, **INTERLEAVED),
        Layout(dp=4, pp=2, zero=2, zero_shard=2, order=("pp", "dp", "cp", "tp")),
    ],
    ids=str,
)
def test_a_checkpoint_is_written_once(spec: ModelSpec, layout: Layout) -> None:
    """A tied table by the first stage alone."""
    run = run_of(spec)
    assert sum(checkpoint_copy(run, layout, rank) for rank in range(layout.world)) == 3 * 4 * count(spec)
    stages = {rank: stages_on(run, layout, rank) for rank in range(layout.world)}
    of_last = [rank for rank in stages if any(each.last for each in stages[rank])]
    own = sum(tensor.numel for tensor in tensors_on(run, layout, of_last[0]) if not tensor.tied)
    assert sum(checkpoint_copy(run, layout, rank) for rank in of_last) == 3 * 4 * own


RECOMPUTED = [
    {},
    {"recompute": "full"},
    {"recompute": "full", "recompute_every": 3},
    {"recompute": "full", "recompute_every": "sqrt"},
    {"recompute": "selective", "recompute_keep": ("attention",)},
]


@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("recompute", RECOMPUTED, ids=str)
@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
def test_flops_add_up(pipeline: dict[str, Any], recompute: dict[str, Any], loss: str) -> None:
    """Forward and backward to those of the whole model; what is computed again by the regions that stages have."""
    run, layout = run_of(GPT2, loss=loss), Layout(dp=1, **pipeline, **recompute)
    whole = flops.counted(GPT2, batch=6, seq=16, loss=loss, layout=layout)  # type: ignore[arg-type]
    found = executed(run, layout)
    assert (found.forward, found.backward) == (whole.forward, whole.backward)
    stages = stages_of(GPT2, layout, 16)
    spared = sum(-(-len(stage.blocks) // layout.region(len(stage.blocks))) for stage in stages)
    last_product = 2 * 6 * 16 * 24 * 96
    if not recompute:
        assert found.recompute == whole.recompute == 0
    else:
        assert found.recompute - whole.recompute == (-(-7 // layout.region(7)) - spared) * last_product


def test_the_last_stage_computes_the_head() -> None:
    first, last = (
        flops.counted(LLAMA, batch=1, seq=16, stage=stage)
        for stage in stages_of(LLAMA.model_copy(update={"layers": 6}), Layout(dp=1, pp=2, pp_split="layers"), 16)
    )
    assert last.forward - first.forward == 2 * 16 * 24 * 101


def in_all(rows: Any) -> Counter[tuple[Any, ...]]:
    """Counts and payloads of a step, by operation, axis, reason, phase and micro-batch."""
    found: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        key = row.key
        kind = (key.operation, key.axis, key.reason, key.phase, key.micro)
        found[*kind, "count"] += row.count
        found[*kind, "payload"] += row.payload
    return found


@pytest.mark.parametrize("recompute", [{}, {"recompute": "full"}, {"recompute": "selective"}], ids=str)
@pytest.mark.parametrize("sp", [False, True], ids=["tensor", "tensor and sequence"])
@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
def test_tensor_and_context_messages_add_up(pipeline: dict[str, Any], sp: bool, recompute: dict[str, Any]) -> None:
    """A stage sends what its blocks and ends do. Sums after backward are one message a stage, of the same elements.
    (Of each block a region of its own, so that the stages' regions are the model's.)"""
    run = run_of(LLAMA, batch=Batch(sequences=5, micro=2))
    one = Layout(dp=1, tp=2, cp=2, sp=sp, **recompute)
    many = Layout(dp=1, tp=2, cp=2, sp=sp, **pipeline, **recompute)
    whole = in_all(row for row in traffic(run, one) if row.key.reason[:3] in ("tp.", "cp."))
    found: Counter[tuple[Any, ...]] = Counter()
    for rank in first_ranks(many):
        found += in_all(row for row in traffic(run, many, rank) if row.key.reason[:3] in ("tp.", "cp."))
    sums = ("all_reduce", "tp", "tp.partial", "step", None, "count")
    assert found.pop(sums) == sum(
        1 for rank in first_ranks(many) for stage in stages_on(run, many, rank) if partial_sums(run, many, rank, stage)
    )
    assert whole.pop(sums) == 1
    assert found == whole


def test_the_embedding_and_the_loss_are_at_the_ends() -> None:
    run, layout = run_of(LLAMA), Layout(dp=1, tp=2, pp=3)
    reasons = [{row.key.reason for row in traffic(run, layout, rank)} for rank in first_ranks(layout)]
    assert ["tp.embed" in found for found in reasons] == [True, False, False]
    assert (
        ["tp.head" in found for found in reasons] == ["tp.loss" in found for found in reasons] == [False, False, True]
    )


@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("spec", [GPT2, LLAMA.model_copy(update={"window": 5})], ids=["gpt2", "llama, window"])
def test_saved_tensors_add_up(spec: ModelSpec, pipeline: dict[str, Any]) -> None:
    """Under the names of the whole model; what all blocks share, here a mask, each stage has for itself."""
    sizes: dict[str, Any] = {"batch": 2, "seq": 16}
    stages = stages_of(spec, Layout(dp=1, **pipeline), 16)
    whole = Counter(activations.saved(spec, **sizes))
    found = Counter(row for stage in stages for row in activations.saved(spec, **sizes, stage=stage))
    more = found - whole
    assert not whole - found
    if spec.window is None:
        assert not more
    else:
        assert {row.what for row in more} == {"mask, shared by all layers"}
        assert {int(row.where.split(".")[2]) for row in more} == {stage.start for stage in stages if stage.start}


def test_each_stage_looks_up_the_rotary_rows_that_its_blocks_share() -> None:
    stages = stages_of(LLAMA, Layout(dp=1, pp=3), 16)
    for packed, cp in ((True, 1), (False, 2)):
        for stage in stages:
            rows = activations.saved(LLAMA, Layout(dp=1, cp=cp), batch=2, seq=16, packed=packed, stage=stage)
            where = [
                row.where
                for row in rows
                if row.what in ("cos at the tokens' positions", "sin at the tokens' positions")
            ]
            assert where == [f"model.layers.{stage.start}.self_attn"] * 2
