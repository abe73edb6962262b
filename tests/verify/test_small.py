"""The small run that stands for a large one: always valid, and alike in whatever changes the computation."""

from __future__ import annotations

import pytest

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
