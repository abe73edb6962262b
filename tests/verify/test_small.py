"""The small run that stands for a large one: always valid, and alike in whatever changes the computation."""

from __future__ import annotations

import pytest

from meshwright.predict.params import unit_counts
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import Data, Optimizer, RunSpec
from meshwright.verify.reference import reference
from meshwright.verify.small import CLIP, small_run
from meshwright.verify.unequal import proof_data


def run_of(model: ModelSpec, dp: int = 3) -> RunSpec:
    attention = "explicit" if model.attn_dropout else "sdpa"
    return RunSpec(model=model, layout=Layout(dp=dp), data=Data(seq_len=min(256, model.max_seq)), attention=attention)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_one(name):
    run = small_run(run_of(PRESETS[name]))
    large = PRESETS[name]
    assert run.model.hidden == 32 and run.model.layers <= 2
    assert run.batch.sequences == 3 * 2 * 3 - 1
    same = ("family", "tied", "qk_norm", "qkv_bias", "rope_scaling", "causal", "resid_dropout", "max_seq")
    assert {field: getattr(run.model, field) for field in same} == {field: getattr(large, field) for field in same}


@pytest.mark.parametrize(("kv_heads", "small"), [(None, 4), (8, 4), (4, 2), (2, 2), (1, 1)])
def test_heads_are_grouped_alike(kv_heads, small):
    model = ModelSpec(family="llama", vocab=64, hidden=64, layers=3, heads=8, kv_heads=kv_heads, ffn=64, max_seq=64)
    assert small_run(run_of(model)).model.num_kv_heads == small


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "small"),
    [(8, None, 4, 4), (8, 2, 8, 2), (16, 8, 16, 8), (16, 1, 16, 1), (6, 3, 3, 3), (12, 6, 3, 3), (6, 2, 6, 2)],
)
def test_tensor_ranks_share_its_heads(heads, kv_heads, tp, small, sp):
    """What they can share of the large model they can share of the small one."""
    model = ModelSpec(
        family="llama", vocab=64, hidden=8 * heads, layers=3, heads=heads, kv_heads=kv_heads, ffn=96, max_seq=97
    )
    run = RunSpec(model=model, layout=Layout(dp=1, tp=tp, sp=sp), data=Data(seq_len=96))
    assert small_run(run).model.num_kv_heads == small
    gpt2 = ModelSpec(family="gpt2", vocab=64, hidden=8 * heads, layers=3, heads=heads, ffn=96, max_seq=19)
    run = RunSpec(model=gpt2, layout=Layout(dp=1, tp=tp, sp=sp), data=Data(seq_len=tp))
    assert small_run(run).data.seq_len == (19 // tp * tp if sp else 19)


@pytest.mark.parametrize("max_seq", [1, 16, 24, 1000])
def test_few_learned_positions_make_short_sequences(max_seq):
    model = ModelSpec(family="gpt2", vocab=64, hidden=64, layers=3, heads=8, max_seq=max_seq)
    assert small_run(run_of(model)).data.seq_len == min(max_seq, 24)


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_clipping_acts_in_every_step(name):
    run = small_run(run_of(PRESETS[name], dp=2))
    assert run.optimizer.clip == CLIP
    norms = reference(run, proof_data(run), steps=3).norms
    assert len(norms) == 3 and min(norms) > 2 * CLIP


@pytest.mark.parametrize(("clip", "small"), [(None, None), (5.0, CLIP), (0.01, 0.01)])
def test_a_run_that_does_not_clip_is_not_made_to(clip, small):
    run = run_of(PRESETS["llama-tiny"]).model_copy(update={"optimizer": Optimizer(clip=clip)})
    assert small_run(run).optimizer.clip == small


def joins(run: RunSpec) -> tuple[bool, bool, bool]:
    """Whether there are several units beside the tied one; whether one of them has several blocks, or only one."""
    names = [name for name in unit_counts(run.model, run.layout.join) if name != "tied"]
    apart = [name for name in unit_counts(run.model) if name != "tied"]
    return len(names) > 1, len(names) < len(apart), len(names) == len(apart)


@pytest.mark.parametrize(
    ("model", "join"),
    [
        ("llama-tiny", 1_000_000),
        ("llama-tiny", 400_000),
        ("llama-tiny", 0),
        ("gpt2-tiny", 1_000_000),
        ("gpt2", 1_000_000),
        ("gpt2-xl", 1_000_000),
        ("llama2-7b", 1_000_000),
        ("llama2-7b", 1_000_000_000),
        ("qwen3-8b", 1_000_000),
        ("qwen3-8b", 10**11),
    ],
)
@pytest.mark.parametrize("zero", [0, 1])
def test_units_are_joined_alike(model, join, zero):
    run = run_of(PRESETS[model]).model_copy(update={"layout": Layout(dp=3, zero=zero, zero_join=join)})
    assert joins(small_run(run)) == joins(run)


@pytest.mark.parametrize("zero", [2, 3])
def test_above_stage_1_nothing_is_joined(zero):
    run = run_of(PRESETS["llama-tiny"]).model_copy(update={"layout": Layout(dp=3, zero=zero)})
    assert small_run(run).layout == run.layout
