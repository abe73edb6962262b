"""Planted faults: each must be found, and named by what it is."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from meshwright.model.dropout import Dropout
from meshwright.model.loss import IGNORE
from meshwright.parallel import zero as zero_module
from meshwright.parallel.partial import PartialSums
from meshwright.parallel.products import Rows, summed_over
from meshwright.parallel.reducer import Reducer
from meshwright.parallel.vocabulary import VocabularyEmbedding, _Part
from meshwright.parallel.zero import Sharded
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, LrSchedule, Optimizer, RunSpec
from meshwright.train import trainer as trainer_module
from meshwright.train.inputs import Inputs, Share
from meshwright.train.trainer import Trainer
from meshwright.verify.compare import compare_tensors, diagnose
from meshwright.verify.judge import judge
from meshwright.verify.reference import reference
from meshwright.verify.unequal import proof_data
from meshwright.verify.worker import collect

STEPS = 2
RUN = RunSpec(
    model=ModelSpec(family="llama", vocab=37, hidden=16, layers=2, heads=2, ffn=24, max_seq=32),
    data=Data(seq_len=10),
    batch=Batch(sequences=11, micro=2),
    layout=Layout(dp=2, zero_join=0),
    precision="float64",
    optimizer=Optimizer(clip=0.5),
    lr_schedule=LrSchedule(warmup=2),
)


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
    micro_batches = trainer_module.micro_batches

    def wrong(sequences, ranks, rank, micro):
        parts = micro_batches(sequences, ranks, rank, micro)
        return [range(parts[0].start - 1, parts[0].stop), *parts[1:]] if rank == 1 else parts

    return mock.patch.object(trainer_module, "micro_batches", wrong)


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


# -- tensor ranks ------------------------------------------------------------------------------------------------------


def row_bias_on_every_rank(mesh):
    """Added to the parts, and so as often as there are ranks."""

    def wrong(self, x):
        part = self._product(x)
        return summed_over(self.line, self.reason, part if self.bias is None else part + self.bias)

    return mock.patch.object(Rows, "forward", wrong)


def not_summed(*words):
    """Gradients of which each tensor rank has a part stay parts."""
    init = PartialSums.__init__

    def wrong(self, its_mesh, units):
        init(self, its_mesh, units)
        for group, pieces in self._pieces.items():
            self._pieces[group] = [p for p in pieces if not any(word in p[1].placement.name for word in words)]
        self._pieces = {group: pieces for group, pieces in self._pieces.items() if pieces}

    return mock.patch.object(PartialSums, "__init__", wrong)


def norm_not_summed(mesh):
    return not_summed("layernorm", "model.norm")


def key_value_copies_not_summed(mesh):
    return not_summed("k_proj", "v_proj")


def head_norms_not_summed(mesh):
    return not_summed("q_norm", "k_norm")


def row_biases_not_summed(mesh):
    return not_summed("o_proj.bias", "down_proj.bias")


def summed_although_whole(mesh):
    """Norms that have seen the whole sequence on every rank, summed all the same."""
    init = PartialSums.__init__

    def wrong(self, its_mesh, units):
        init(self, its_mesh, units)
        for unit in units:
            for piece in unit.pieces:
                if piece.placement.partial is None and not piece.placement.cuts:
                    self._pieces.setdefault(its_mesh.group("tp"), []).append((unit, piece))

    return mock.patch.object(PartialSums, "__init__", wrong)


def one_mask_for_all_parts(mesh):
    """Every rank drops as the first one does."""
    forward = Dropout.forward

    def wrong(self, x, key):
        self.part = (0, self.part[1])
        return forward(self, x, key)

    return mock.patch.object(Dropout, "forward", wrong)


def words_that_are_not_there(mesh):
    """What fills a part of the vocabulary up takes its share of the softmax."""
    init = _Part.__init__

    def wrong(self, logits, targets, vocab, line):
        init(self, logits, targets, vocab, line)
        self.words = logits.size(-1)

    return mock.patch.object(_Part, "__init__", wrong)


def words_of_another_rank(mesh):
    """An embedding that looks words up that others have, too."""

    def wrong(self, indices):
        rows = self.weight.size(0)
        found = F.embedding((indices - rows * self.line.group.rank).remainder(rows), self.weight)
        return summed_over(self.line, "tp.embed", found)

    return mock.patch.object(VocabularyEmbedding, "forward", wrong)


QWEN = RUN.model.model_copy(
    update={"heads": 2, "kv_heads": 1, "qk_norm": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
)
DROPS = ModelSpec(
    family="gpt2", vocab=37, hidden=16, layers=2, heads=2, max_seq=32,
    embd_dropout=0.1, attn_dropout=0.2, resid_dropout=0.3,
)  # fmt: skip
ALL = None
TENSOR_FAULTS = {
    # The model, sp, and which gradients differ first: all, or those whose names have one of these words.
    # Biases begin as zeros, so nothing differs before they have moved.
    row_bias_on_every_rank: (QWEN, False, 2, ALL),
    norm_not_summed: (QWEN, True, 1, ("layernorm", "model.norm")),
    key_value_copies_not_summed: (QWEN, False, 1, ("k_proj", "v_proj")),
    head_norms_not_summed: (QWEN, False, 1, ("q_norm", "k_norm")),
    row_biases_not_summed: (QWEN, True, 1, ("o_proj.bias", "down_proj.bias")),
    summed_although_whole: (QWEN, False, 1, ("layernorm", "model.norm", "o_proj.bias", "down_proj.bias")),
    one_mask_for_all_parts: (DROPS, True, 1, ALL),
    words_that_are_not_there: (QWEN, False, 1, ALL),
    words_of_another_rank: (QWEN, False, 1, ALL),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS, ids=lambda f: f.__name__)
def test_faults_of_tensor_ranks_are_found(ranks, fault):
    model, sp, step, words = TENSOR_FAULTS[fault]
    run = RUN.model_copy(
        update={
            "model": model,
            "layout": Layout(dp=1, tp=2, sp=sp),
            "attention": "explicit" if model.drops else "sdpa",
            "lr_schedule": LrSchedule(warmup=0),
        }
    )
    expected = reference(run, proof_data(run), STEPS)
    tensors = compare_tensors(ranks.run(2, faulty, fault.__name__, run, axes={"tp": 2}), expected, 1e-10)
    text = "\n".join(diagnose(tensors, {"tp": 2}, 2))
    assert f"gradient differs after step {step}" in text, text
    gradients = {c.name for c in tensors if c.kind == "gradient"}
    first = {c.name for c in tensors if c.kind == "gradient" and c.since == step}
    if words is ALL:
        assert len(first) > 0.9 * len(gradients)
    else:
        assert first == {name for name in gradients if any(word in name for word in words)}, first


# -- context ranks ---------------------------------------------------------------------------------------------------


def scaled_by_cp(mesh):
    """Each part's loss a mean over the parts, where their sum is asked for."""
    loss = Inputs.loss

    def wrong(self, model, dropout=None):
        return loss(self, model, dropout) / mesh.sizes["cp"]

    return mock.patch.object(Inputs, "loss", wrong)


def positions_of_the_part(mesh):
    """Every rank counts its tokens from 0."""
    of = Share.of

    def wrong(self, tokens, targets, documents=None):
        found = of(self, tokens, targets, documents)
        return replace(found, positions=torch.arange(found.tokens.size(1)))

    return mock.patch.object(Share, "of", wrong)


def targets_made_after_cutting(mesh):
    """The last of each run gets the first of the next one that the rank has, and not the one that follows it."""
    of = Share.of

    def wrong(self, tokens, targets, documents=None):
        found = of(self, tokens, targets, documents)
        shifted = torch.cat((found.tokens[:, 1:], torch.full_like(found.tokens[:, :1], IGNORE)), dim=1)
        return replace(found, targets=torch.where(found.targets == IGNORE, IGNORE, shifted))

    return mock.patch.object(Share, "of", wrong)


def not_reduced_over_context_ranks(mesh):
    """Gradients summed over the data ranks only."""
    return mock.patch.object(zero_module, "STATE_AXES", ("dp",))


def masks_of_the_part(mesh):
    """Dropout that takes a part for the beginning of a sequence."""
    key = Inputs.key

    def wrong(self, seed, step, rows):
        found = key(self, seed, step, rows)
        return replace(found, positions=torch.arange(len(found.positions)))

    return mock.patch.object(Inputs, "key", wrong)


GPT2 = DROPS.model_copy(update={"attn_dropout": 0.0})
CONTEXT_FAULTS = {
    scaled_by_cp: RUN.model,
    positions_of_the_part: RUN.model,
    targets_made_after_cutting: RUN.model,
    not_reduced_over_context_ranks: RUN.model,
    masks_of_the_part: GPT2,
}


@pytest.mark.parametrize("fault", [nothing, *CONTEXT_FAULTS], ids=lambda f: f.__name__)
def test_faults_of_context_ranks_are_found(ranks, fault):
    model = CONTEXT_FAULTS.get(fault, GPT2)
    options = {"model": model, "layout": Layout(dp=1, cp=2, zero=1), "data": Data(seq_len=12)}
    run = RUN.model_copy(update=options)
    expected = reference(run, proof_data(run), STEPS)
    tensors = compare_tensors(ranks.run(2, faulty, fault.__name__, run, axes={"cp": 2}), expected, 1e-10)
    text = "\n".join(diagnose(tensors, {"cp": 2}, 2))
    if fault is nothing:
        assert tensors[0].passed, text
        return
    assert "gradient differs after step 1" in text, text
    if fault is scaled_by_cp:
        assert "are scaled by exactly 1 / cp = 1/2" in text


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("model", [QWEN, DROPS], ids=["qwen", "gpt2"])
def test_without_a_fault_nothing_is_found_on_tensor_ranks(ranks, model, sp):
    attention = "explicit" if model.drops else "sdpa"
    run = RUN.model_copy(update={"model": model, "layout": Layout(dp=1, tp=2, sp=sp), "attention": attention})
    found = ranks.run(2, faulty, "nothing", run, axes={"tp": 2})
    assert compare_tensors(found, reference(run, proof_data(run), STEPS), 1e-10)[0].passed
