"""Planted faults: each must be found, and named by what it is."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

from meshwright.parallel.reducer import Reducer
from meshwright.parallel.zero import Sharded
from meshwright.spec.model import ModelSpec
from meshwright.train import passes as passes_module
from meshwright.train.inputs import Inputs
from meshwright.train.trainer import Trainer
from meshwright.verify.compare import BOUNDS
from meshwright.verify.judge import judge
from meshwright.verify.reference import reference
from meshwright.verify.unequal import proof_data
from meshwright.verify.worker import collect
from verify.proofs import FAULTY as RUN
from verify.proofs import STEPS


def nothing(mesh):
    return contextlib.nullcontext()


def scaled_by_dp(mesh):
    """Data parallelism that averages where it should sum."""
    finish = Sharded.finish

    def wrong(self):
        for unit in finish(self):
            unit.gradients.div_(self.group.size)
            yield unit

    return mock.patch.object(Sharded, "finish", wrong)


def unit_never_reduced(mesh):
    """It counts as reduced, and each rank goes on with its own gradients of it."""
    reduce = Reducer._reduce

    def wrong(self, unit):
        if unit.name == "blocks.1":
            unit.summed = True
        else:
            reduce(self, unit)

    return mock.patch.object(Reducer, "_reduce", wrong)


def copy_perturbed(mesh):
    """One element of one replica, by a millionth."""
    init = Trainer.__init__

    def wrong(self, run, its_mesh):
        init(self, run, its_mesh)
        if its_mesh.rank == 1:
            with torch.no_grad():
                self.model.model.norm.weight[3] += 1e-6

    return mock.patch.object(Trainer, "__init__", wrong)


def collective_too_many(mesh):
    finish = Sharded.finish

    def wrong(self):
        yield from finish(self)
        self.group.all_reduce(torch.zeros(4), reason="zero.reduce", phase="backward")

    return mock.patch.object(Sharded, "finish", wrong)


def part_counted_twice(mesh):
    """Both ranks compute the sequence at the border of their parts."""
    micro_batches = passes_module.micro_batches

    def wrong(sequences, ranks, rank, micro):
        parts = micro_batches(sequences, ranks, rank, micro)
        return [range(parts[0].start - 1, parts[0].stop), *parts[1:]] if rank == 1 else parts

    return mock.patch.object(passes_module, "micro_batches", wrong)


def stale_buffer(mesh):
    """The last step's gradients are still there when the next step begins."""
    begin = Sharded.begin

    def wrong(self):
        kept = {name: p.grad for name, p in self._parameters.items()}
        begin(self)
        for name, grad in kept.items():
            self._parameters[name].grad = grad

    return mock.patch.object(Sharded, "begin", wrong)


def reduced_too_early(mesh):
    """Each unit is reduced one gradient before its last. Waited for at once, so that the outcome is no race."""
    micro, reduce = Reducer.micro, Reducer._reduce

    def wrong(self, index, *, last):
        micro(self, index, last=last)
        for unit in self._order:
            unit.missing -= len(unit.members) > 1

    def at_once(self, unit):
        reduce(self, unit)
        unit.reduction.pending.wait()

    def unguarded(self, unit):  # the last gradient comes when its unit seems to have them all
        pass

    return mock.patch.multiple(Reducer, micro=wrong, _reduce=at_once, _check_announced=unguarded)


def norm_of_one_unit(mesh):
    """Clipping by the norm of a part of the parameters."""
    finish = Sharded.finish
    return mock.patch.object(Sharded, "finish", lambda self: iter(list(finish(self))[:2]))


def copy_in_an_attribute(mesh):
    """One rank keeps the last step's gradients of a unit on the model, where nobody looks for them."""
    update = Trainer.update

    def wrong(self, step, totals):
        if self.mesh.rank == 1:
            self.model.last = self.sharded.units[-1].gradients.clone()
        return update(self, step, totals)

    return mock.patch.object(Trainer, "update", wrong)


def copies_in_a_closure(mesh):
    """A hook that remembers what it has seen, step after step."""
    init, seen = Trainer.__init__, []

    def wrong(self, run, its_mesh):
        init(self, run, its_mesh)
        self.model.model.norm.register_forward_hook(lambda module, args, out: seen.append(out[0].detach().clone()))

    return mock.patch.object(Trainer, "__init__", wrong)


def losses_kept_with_their_graph(mesh):
    """The oldest leak of all: a history of losses that were never detached."""
    init = Trainer.__init__

    def wrong(self, run, its_mesh):
        init(self, run, its_mesh)
        history = []
        self.model.register_forward_hook(lambda module, args, loss: history.append(loss))

    return mock.patch.object(Trainer, "__init__", wrong)


def own_gradient_buffer(mesh):
    """A parameter outside of every unit, with a gradient that only the parameter knows."""
    init = Trainer.__init__

    def wrong(self, run, its_mesh):
        init(self, run, its_mesh)
        stray = torch.nn.Parameter(torch.zeros(7, 11))
        stray.sum().backward()
        self.stray = stray

    return mock.patch.object(Trainer, "__init__", wrong)


def table_twice_as_long(mesh):
    """The rotary table has grown to what nobody asked for."""
    init = Trainer.__init__

    def wrong(self, run, its_mesh):
        init(self, run, its_mesh)
        rotary = self.model.rotary
        rotary.length *= 2
        rotary.rebuild(mesh.device)

    return mock.patch.object(Trainer, "__init__", wrong)


def two_seeds(mesh):
    """Every rank initialises from its own seed."""
    init = Trainer.__init__
    return mock.patch.object(
        Trainer, "__init__", lambda self, run, m: init(self, run.model_copy(update={"seed": run.seed + m.rank}), m)
    )


def masks_of_local_rows(mesh):
    """Dropout that asks for a sequence's place in the micro-batch where the global batch is meant."""
    key = Inputs.key
    return mock.patch.object(Inputs, "key", lambda self, seed, step, rows: key(self, seed, step, rows - rows[0]))


FAULTS = {
    scaled_by_dp: ("gradient differs after step 1, on every rank: all", "by exactly 1 / dp = 1/2"),
    unit_never_reduced: ("9 of 21 tensors (model.layers.1.", "traffic: all_reduce over dp, zero.reduce"),
    copy_perturbed: ("parameter differs before the first step, on rank 1 only: 1 of 21 tensors (model.norm.weight)",),
    collective_too_many: ("traffic: all_reduce over dp, zero.reduce, backward: collectives: predicted 4", "recorded 5"),
    part_counted_twice: ("valid tokens, step 1: expected",),
    stale_buffer: ("gradient differs after step 2, on every rank: all",),
    reduced_too_early: ("gradient differs after step 1",),
    norm_of_one_unit: ("gradient norm, step 1: expected", "exp_avg differs after step 1"),
    copy_in_an_attribute: (
        "memory: other, bytes: predicted 0, rank 1 holds 4864",
        "memory: rank 1 holds beside what it declares: float64[608]",
    ),
    # Two steps of three micro-batches on rank 0, the last of them full.
    copies_in_a_closure: ("memory: other, bytes: predicted 0, rank 0 holds 7680", "6 × float64[10, 16]"),
    losses_kept_with_their_graph: ("memory: other, bytes: predicted 0", "6 × float64[] with its autograd graph"),
    own_gradient_buffer: ("memory: other, bytes: predicted 0, rank 0 holds 616", "2 × float32[7, 11]"),
    table_twice_as_long: ("memory: buffers, bytes: predicted 4096, rank 0 holds 8192",),
    two_seeds: ("parameter differs before the first step, on rank 1 only: 16 of 21 tensors",),
}


def faulty(mesh, fault, run=RUN):
    with globals()[fault](mesh):
        return collect(run, mesh, proof_data(run), STEPS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_found_and_named(ranks, fault):
    found = ranks.run(2, faulty, fault.__name__)
    report = judge(RUN, STEPS, found, reference(RUN, proof_data(RUN), STEPS))
    assert not report.passed
    text = "\n".join(report.findings)
    for words in FAULTS[fault]:
        assert words in text, text


def update_not_published(mesh):
    """Master weights are updated, and the model goes on with what it has."""
    return mock.patch.object(Sharded, "publish", lambda self, unit: None)


NARROW = {
    scaled_by_dp: ("gradient differs after step 1, on every rank: all 21 tensors", "gradient norm, step 1: expected"),
    unit_never_reduced: ("gradient differs after step 1, on every rank: 9 of 21 tensors (model.layers.1.",),
    part_counted_twice: ("gradient differs after step 1, on every rank", "valid tokens, step 1: expected"),
    reduced_too_early: ("gradient differs after step 1, on every rank",),
    norm_of_one_unit: ("exp_avg differs after step 1, on every rank: all 21 tensors",),
    update_not_published: ("gradient differs after step 2, on every rank",),
    two_seeds: ("parameter differs before the first step, on rank 1 only: 16 of 21 tensors",),
}


@pytest.mark.parametrize("fault", [nothing, *NARROW], ids=lambda f: f.__name__)
def test_two_bytes_hide_no_fault(ranks, monkeypatch, fault):
    """Also on a processor whose kernels round so much that one device's difference is all there is to go by."""
    run = RUN.model_copy(update={"precision": "bf16"})
    found = ranks.run(2, faulty, fault.__name__, run)
    for fixed, wider in ((BOUNDS["bf16"], False), (2e-3, True)):
        monkeypatch.setitem(BOUNDS, "bf16", fixed)
        report = judge(run, STEPS, found)
        assert all((c.bound > fixed) == wider for c in report.tensors if c.kind == "gradient")
        text = "\n".join(report.findings)
        assert report.passed == (fault is nothing), text
        for words in NARROW.get(fault, ()):
            assert words in text, text


def test_a_mask_that_knows_the_layout_is_found(ranks):
    model = ModelSpec(family="gpt2", vocab=37, hidden=16, layers=2, heads=2, max_seq=32, resid_dropout=0.1)
    run = RUN.model_copy(update={"model": model})
    report = judge(run, STEPS, ranks.run(2, faulty, "masks_of_local_rows", run), reference(run, proof_data(run), STEPS))
    assert not report.passed
    text = "\n".join(report.findings)
    assert "gradient differs after step 1" in text and "loss, step 1: expected" in text, text


def test_a_tensor_that_a_rank_lacks_is_a_difference(ranks):
    expected = reference(RUN, proof_data(RUN), STEPS)
    incomplete = reference(RUN, proof_data(RUN), STEPS)
    del incomplete.tensors["gradient/1/lm_head.weight"]
    report = judge(RUN, STEPS, [incomplete], expected)
    assert [c.name for c in report.tensors if not c.passed] == ["lm_head.weight"]


def test_a_tensor_that_only_a_rank_has_is_a_difference(ranks):
    expected = reference(RUN, proof_data(RUN), STEPS)
    surplus = reference(RUN, proof_data(RUN), STEPS)
    surplus.tensors["parameter/1/lm_head.copy"] = surplus.tensors["parameter/1/lm_head.weight"]
    report = judge(RUN, STEPS, [surplus], expected)
    assert [c.name for c in report.tensors if not c.passed] == ["lm_head.copy"]
