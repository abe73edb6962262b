"""Stage 3: which units are whole at each moment, and how often they are gathered."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from meshwright.comm.mesh import Mesh
from meshwright.parallel.residency import Residency
from meshwright.parallel.zero import Options, Sharded, shard

sys.path.insert(0, str(Path(__file__).parent))
from sharding import Chain, Tied, expected_gradients, inputs, module, single, step


def presence(mesh, ahead, gather, micros):
    """The units whose memory is there at each moment that a block computes; and the order of gathers."""
    sharded = shard(Chain(), mesh, 3, options=Options(ahead=ahead, gather=gather))
    held = []
    gathers = []

    def look(*_):
        held.append(tuple(u.name for u in sharded.units if u.parameters.untyped_storage().nbytes()))

    ask = Residency._ask

    def asked(self, stay):
        if not stay.resident and stay.gather is None:
            gathers.append(stay.unit.name)
        ask(self, stay)

    for layer in sharded.module.layers:
        layer.register_forward_pre_hook(look)
        layer.register_full_backward_hook(look)
    with mock.patch.object(Residency, "_ask", asked):
        step(sharded, [torch.ones(1, 4, requires_grad=True)] * micros)
    look()
    return held, gathers


def test_stage_3_holds_the_unit_that_computes_and_the_next(ranks):
    b = [f"blocks.{i}" for i in range(4)]
    for held, gathers in ranks.run(2, presence, 1, "micro", 1):
        assert held[:4] == [(b[0], b[1]), (b[1], b[2]), (b[2], b[3]), (b[3],)]
        assert all(len(names) <= 2 for names in held)
        assert held[-1] == ()
        assert gathers == [*b, b[2], b[1], b[0]]  # the last unit stays for backward
    for held, _ in ranks.run(2, presence, 0, "micro", 1):
        assert all(len(names) <= 1 for names in held)
    for held, _ in ranks.run(2, presence, 3, "micro", 1):
        assert held[0] == tuple(b)


def test_stage_3_gathers_in_every_micro_batch_or_once_a_step(ranks):
    b = [f"blocks.{i}" for i in range(4)]
    for _, gathers in ranks.run(2, presence, 1, "micro", 2):
        assert gathers == 2 * [*b, b[2], b[1], b[0]]
    for held, gathers in ranks.run(2, presence, 1, "step", 2):
        assert gathers == b
        assert held[-1] == ()


def tied_gathers(mesh):
    sharded = shard(module(Tied), mesh, 3)
    step(sharded, [inputs(mesh.rank, 0)])
    rows = {row.key.phase: row.count for row in mesh.ledger.rows() if row.key.reason == "zero.gather"}
    with torch.no_grad():
        sharded.module(inputs(mesh.rank, 0))
    return rows, [unit.name for unit in sharded.units if unit.parameters.untyped_storage().nbytes()]


def test_a_tied_weight_is_gathered_once_and_evaluation_leaves_nothing(ranks):
    for rows, left in ranks.run(2, tied_gathers):
        assert rows == {"forward": 4, "backward": 2}  # tied, two blocks, head; backward gathers the blocks
        assert left == []


def evaluated_in_between(mesh):
    """An evaluation between a forward and its backward."""
    sharded = shard(module(Tied), mesh, 3)
    sharded.begin()
    sharded.micro(last=True)
    loss = sharded.module(inputs(mesh.rank, 0))
    with torch.no_grad():
        sharded.module(inputs(mesh.rank, 9))
    loss.backward()
    list(sharded.finish())
    return {placement.name: gradient.clone() for placement, gradient in sharded.named_gradients()}


def test_an_evaluation_between_forward_and_backward_does_no_harm(ranks):
    expected = expected_gradients(Tied, 2, 1, 1)
    for found in ranks.run(2, evaluated_in_between):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


class Pair(nn.Module):
    """A unit of two layers, used in whatever order `calls` says."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.last = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Linear(4, 4)
        self.calls: list[int] = []

    def forward(self, x):
        for call in self.calls:
            x = self.pair[call](x)
        return self.last(x).sum()


def gathers_of_a_pair(micros: list[list[int]]) -> list[int]:
    """How often forward gathers the pair, in each micro-batch."""
    model = Pair()
    names = [name for name, _ in model.named_parameters()]
    units = {"pair": names[:4], "last": names[4:]}
    sharded = shard(model, Mesh.single(torch.device("cpu")), 3, units, Options(ahead=0))
    found = []
    ask = Residency._ask

    def asked(self, stay):
        found[-1] += stay.unit.name == "pair" and not stay.resident
        ask(self, stay)

    sharded.begin()
    for micro, model.calls in enumerate(micros):
        sharded.micro(micro, last=micro == len(micros) - 1)
        found.append(0)
        with mock.patch.object(Residency, "_ask", asked):
            loss = model(torch.ones(1, 4))
        loss.backward()
        sharded.end_micro()
    return found


def test_a_unit_of_several_modules_stays_until_forward_has_left_all_of_them():
    assert gathers_of_a_pair([[0, 1], [0, 1, 0, 1], [1, 0], [1, 1, 0]]) == [1, 2, 1, 1]
    assert gathers_of_a_pair([[0], [1, 0]]) == [1, 1]  # one that forward did not use is not taken for left


class Unused(Chain):
    """The last layer computes, and nobody reads what it gives."""

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = layer(x)
        self.layers[-1](x)
        return x.sum()


def whole(sharded: Sharded) -> list[str]:
    return [unit.name for unit in sharded.units if unit.parameters.untyped_storage().nbytes()]


def test_a_unit_that_backward_never_comes_to_is_freed_when_that_is_over():
    sharded = single(Unused(), 3)
    sharded.begin()
    for micro in range(2):
        sharded.micro(micro, last=micro == 1)
        loss = sharded.module(torch.ones(1, 4))
        assert whole(sharded) == ["blocks.3"]  # the last of forward waits for backward
        loss.backward()
        sharded.end_micro()
        assert whole(sharded) == []


@pytest.mark.parametrize("gather", ["micro", "step"])
def test_a_new_step_frees_what_one_that_was_given_up_has_left(gather):
    sharded = shard(Chain(), Mesh.single(torch.device("cpu")), 3, options=Options(gather=gather))
    sharded.begin()
    sharded.micro(0, last=False)
    sharded.module(torch.ones(1, 4))
    assert whole(sharded)
    sharded.begin()
    assert whole(sharded) == []
    with torch.no_grad():  # and frees as it goes again
        sharded.module(torch.ones(1, 4))
    assert whole(sharded) == []


def test_forward_gathers_ahead_whatever_came_before():
    sharded = single(Chain(), 3)
    held = []
    sharded.module.layers[0].register_forward_pre_hook(lambda *_: held.append("blocks.1" in whole(sharded)))
    x = torch.ones(1, 4)
    sharded.begin()
    sharded.micro(0, last=False)
    sharded.module(x).backward()
    sharded.end_micro()
    with torch.no_grad():
        sharded.module(x)
    sharded.module(x)  # with gradients, though in no micro-batch
    sharded.micro(1, last=True)
    sharded.module(x).backward()
    list(sharded.finish())
    assert held == [True] * 4


def test_a_frozen_unit_is_freed_when_backward_has_left_it():
    """No gradient of its own says so: that backward has come to the unit before it does."""
    model = Chain()
    model.layers[2].requires_grad_(False)
    sharded = shard(model, Mesh.single(torch.device("cpu")), 3, options=Options(ahead=0))
    held = []
    for layer in sharded.module.layers:
        layer.register_full_backward_hook(lambda *_: held.append(whole(sharded)))
    step(sharded, [torch.ones(1, 4, requires_grad=True)])
    assert "blocks.2" in held[1]
    assert set(held[2]) <= {"blocks.1"} and set(held[3]) <= {"blocks.0"}


class Looked(nn.Module):
    """An embedding, a layer, and an output layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(5, 4), nn.ModuleList([nn.Linear(4, 4)]), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.layers[0](self.embed(x))).square().sum()


def test_an_embedding_is_not_gathered_for_backward():
    sharded = single(Looked(), 3)
    gathered = []
    ask = Residency._ask

    def asked(self, stay):
        if not stay.resident and stay.gather is None:
            gathered.append(stay.unit.name)
        ask(self, stay)

    with mock.patch.object(Residency, "_ask", asked):
        step(sharded, [torch.arange(5)])
    assert gathered == ["embedding", "blocks.0", "head", "blocks.0"]


def test_an_evaluation_within_a_step_frees_nothing_that_is_held_for_it():
    sharded = shard(Chain(), Mesh.single(torch.device("cpu")), 3, options=Options(gather="step"))
    sharded.begin()
    sharded.micro(last=True)
    loss = sharded.module(torch.ones(1, 4))
    with torch.no_grad():
        sharded.module(torch.ones(1, 4))
    assert len(whole(sharded)) == 4
    loss.backward()
    sharded.end_micro()
    assert whole(sharded) == []
