"""Faults planted where context ranks meet: found and named."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest import mock

import pytest
import torch

from meshwright.model.loss import IGNORE
from meshwright.parallel import zero as zero_module
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Data
from meshwright.train.inputs import Inputs, Share
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


def scaled_by_cp(mesh):
    """Each part's loss a mean over the parts, where their sum is asked for."""
    forward = Inputs.forward

    def wrong(self, model, **options):
        return forward(self, model, **options) / mesh.sizes["cp"]

    return mock.patch.object(Inputs, "forward", wrong)


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


GPT2 = ModelSpec(family="gpt2", vocab=37, hidden=16, layers=2, heads=2, max_seq=32, embd_dropout=0.1, resid_dropout=0.3)
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
