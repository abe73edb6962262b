"""Parameters foretold from the spec alone, against published counts and against the plain model itself."""

import pytest
import torch

from meshwright.model.build import build
from meshwright.parallel.placement import plain_placements
from meshwright.parallel.units import plan_units
from meshwright.predict import params
from meshwright.spec.model import ModelSpec
from meshwright.spec.presets import PRESETS

# Published: the models' cards and index files on Hugging Face; GPT-3 is Brown et al. 2020, table 2.1 (174.6 B), with
# the vocabulary of 50,257 and 2,048 positions.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
}

LLAMA = ModelSpec(family="llama", vocab=33, hidden=16, layers=2, heads=4, kv_heads=2, ffn=24, max_seq=32)
GPT2 = ModelSpec(family="gpt2", vocab=33, hidden=16, layers=2, heads=4, max_seq=32)
VARIANTS = {
    "llama": LLAMA,
    "llama tied": LLAMA.model_copy(update={"tied": True}),
    "llama biases": LLAMA.model_copy(update={"qkv_bias": True, "out_bias": True, "mlp_bias": True}),
    "llama wide heads, norms": LLAMA.model_copy(update={"head_dim": 6, "qk_norm": True, "kv_heads": 1}),
    "llama one block": LLAMA.model_copy(update={"layers": 1}),
    "gpt2": GPT2,
    "gpt2 untied": GPT2.model_copy(update={"tied": False}),
    "gpt2 narrow ffn": GPT2.model_copy(update={"ffn": 10}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    assert params.count(PRESETS[name]) == PUBLISHED[name]


def test_every_big_preset_has_its_published_count() -> None:
    assert set(PUBLISHED) == {name for name in PRESETS if not name.endswith("-tiny")}


@pytest.mark.parametrize("spec", [*VARIANTS.values(), *PRESETS.values()], ids=[*VARIANTS, *PRESETS])
def test_names_shapes_and_units_are_the_models(spec: ModelSpec) -> None:
    model = build(spec, dtype=torch.float32, device="meta")
    placements = plain_placements(model)
    assert [(t.name, t.shape, t.decay) for t in params.tensors(spec)] == [
        (p.name, p.shape, p.decay) for p in placements.values()
    ]
    assert {name: [t.name for t in unit.tensors] for name, unit in params.units(spec).items()} == {
        plan.name: [p.name for p in plan.placements] for plan in plan_units(model, placements)
    }
    assert list(params.units(spec)) == [plan.name for plan in plan_units(model, placements)]
    whole = params.count(spec)
    for join in {1, 100, whole // 40, whole // 7, whole // 3, whole // 2, whole, 10**15}:
        foretold = {name: [t.name for t in unit.tensors] for name, unit in params.units(spec, join).items()}
        planned = plan_units(model, placements, join=join)
        assert list(foretold.items()) == [(plan.name, [p.name for p in plan.placements]) for plan in planned]
        assert sum(params.unit_counts(spec, join).values()) == whole


def test_tied_weight_counts_once_and_is_no_mere_lookup() -> None:
    tied, untied = VARIANTS["llama tied"], LLAMA
    assert params.count(untied) - params.count(tied) == 33 * 16
    assert params.embedding_count(untied) == 33 * 16
    assert params.embedding_count(tied) == 0
    assert params.embedding_count(GPT2) == 32 * 16  # positions only


def test_units_cover_every_parameter_once() -> None:
    for spec in VARIANTS.values():
        assert sum(params.unit_counts(spec).values()) == params.count(spec)


def test_segments() -> None:
    # Llama: the embedding is a matrix alone; each block and the head have matrices and vectors.
    assert params.segments(LLAMA) == 1 + 2 * 2 + 2
    # GPT-2, tied: two tables in two units, blocks with both kinds, a head of vectors alone.
    assert params.segments(GPT2) == 2 + 2 * 2 + 1
    assert params.segments(LLAMA, join=10**6) == 2
    assert params.segments(GPT2, join=10**6) == 1 + 2
