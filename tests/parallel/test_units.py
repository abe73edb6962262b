from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.model.build import build
from meshwright.parallel.placement import plain_placements
from meshwright.parallel.units import plan_units
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec

LLAMA = ModelSpec(family="llama", vocab=37, hidden=16, layers=2, heads=2, ffn=24, max_seq=32)
GPT2 = ModelSpec(family="gpt2", vocab=37, hidden=16, layers=2, heads=2, max_seq=32)


def planned(module, units=None, join=0):
    plans = plan_units(module, plain_placements(module), units, join)
    return {plan.name: [p.name for p in plan.placements] for plan in plans}


def test_a_block_is_a_unit():
    found = planned(build(LLAMA, device="meta"))
    assert list(found) == ["embedding", "blocks.0", "blocks.1", "head"]
    assert found["embedding"] == ["model.embed_tokens.weight"]
    assert found["head"] == ["lm_head.weight", "model.norm.weight"]
    assert all(name.startswith("model.layers.1.") for name in found["blocks.1"])


def test_a_tied_weight_is_a_unit_of_its_own():
    found = planned(build(GPT2, device="meta"))
    assert list(found) == ["tied", "embedding", "blocks.0", "blocks.1", "head"]
    assert found["tied"] == ["transformer.wte.weight"]


def test_decayed_parameters_come_first_in_a_unit():
    module = build(GPT2, device="meta")
    for plan in plan_units(module, plain_placements(module)):
        decays = [p.decay for p in plan.placements]
        assert decays == sorted(decays, reverse=True)
        assert all(p.decay == (len(p.shape) > 1) for p in plan.placements)


def test_a_module_of_the_users_own():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    assert planned(module) == {
        "blocks.0": ["0.weight", "0.bias"], "blocks.1": ["1.weight", "1.bias"], "blocks.2": ["2.weight", "2.bias"]
    }  # fmt: skip


def test_no_blocks():
    assert planned(nn.Linear(3, 4)) == {"embedding": ["weight", "bias"]}


def test_frozen_parameters_and_other_dtypes_lie_apart():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    module[0].bias.requires_grad_(False)
    module[1].to(torch.float64)
    assert planned(module) == {
        "blocks.0": ["0.weight"], "blocks.0.float32.frozen": ["0.bias"], "blocks.1": ["1.weight", "1.bias"]
    }  # fmt: skip


def test_small_neighbours_are_joined_and_a_tied_weight_is_not():
    found = planned(build(GPT2, device="meta"), join=10**6)
    assert list(found) == ["tied", "embedding..head"]
    decays = ["weight" in name and "ln" not in name for name in found["embedding..head"]]
    assert decays == sorted(decays, reverse=True)
    assert list(planned(build(LLAMA, device="meta"), join=620)) == ["embedding..blocks.0", "blocks.1..head"]


def test_a_joined_unit_keeps_its_parts():
    module = build(LLAMA, device="meta")
    alone = plan_units(module, plain_placements(module))
    (plan,) = plan_units(module, plain_placements(module), join=10**6)
    assert [set(part) for part in plan.parts] == [set(p.placements) for p in alone]
    assert all(p.parts == (p.parts[0],) and set(p.parts[0]) == set(p.placements) for p in alone)


def test_frozen_parameters_and_other_dtypes_lie_apart_from_joined_ones():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    module[0].bias.requires_grad_(False)
    module[1].requires_grad_(False)
    module[2].bias.data = module[2].bias.data.double()
    assert planned(module, join=13) == {
        "blocks.0..blocks.2": ["0.weight", "2.weight"],
        "blocks.0..blocks.2.float32.frozen": ["1.weight", "0.bias", "1.bias"],
        "blocks.0..blocks.2.float64": ["2.bias"],
    }


def test_units_of_the_users_own_are_not_joined():
    assert list(planned(nn.Linear(3, 4), {"a": ["weight"], "b": ["bias"]}, join=100)) == ["a", "b"]


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ({"all": ["weight"]}, "no unit for bias"),
        ({"all": ["weight", "bias", "weight"]}, "in two units weight"),
        ({"all": ["weight", "bias", "scale"]}, "unknown parameters scale"),
    ],
)
def test_units_must_cover(units, words):
    with pytest.raises(UserError, match=words):
        planned(nn.Linear(2, 2), units)
