"""What is used out of turn, or cannot be sharded, is refused in words."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.comm.mesh import Mesh
from meshwright.parallel.zero import Options, shard
from meshwright.spec.errors import UserError

sys.path.insert(0, str(Path(__file__).parent))
from sharding import PLAIN, STAGES, Chain, inputs, module, single, step


class Outside(nn.Module):
    """Uses a weight outside the forward of the module that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        x = self.layers[0](x)
        return F.linear(x, self.layers[1].weight).sum()


def outside(mesh, stage):
    sharded = shard(Outside(), mesh, stage)
    for unit in sharded.units:
        sharded.publish(unit)
    try:
        step(sharded, [torch.ones(1, 4)])
    except UserError as error:
        sharded.settle()
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("stage", "words"), [(1, "before its update was there"), (3, "where it is not gathered")])
def test_a_weight_used_outside_its_module_is_refused(ranks, stage, words):
    for said in ranks.run(1 if stage == 3 else 2, outside, stage):
        assert "layers.1.weight was used outside the forward of the module that owns it" in said
        assert words in said


def penalised(mesh, stage):
    """Two steps whose loss has an L2 term over all parameters beside what forward gives: the last loss, gradients."""
    sharded = shard(Chain().double(), mesh, stage)
    sharded.fill(lambda piece, local: local.fill_(0.1))
    for number in range(2):
        sharded.begin()
        sharded.micro(last=True)
        out = sharded.module(torch.ones(1, 4, dtype=torch.float64))
        loss = out + sum(p.square().sum() for p in sharded.module.parameters())
        loss.backward()
        for unit in list(sharded.finish()):
            if number == 0:
                unit.master.fill_(0.2)
                sharded.publish(unit)
    return loss.item(), {placement.name: gradient.clone() for placement, gradient in sharded.named_gradients()}


@pytest.mark.parametrize("stage", STAGES)
def test_an_l2_term_in_the_loss(ranks, stage):
    """Right below stage 3, where updates are there once forward is over; NaN at 3, as docs/zero.md says."""
    plain = Chain().double()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.fill_(0.2)
    expected = plain(torch.ones(1, 4, dtype=torch.float64)) + sum(p.square().sum() for p in plain.parameters())
    expected.backward()
    for loss, found in ranks.run(2, penalised, stage):
        assert math.isnan(loss) if stage == 3 else loss == pytest.approx(expected.item(), rel=1e-12)
        for name, gradient in found.items() if stage < 3 else ():
            torch.testing.assert_close(gradient, 2 * plain.get_parameter(name).grad, rtol=1e-12, atol=1e-12)


class OneOfThree(nn.Module):
    """Its parent's forward uses `b` itself, or not at all; the others are called."""

    def __init__(self, uses_b: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.uses_b = uses_b

    def forward(self, x):
        x = self.a(x)
        return {"loss": self.c(F.linear(x, self.b.weight, self.b.bias) if self.uses_b else x).sum()}


def one_of_three(mesh, stage, uses_b):
    """What two steps with an update between them end in, and whether forward left a gather under way."""
    units = {name: [f"{name}.weight", f"{name}.bias"] for name in "abc"}
    sharded = shard(OneOfThree(uses_b), mesh, stage, units)
    late = []
    for _ in range(2):
        sharded.begin()
        sharded.micro(last=True)
        try:
            loss = sharded.module(torch.ones(1, 4))["loss"]
        except UserError as error:
            return str(error), late
        late.append(any(unit.gather is not None for unit in sharded.units))
        loss.backward()
        for unit in list(sharded.finish()):
            sharded.publish(unit)
    sharded.settle()
    return "", late


@pytest.mark.parametrize("stage", [1, 2])
def test_a_weight_used_by_the_parents_forward_is_refused_when_that_ends(ranks, stage):
    """Before backward, where torch might speak first of in-place operations; a unit that nobody uses is fine."""
    for said, _ in ranks.run(2, one_of_three, stage, True):
        assert "b.weight was used outside the forward of the module that owns it, before its update was there" in said
    assert ranks.run(2, one_of_three, stage, False) == [("", [False, False])] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_finish_that_nobody_iterates_over_is_refused(stage):
    sharded = single(Chain(), stage)
    step(sharded, [torch.ones(1, 4)])
    sharded.begin()
    sharded.micro(last=True)
    sharded.module(torch.ones(1, 4)).backward()
    sharded.end_micro()
    sharded.finish()
    with pytest.raises(UserError, match=r"publish of blocks\.0 before finish\(\) gave it; exhaust it before publish"):
        sharded.publish(sharded.units[0])
    with pytest.raises(UserError, match=r"for unit in sharded\.finish\(\)"):
        sharded.begin()
    step(sharded, [torch.ones(1, 4)])
    sharded.publish(sharded.units[0])


@pytest.mark.parametrize("stage", STAGES)
def test_a_micro_batch_outside_a_step_is_refused(stage):
    sharded = single(Chain(), stage)
    step(sharded, [torch.ones(1, 4)])
    with pytest.raises(UserError, match=r"call begin\(\) before its first one"):
        sharded.micro(last=True)


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_finish_in_a_step_is_refused(stage):
    """Sums over others than the data ranks would be taken of sums."""
    sharded = single(Chain(), stage)
    step(sharded, [torch.ones(1, 4)])
    with pytest.raises(UserError, match=r"finish\(\) outside a step"):
        sharded.finish()


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_backward_in_a_micro_batch_is_refused(stage):
    sharded = single(module(), stage)
    sharded.begin()
    sharded.micro(last=True)
    first, second = sharded.module(inputs(0, 0)), sharded.module(inputs(0, 1))
    first.backward()
    # At stage 3 the weights are gone by then, and torch says so itself.
    kind, words = (RuntimeError, "storage of size 0") if stage == 3 else (UserError, "a second backward in one micro")
    with pytest.raises(kind, match=words):
        second.backward()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_that_nobody_announced_is_refused(stage):
    sharded = single(module(), stage)
    sharded.begin()
    with pytest.raises(UserError, match="a backward outside a micro-batch"):
        sharded.module(inputs(0, 0)).backward()
    sharded.micro(last=True)
    sharded.module(inputs(0, 0))
    sharded.begin()  # the step before was given up in a micro-batch
    with pytest.raises(UserError, match="a backward outside a micro-batch"):
        sharded.module(inputs(0, 0)).backward()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_last_micro_batch_that_nobody_announced_is_noticed(stage):
    sharded = single(module(), stage)
    sharded.begin()
    sharded.micro(last=False)
    sharded.module(inputs(0, 0)).backward()
    sharded.end_micro()
    with pytest.raises(AssertionError, match="was not announced"):
        list(sharded.finish())


def test_stage_3_has_no_state_dict():
    sharded = single(Chain(), 3)
    for part in (sharded.module, sharded.module.layers[1]):
        with pytest.raises(UserError, match=r"take them from Sharded\.named_parameters\(\)"):
            part.state_dict()


@pytest.mark.parametrize("stage", [2, 3])
def test_units_are_joined_below_stage_2_only(stage):
    with pytest.raises(UserError, match=f"joined at stages 0 and 1 only, and this is stage {stage}"):
        shard(nn.Linear(2, 2), Mesh.single(torch.device("cpu")), stage, options=Options(join=5))


@pytest.mark.parametrize(("stage", "shard_", "words"), [(0, 1, "stage 0 shards nothing"), (1, 2, "does not divide")])
def test_shards_that_do_not_fit_are_refused(stage, shard_, words):
    with pytest.raises(UserError, match=words):
        shard(nn.Linear(2, 2), Mesh.single(torch.device("cpu")), stage, options=Options(shard=shard_))


@pytest.mark.parametrize(
    ("stage", "options", "words"),
    [
        (4, PLAIN, "zero=4: there is no such stage; use 0, 1, 2 or 3"),
        (-1, PLAIN, "zero=-1: there is no such stage"),
        (3, Options(gather="forward"), "zero_gather=forward: use micro or step"),
        (3, Options(ahead=-1), "zero_ahead=-1: use 0 or more"),
    ],
)
def test_stages_and_options_that_are_none_are_refused(stage, options, words):
    with pytest.raises(UserError, match=words):
        shard(nn.Linear(2, 2), Mesh.single(torch.device("cpu")), stage, options=options)


def test_a_module_is_sharded_once():
    model = Chain()
    single(model)
    for again in (model, model.layers[0], nn.Sequential(model)):
        with pytest.raises(UserError, match="sharded already"):
            single(again)
