"""Faults planted where tensor ranks meet: found and named."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch.nn.functional as F

from meshwright.model.dropout import Dropout
from meshwright.parallel.partial import PartialSums
from meshwright.parallel.products import Rows, summed_over
from meshwright.parallel.vocabulary import VocabularyEmbedding, _Part
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import LrSchedule
from meshwright.verify.compare import compare_tensors, diagnose
from meshwright.verify.reference import reference
from meshwright.verify.unequal import proof_data
from meshwright.verify.worker import collect
from verify.proofs import FAULTY as RUN
from verify.proofs import STEPS


def nothing(mesh):
    return contextlib.nullcontext()


def faulty(mesh, fault, run=RUN):
    with globals()[fault](mesh):
        return collect(run, mesh, proof_data(run), STEPS)


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


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("model", [QWEN, DROPS], ids=["qwen", "gpt2"])
def test_without_a_fault_nothing_is_found_on_tensor_ranks(ranks, model, sp):
    attention = "explicit" if model.drops else "sdpa"
    run = RUN.model_copy(update={"model": model, "layout": Layout(dp=1, tp=2, sp=sp), "attention": attention})
    found = ranks.run(2, faulty, "nothing", run, axes={"tp": 2})
    assert compare_tensors(found, reference(run, proof_data(run), STEPS), 1e-10)[0].passed
