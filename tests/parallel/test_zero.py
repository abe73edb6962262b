"""Updated parameters: every rank has them by the time it needs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.parallel.flat import Precision, Unit
from meshwright.parallel.zero import Options, Sharded, shard
from meshwright.spec.errors import UserError

sys.path.insert(0, str(Path(__file__).parent))
from sharding import PLAIN, STAGES, Chain, Tied, inputs, module, single


def updated(mesh, stage, options=PLAIN):
    """Halve every master shard, publish, and see what the module and `whole` then have."""
    sharded = shard(module(Tied), mesh, stage, options=options)
    for unit in sharded.units:
        unit.master.mul_(0.5)
        sharded.publish(unit)
    with torch.no_grad():
        value = sharded.module(inputs(0, 0)).item()
    return value, {placement.name: parameter.clone() for placement, parameter in sharded.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 3])
def test_every_rank_gets_every_update(ranks, stage, world):
    plain = module(Tied)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    for value, found in ranks.run(world, updated, stage):
        assert value == plain(inputs(0, 0)).item()
        for name, parameter in plain.named_parameters():
            assert torch.equal(found[name], parameter)


@pytest.mark.parametrize("join", [30, 1000])
def test_every_rank_gets_every_update_of_joined_units(ranks, join):
    (plain,) = ranks.run(1, updated, 0)
    for found in ranks.run(3, updated, 1, Options(join=join)):
        assert found[0] == plain[0]
        assert all(torch.equal(found[1][name], parameter) for name, parameter in plain[1].items())


def entered_in_training(mesh, join):
    """A forward with gradients, whose modules alone wait for the gathers: which units each layer finds arrived."""
    sharded = shard(Chain(), mesh, 1, options=Options(join=join))
    for unit in sharded.units:
        sharded.publish(unit)
    seen = []
    for layer in sharded.module.layers:
        layer.register_forward_pre_hook(lambda *_: seen.append([unit.gather is None for unit in sharded.units]))
    sharded.module(torch.ones(1, 4))
    return seen


def test_a_joined_unit_has_arrived_when_its_first_part_is_entered(ranks):
    for seen in ranks.run(2, entered_in_training, 40):
        assert seen == [[True, False], [True, False], [True, True], [True, True]]


def state_dict_after_an_update(mesh, stage):
    sharded = shard(Chain(), mesh, stage)
    sharded.fill(lambda piece, local: local.fill_(1.0))
    for unit in sharded.units:
        unit.master.fill_(2.0)
        sharded.publish(unit)
    return [(value == 2.0).all().item() for value in sharded.module.state_dict().values()]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_state_dict_has_the_updated_values(ranks, stage):
    for found in ranks.run(3, state_dict_after_an_update, stage):
        assert found == [True] * 8


def filled_after_a_forward(mesh):
    sharded = shard(module(Tied), mesh, 3)
    sharded.module(inputs(0, 0))  # with gradients and no backward: tied and last units stay
    sharded.fill(lambda piece, local: local.fill_(0.25))
    return sharded.module(inputs(0, 0)).item()


def test_no_unit_outlives_a_change_of_its_shards(ranks):
    plain = module(Tied)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.fill_(0.25)
    assert ranks.run(2, filled_after_a_forward) == [plain(inputs(0, 0)).item()] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_unit_may_be_published_as_soon_as_finish_gives_it_and_not_before(stage):
    sharded = single(Chain(), stage)
    sharded.begin()
    with pytest.raises(UserError, match="before finish"):
        sharded.publish(sharded.units[0])
    sharded.fill(lambda piece, local: local.fill_(0.5))
    sharded.micro(last=True)
    sharded.module(torch.ones(1, 4)).backward()
    given = sharded.finish()
    first = next(given)
    sharded.publish(first)
    with pytest.raises(UserError, match="before finish"):
        sharded.publish(next(unit for unit in sharded.units if unit is not first))
    for unit in given:
        sharded.publish(unit)


class Late:
    """A gather that reads what it sends as late as it may."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.sent: torch.Tensor | None = None

    def wait(self) -> None:
        self.sent = self.unit.parameter_shard.clone()


def updates(sharded: Sharded) -> None:
    """Of a rank that has nothing to compute, so that no forward waits."""
    sharded.begin()
    sharded.micro(last=True)
    for unit in sharded.finish():
        unit.master.fill_(9.0)
        sharded.publish(unit)


def publishes_again(sharded: Sharded) -> None:
    for unit in sharded.units:
        sharded.publish(unit)


def fills(sharded: Sharded) -> None:
    sharded.fill(lambda piece, local: local.fill_(9.0))


@pytest.mark.parametrize("change", [updates, publishes_again, fills])
@pytest.mark.parametrize("master", [None, torch.float64])
@pytest.mark.parametrize("stage", [1, 2])
def test_what_a_gather_sends_is_not_changed_under_it(stage, master, change):
    options = Options(precision=Precision(master=master))
    sharded = shard(Chain(), Mesh.single(torch.device("cpu")), stage, options=options)
    before = [unit.parameter_shard.clone() for unit in sharded.units]
    gathers = [Late(unit) for unit in sharded.units]
    for unit, gather in zip(sharded.units, gathers, strict=True):
        unit.gather = gather
        if master is not None:
            unit.master.fill_(7.0)  # not yet published
    change(sharded)
    for gather, shard_ in zip(gathers, before, strict=True):
        assert torch.equal(gather.sent, shard_)
