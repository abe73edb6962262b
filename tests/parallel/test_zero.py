"""The four stages on modules of all sorts: sums over ranks, shards, and who holds what when."""

from __future__ import annotations

import copy
import itertools
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.comm.mesh import Mesh
from meshwright.parallel.flat import Precision
from meshwright.parallel.reducer import Reducer
from meshwright.parallel.residency import Residency
from meshwright.parallel.zero import Options, Sharded, shard
from meshwright.spec.errors import UserError

STAGES = [0, 1, 2, 3]
PLAIN = Options()


class Twice(nn.Module):
    """A module used twice in one forward, one that is never used, a frozen one in the middle, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.idle = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        for layer in (self.layers[0], self.layers[1], self.frozen, self.layers[0], self.layers[2]):
            x = torch.tanh(layer(x)) * self.scale
        return x.square().sum()


class Tied(nn.Module):
    """An embedding whose weight is the output layer's too, and a block of several modules between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()) for _ in range(2)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed((x * 100).long().flatten().abs() % 5)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x)).square().sum()


def module(kind: type[nn.Module] = Twice) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def inputs(rank: int, micro: int) -> torch.Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + micro))


def step(sharded: Sharded, batches: list[torch.Tensor]) -> None:
    sharded.begin()
    for index, batch in enumerate(batches):
        sharded.micro(index, last=index == len(batches) - 1)
        sharded.module(batch).backward()
        sharded.end_micro()
    list(sharded.finish())


def gradients(mesh, kind, stage, steps, micros, options=PLAIN):
    sharded = shard(module(kind), mesh, stage, options=options)
    for number in range(steps):
        step(sharded, [inputs(mesh.rank, 7 * number + micro) for micro in range(micros)])
    rows = mesh.ledger.rows()
    return {placement.name: gradient.clone() for placement, gradient in sharded.named_gradients()}, rows


def expected_gradients(kind, ranks, steps, micros):
    plain = module(kind)
    for rank in range(ranks):
        for micro in range(micros):
            plain(inputs(rank, 7 * (steps - 1) + micro)).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in plain.named_parameters()
        if p.requires_grad
    }


@pytest.mark.parametrize("kind", [Twice, Tied])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("ranks_", "steps", "micros"), [(1, 2, 2), (2, 1, 1), (3, 2, 3)])
def test_gradients_are_sums(ranks, kind, stage, ranks_, steps, micros):
    expected = expected_gradients(kind, ranks_, steps, micros)
    for found, _ in ranks.run(ranks_, gradients, kind, stage, steps, micros):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


def test_stages_0_and_1_reduce_once_a_step_and_2_and_3_in_every_micro_batch(ranks):
    for stage, times in ((0, 1), (1, 1), (2, 3), (3, 3)):
        for _, rows in ranks.run(2, gradients, Twice, stage, 1, 3):
            reduced = [row.count for row in rows if row.key.reason == "zero.reduce"]
            assert reduced == [4] * times  # three blocks and the idle one; the frozen one never


@pytest.mark.parametrize("kind", [Twice, Tied])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("ranks_", "micros"), [(1, 2), (2, 1), (3, 3)])
@pytest.mark.parametrize("join", [30, 1000])
def test_gradients_of_joined_units_are_sums(ranks, kind, stage, ranks_, micros, join):
    expected = expected_gradients(kind, ranks_, 2, micros)
    for found, rows in ranks.run(ranks_, gradients, kind, stage, 2, micros, Options(join=join)):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)
        reduced = [row.count for row in rows if row.key.reason == "zero.reduce"]
        # Tied: the tied weight; two blocks, 56, and the head, 8. Twice: three blocks and the idle one, 80.
        each = {(Tied, 30): 2, (Tied, 1000): 2, (Twice, 30): 2, (Twice, 1000): 1}[kind, join]
        assert reduced == ([2 * each] if ranks_ > 1 else [])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_sharding(ranks, stage):
    expected = expected_gradients(Tied, 4, 2, 2)
    for found, rows in ranks.run(4, gradients, Tied, stage, 2, 2, Options(shard=2)):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)
        across = [row for row in rows if row.key.axis == "dp.outer"]
        assert [(row.key.reason, row.key.operation, row.count) for row in across] == [
            ("zero.replicas", "all_reduce", 2 * 4)  # tied, two blocks, head: once a step
        ]


def count(mesh, stage, options):
    """256 + 1 over two micro-batches, in bfloat16: bfloat16 itself cannot hold 257."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    sharded = shard(model, mesh, stage, options=options)
    step(sharded, [torch.full((1, 1), value, dtype=torch.bfloat16) for value in (256.0 / mesh.world, 1.0 / mesh.world)])
    ((_, gradient),) = sharded.named_gradients()
    return gradient.item()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2])
def test_fp32_gradients_hold_what_bf16_cannot(ranks, stage, world):
    wide = Options(precision=Precision(gradients=torch.float32, master=torch.float32))
    assert ranks.run(world, count, stage, wide) == [257.0] * world
    narrow = Options(precision=Precision(master=torch.float32))
    assert ranks.run(world, count, stage, narrow) == [256.0] * world


class Chain(nn.Module):
    """Four layers, and the sum of what they give: a loss."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def reductions(mesh, stage):
    sharded = shard(Chain(), mesh, stage)
    began, seen = [], []
    reduce = Reducer._reduce

    def watched(self, unit):
        began.append((unit.name, len(seen)))
        reduce(self, unit)

    for parameter in sharded.module.parameters():
        parameter.register_hook(lambda gradient: seen.append(1))
    with mock.patch.object(Reducer, "_reduce", watched):
        step(sharded, [torch.ones(1, 4)])
    return began


@pytest.mark.parametrize("stage", STAGES)
def test_a_unit_is_reduced_while_earlier_layers_run_backward(ranks, stage):
    for began in ranks.run(2, reductions, stage):
        assert [name for name, _ in began] == ["blocks.3", "blocks.2", "blocks.1", "blocks.0"]
        assert [there for _, there in began] == [2, 4, 6, 8]


def idle_rank(mesh, stage):
    sharded = shard(module(), mesh, stage)
    sharded.begin()
    sharded.micro(last=True)
    if mesh.rank == 0:
        sharded.module(inputs(0, 0)).backward()
    list(sharded.finish())
    return {placement.name: gradient.clone() for placement, gradient in sharded.named_gradients()}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_rank_without_a_batch_takes_part(ranks, stage):
    plain = module()
    plain(inputs(0, 0)).backward()
    first, second = ranks.run(2, idle_rank, stage)
    for name, gradient in first.items():
        assert torch.equal(gradient, second[name])
        expected = plain.get_parameter(name).grad
        assert torch.equal(gradient, torch.zeros_like(gradient) if expected is None else expected)


# -- updated parameters ------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("stage", STAGES)
def test_a_micro_batch_outside_a_step_is_refused(stage):
    sharded = single(Chain(), stage)
    step(sharded, [torch.ones(1, 4)])
    with pytest.raises(UserError, match=r"call begin\(\) before its first one"):
        sharded.micro(last=True)


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


def test_stage_3_has_no_state_dict():
    sharded = single(Chain(), 3)
    for part in (sharded.module, sharded.module.layers[1]):
        with pytest.raises(UserError, match=r"take them from Sharded\.named_parameters\(\)"):
            part.state_dict()


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


def given_up(mesh, stage):
    """A step that nobody finishes, and a whole one after it."""
    sharded = shard(module(Tied), mesh, stage)
    sharded.begin()
    sharded.micro(0, last=False)
    sharded.module(inputs(mesh.rank, 5)).backward()
    sharded.end_micro()
    sharded.micro(1, last=True)
    sharded.module(inputs(mesh.rank, 6)).backward()
    step(sharded, [inputs(mesh.rank, 0)])
    return {placement.name: gradient.clone() for placement, gradient in sharded.named_gradients()}


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_given_up_leaves_nothing_behind(ranks, stage):
    expected = expected_gradients(Tied, 2, 1, 1)
    for found in ranks.run(2, given_up, stage):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize("stage", [0, 1])
def test_a_last_micro_batch_that_nobody_announced_is_noticed(stage):
    sharded = single(module(), stage)
    sharded.begin()
    sharded.micro(last=False)
    sharded.module(inputs(0, 0)).backward()
    sharded.end_micro()
    with pytest.raises(AssertionError, match="was not announced"):
        list(sharded.finish())


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


# -- who holds what at stage 3 ---------------------------------------------------------------------------------------


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


# -- how a module is laid out ------------------------------------------------------------------------------------------


def single(module_: nn.Module, stage: int = 0) -> Sharded:
    return shard(module_, Mesh.single(torch.device("cpu")), stage)


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


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_the_last_step_are_gone(stage):
    sharded = single(module(), stage)
    for _ in range(2):
        step(sharded, [inputs(0, 0)])
    plain = module()
    plain(inputs(0, 0)).backward()
    for placement, gradient in sharded.named_gradients():
        expected = plain.get_parameter(placement.name).grad
        assert torch.equal(gradient, torch.zeros_like(gradient) if expected is None else expected)


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
