"""How a module's parameters lie in flat buffers, and which run of them each rank has."""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.parallel.zero import shard

sys.path.insert(0, str(Path(__file__).parent))
from sharding import inputs, module, single


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_values_are_kept_and_parameters_lie_in_their_units_buffer(stage):
    before = copy.deepcopy(module())
    sharded = single(module(), stage)
    for name, parameter in sharded.module.named_parameters():
        assert torch.equal(parameter, before.get_parameter(name))
    buffers = {unit.parameters.untyped_storage().data_ptr() for unit in sharded.units}
    assert {p.untyped_storage().data_ptr() for p in sharded.module.parameters()} == buffers
    assert torch.equal(sharded.module(inputs(0, 0)), before(inputs(0, 0)))


def test_stage_3_keeps_values_without_holding_whole_parameters():
    before = copy.deepcopy(module())
    sharded = single(module(), 3)
    assert all(unit.parameters.untyped_storage().nbytes() == 0 for unit in sharded.units)
    assert all(parameter.isnan().all() for parameter in sharded.module.parameters())
    assert torch.equal(sharded.module(inputs(0, 0)), before(inputs(0, 0)))


def shards(mesh, stage):
    sharded = shard(module(), mesh, stage)
    return [
        (unit.padded, [(p.placement.name, p.start, p.stop, p.offset) for p in unit.pieces], list(unit.segments))
        for unit in sharded.units
    ]


def test_shards_cover_each_parameter_once_and_padding_stands_at_the_end(ranks):
    found = ranks.run(3, shards, 1)
    for units in zip(*found, strict=True):
        assert {padded for padded, _, _ in units} == {21}  # 16 + 4, up to a multiple of 3
        covered = {}
        for _, pieces, segments in units:
            assert len(segments) <= 2
            assert sum(s.stop - s.start for s in segments) == sum(stop - start for _, start, stop, _ in pieces)
            for name, start, stop, _ in pieces:
                covered.setdefault(name, []).append((start, stop))
        for name, runs in covered.items():
            assert runs[0][0] == 0
            assert runs[-1][1] == (16 if name.endswith("weight") else 4)
            assert all(one[1] == two[0] for one, two in itertools.pairwise(runs))


def test_a_tied_weight_stays_one_parameter():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    sharded = single(model)
    assert model["b"].weight is model["a"].weight
    assert sharded.placements["a.weight"].names == ("a.weight", "b.weight")
    assert sum(unit.parameters.numel() for unit in sharded.units) == 16
