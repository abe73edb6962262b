"""Gradients: the sums over ranks and micro-batches, and when each begins."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from meshwright.comm.collectives import Group
from meshwright.parallel.flat import Precision
from meshwright.parallel.reducer import Reducer
from meshwright.parallel.zero import Options, shard
from meshwright.spec.errors import UserError

sys.path.insert(0, str(Path(__file__).parent))
from sharding import STAGES, Chain, Tied, Twice, expected_gradients, gradients, inputs, module, single, step


@pytest.mark.parametrize("kind", [Twice, Tied])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("ranks_", "steps", "micros"), [(1, 2, 2), (2, 1, 1), (3, 2, 3)])
def test_gradients_are_sums(ranks, kind, stage, ranks_, steps, micros):
    expected = expected_gradients(kind, ranks_, steps, micros)
    for found, _ in ranks.run(ranks_, gradients, kind, stage, steps, micros):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


AXES = [
    ({"dp": 2, "cp": 2}, ("tp", "cp", "dp", "pp")),
    ({"cp": 3}, None),
    ({"dp": 2, "cp": 2}, ("dp", "tp", "cp", "pp")),
]


@pytest.mark.parametrize(("axes", "order"), AXES)
@pytest.mark.parametrize(("stage", "shard_"), [(0, None), (1, None), (3, None), (2, 2)])
def test_gradients_are_sums_over_data_and_context_ranks(ranks, stage, shard_, axes, order):
    world = math.prod(axes.values())
    if shard_ is not None and world % shard_:
        return
    expected = expected_gradients(Tied, world, 1, 2)
    more = {} if order is None else {"order": order}
    for found, rows in ranks.run(world, gradients, Tied, stage, 1, 2, Options(shard=shard_), axes=axes, **more):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)
        name = "+".join(axes)
        assert {row.key.axis for row in rows} == ({name} if shard_ is None else {f"{name}.inner", f"{name}.outer"})


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


@pytest.mark.parametrize(
    ("stage", "ranks_", "shard_"), [(0, 2, None), (1, 3, None), (2, 2, None), (1, 4, 2), (3, 4, 2), (2, 2, 1)]
)
def test_sums_that_travel_in_a_narrower_dtype(ranks, stage, ranks_, shard_):
    expected = expected_gradients(Tied, ranks_, 2, 2)
    narrow = Options(precision=Precision(reduce=torch.float32), shard=shard_)
    for found, _ in ranks.run(ranks_, gradients, Tied, stage, 2, 2, narrow):
        for name, gradient in expected.items():
            assert found[name].dtype == torch.float64
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5)
            assert gradient.norm() == 0 or not torch.equal(found[name], gradient)


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


def squares(mesh, stage):
    """The squares of all of a rank's shards, padding too, in a step whose buffers held NaN before."""
    sharded = shard(module(), mesh, stage)
    scratch = sharded.group.scratch
    buffers = [scratch.take(64, torch.float64).fill_(math.nan) for _ in range(8)]
    for buffer in buffers:
        scratch.give(buffer)
    step(sharded, [inputs(mesh.rank, 0)])
    return sum(unit.gradient_shard.square().sum().item() for unit in sharded.units if unit.trainable)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_padding_adds_nothing_to_the_norm(ranks, stage):
    """Whoever takes the norm of whole shards, as docs/zero.md says, has the padding in it."""
    expected = sum(gradient.square().sum().item() for gradient in expected_gradients(Twice, 3, 1, 1).values())
    assert sum(ranks.run(3, squares, stage)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_reductions_at_most_hold_buffers_and_none_from_one_backward_to_the_next(stage):
    sharded = single(Chain(), stage)
    x = torch.ones(1, 4)
    step(sharded, [x, x])
    scratch = sharded.group.scratch
    all_, lent = len(scratch.kept()), []
    for parameter in sharded.module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: lent.append(all_ - len(scratch.kept())))
    step(sharded, [x, x])
    # A layer's first gradient borrows a buffer beside those under way; with its second, its reduction is one of them.
    assert lent == 2 * [1, 1, 2, 2, 3, 2, 3, 2]


def places(mesh, stage, options):
    """Of each reduce-scatter: whether its sum lands in its own part of its input, or None where that is elsewhere."""
    sharded = shard(Chain().double(), mesh, stage, options=options)
    found = []
    reduce_scatter = Group.reduce_scatter

    def noted(self, out, t, **how):
        inside = out.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
        found.append(out.data_ptr() - t.data_ptr() == self.rank * out.nbytes if inside else None)
        return reduce_scatter(self, out, t, **how)

    with mock.patch.object(Group, "reduce_scatter", noted):
        step(sharded, [inputs(mesh.rank, 0), inputs(mesh.rank, 1)])
    return found


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("reduce", [None, torch.float32])
def test_a_reduction_in_place_ends_in_the_ranks_own_part(ranks, stage, reduce):
    """Elsewhere in its input it would write over what others have yet to read; the CPU's has a copy, NCCL's has not."""
    for found in ranks.run(2, places, stage, Options(precision=Precision(reduce=reduce))):
        assert len(found) == 4 * stage  # once a step or in both micro-batches
        assert False not in found and True in found


class FailedError(Exception):
    pass


def given_up_within_a_unit(mesh, stage, options):
    """The buffers kept before a step that fails when backward has half of a unit's gradients, after it, and after the
    next whole step."""
    sharded = shard(Chain().double(), mesh, stage, options=options)

    def kept():
        return sorted(buffer.data_ptr() for buffer in sharded.group.scratch.kept())

    for _ in range(2):
        step(sharded, [inputs(mesh.rank, 0)])
    found = [kept()]
    arrived = []

    def fail(gradient):
        arrived.append(1)
        if len(arrived) == 2:
            raise FailedError

    hooks = [parameter.register_hook(fail) for parameter in sharded.module.layers[0].parameters()]
    sharded.begin()
    sharded.micro(last=True)
    with pytest.raises(FailedError):
        sharded.module(inputs(mesh.rank, 0)).backward()
    for hook in hooks:
        hook.remove()
    found.append(kept())
    step(sharded, [inputs(mesh.rank, 0)])
    return *found, kept()


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_given_up_gives_each_buffer_back_once(ranks, stage):
    narrow = Options(precision=Precision(reduce=torch.float32))  # so that stages 0 and 1 borrow some too
    for before, failed, after in ranks.run(2, given_up_within_a_unit, stage, narrow):
        assert len(failed) < len(before)
        assert after == before and len(set(after)) == len(after)


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def run_micros(sharded, model, micros, between=lambda index: None):
    sharded.begin()
    for index in range(micros):
        sharded.micro(index, last=index == micros - 1)
        model(torch.full((2, 4), 1.0 + index)).sum().backward()
        sharded.end_micro()
        between(index)
    return [unit for unit in sharded.finish()]


@pytest.mark.parametrize(("stage", "calls"), [(0, 2), (1, 2), (2, 5)])
def test_python_is_called_for_the_first_and_the_last_gradient_only(stage, calls, monkeypatch):
    """Where autograd adds in between; stages 2 and 3 sum up in every micro-batch."""
    seen = []
    monkeypatch.setattr(Reducer, "_check_announced", lambda self, unit: seen.append(unit))
    model = Counted()
    sharded = single(model, stage)
    for _ in range(2):
        seen.clear()
        run_micros(sharded, model, 5)
        assert len(seen) == calls * len(list(model.parameters()))


def test_a_gradient_that_is_taken_away_in_between_is_not_lost_in_silence():
    model = Counted()
    sharded = single(model, 1)
    with pytest.raises(UserError, match=r"layers\.0\.weight\.grad was set between two micro-batches of a step"):
        run_micros(sharded, model, 3, lambda index: model.zero_grad(set_to_none=True))
    assert len(run_micros(sharded, model, 3)) == 3, "the next step begins anew"


def test_a_module_that_nobody_holds_is_freed():
    """Hooks hold what holds the parameters that hold the hooks."""
    model = Counted()
    sharded = single(model, 0)
    run_micros(sharded, model, 2)
    held = weakref.ref(model), weakref.ref(sharded)
    del model, sharded
    gc.collect()
    assert [each() for each in held] == [None, None]
