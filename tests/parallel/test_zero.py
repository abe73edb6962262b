"""Data parallelism on modules of all sorts: sums over ranks, once a step, while backward still runs."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from meshwright.comm.mesh import Mesh
from meshwright.parallel.zero import Sharded, shard
from meshwright.spec.errors import UserError


class Twice(nn.Module):
    """A module used twice in one forward, one that is never used, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.idle = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        for layer in (self.layers[0], self.layers[1], self.layers[0], self.layers[2], self.frozen):
            x = torch.tanh(layer(x)) * self.scale
        return x.square().sum()


def module() -> nn.Module:
    torch.manual_seed(0)
    return Twice().double()


def inputs(rank: int, micro: int) -> torch.Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + micro))


def gradients(mesh, steps, micros):
    sharded = shard(module(), mesh)
    for step in range(steps):
        sharded.begin()
        for micro in range(micros):
            if micro == micros - 1:
                sharded.last_micro()
            sharded.module(inputs(mesh.rank, 7 * step + micro)).backward()
        list(sharded.finish())
    kept = {placement.name: gradient.clone() for placement, gradient in sharded.named_gradients()}
    return kept, mesh.ledger.rows()


@pytest.mark.parametrize(("ranks_", "steps", "micros"), [(1, 1, 1), (2, 1, 1), (3, 2, 3)])
def test_gradients_are_sums(ranks, ranks_, steps, micros):
    plain = module()
    for rank in range(ranks_):
        for micro in range(micros):
            plain(inputs(rank, 7 * (steps - 1) + micro)).backward()
    for found, rows in ranks.run(ranks_, gradients, steps, micros):
        for name, parameter in plain.named_parameters():
            if not parameter.requires_grad:
                assert name not in found
            elif parameter.grad is None:
                assert found[name].abs().max() == 0
            else:
                torch.testing.assert_close(found[name], parameter.grad, rtol=1e-13, atol=1e-13)
        assert [row.count for row in rows] == ([] if ranks_ == 1 else [steps * 4])  # three blocks and the idle one


def arrivals(mesh):
    """How many gradients were there when each unit's reduction began."""
    sharded = shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), mesh)
    began = []
    reduce = Sharded._reduce

    def watched(self, unit):
        began.append((unit.name, sum(p.grad is not None for p in self._parameters.values())))
        reduce(self, unit)

    with mock.patch.object(Sharded, "_reduce", watched):
        sharded.begin()
        sharded.last_micro()
        sharded.module(torch.ones(1, 4)).sum().backward()
        list(sharded.finish())
    return began


def test_a_unit_is_reduced_while_earlier_layers_run_backward(ranks):
    for began in ranks.run(2, arrivals):
        assert began == [("blocks.3", 2), ("blocks.2", 4), ("blocks.1", 6), ("blocks.0", 8)]


def idle_rank(mesh):
    sharded = shard(module(), mesh)
    sharded.begin()
    sharded.last_micro()
    if mesh.rank == 0:
        sharded.module(inputs(0, 0)).backward()
    list(sharded.finish())
    return {placement.name: gradient.clone() for placement, gradient in sharded.named_gradients()}


def test_a_rank_without_a_batch_takes_part(ranks):
    plain = module()
    plain(inputs(0, 0)).backward()
    first, second = ranks.run(2, idle_rank)
    for name, gradient in first.items():
        assert torch.equal(gradient, second[name])
        expected = plain.get_parameter(name).grad
        assert torch.equal(gradient, torch.zeros_like(gradient) if expected is None else expected)


def single(module_: nn.Module) -> Sharded:
    return shard(module_, Mesh.single(torch.device("cpu")))


def test_values_are_kept_and_parameters_lie_in_their_units_buffer():
    before = copy.deepcopy(module())
    sharded = single(module())
    for name, parameter in sharded.module.named_parameters():
        assert torch.equal(parameter, before.get_parameter(name))
    buffers = {unit.parameters.untyped_storage().data_ptr() for unit in sharded.units}
    assert {p.untyped_storage().data_ptr() for p in sharded.module.parameters()} == buffers
    assert torch.equal(sharded.module(inputs(0, 0)), before(inputs(0, 0)))


def test_a_tied_weight_stays_one_parameter():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    sharded = single(model)
    assert model["b"].weight is model["a"].weight
    assert sharded.placements["a.weight"].names == ("a.weight", "b.weight")
    assert sum(unit.parameters.numel() for unit in sharded.units) == 16


def test_gradients_of_the_last_step_are_gone():
    sharded = single(module())
    for _ in range(2):
        sharded.begin()
        sharded.last_micro()
        sharded.module(inputs(0, 0)).backward()
        list(sharded.finish())
    plain = module()
    plain(inputs(0, 0)).backward()
    for placement, gradient in sharded.named_gradients():
        expected = plain.get_parameter(placement.name).grad
        assert torch.equal(gradient, torch.zeros_like(gradient) if expected is None else expected)


def test_later_stages_are_refused():
    with pytest.raises(UserError, match="zero=2 is not available yet; use zero=0"):
        shard(nn.Linear(2, 2), Mesh.single(torch.device("cpu")), stage=2)
