"""Saved tensors that wait on the host: the same bits, once a storage, and nothing left behind.

There is no accelerator here, so the CPU plays one: its tensors are copied to other memory of the CPU and back.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.model.build import build
from meshwright.model.dropout import DropoutKey
from meshwright.model.init import initialise_
from meshwright.parallel.offload import Offload
from meshwright.parallel.recompute import Recompute
from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import RunSpec
from meshwright.train.trainer import Trainer
from meshwright.verify.activations import measure

CPU = torch.device("cpu")
SPEC = ModelSpec(family="gpt2", vocab=37, hidden=24, layers=4, heads=4, max_seq=32, resid_dropout=0.2)


@pytest.mark.parametrize("mode", [None, {}, {"every": 2}, {"keep": ["linear"]}], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_gradients_have_the_same_bits_and_the_host_holds_what_was_saved(attention, mode):
    def run(offload: Offload | None):
        model = build(SPEC, attention=attention)
        initialise_(model, 1)
        model.train()
        if mode is not None:
            Recompute(model.blocks, **mode)
        tokens, targets = torch.randint(37, (2, 3, 20), generator=torch.Generator().manual_seed(0))
        key = DropoutKey(1, 0, torch.arange(3))
        if offload is None:
            saved = measure(model, lambda: model(tokens, targets, dropout=key), inputs=(tokens, targets)).total
            loss = model(tokens, targets, dropout=key)
        else:
            with offload.forward([*model.parameters(), *model.buffers(), tokens, targets]):
                loss = model(tokens, targets, dropout=key)
            saved = offload.held
        loss.backward()
        return saved, [parameter.grad for parameter in model.parameters()]

    offload = Offload(CPU)
    saved, expected = run(None)
    held, found = run(offload)
    assert all(map(torch.equal, found, expected))
    assert held == saved == offload.most
    assert offload.held == 0


def test_a_storage_that_changes_between_two_savings_is_moved_as_it_was_at_each():
    x = torch.ones(4, requires_grad=True)
    offload = Offload(CPU)
    with offload.forward([]):
        buffer = torch.zeros(2, 4)
        first = x * buffer[0].fill_(2)
        second = x * buffer[1].fill_(3)
    (first + second).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 5.0))


class Both(torch.autograd.Function):
    """The product of two tensors; notes whether backward gets them in one memory."""

    together: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        Both.together.append(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())
        return grad * b, grad * a


def test_views_of_one_storage_go_to_the_host_once_and_come_back_once():
    x = torch.ones(8, requires_grad=True)
    offload = Offload(CPU)
    Both.together.clear()
    with offload.forward([x]):
        buffer = x * 2
        loss = Both.apply(buffer[:4], buffer[4:]).sum()
    assert offload.held == offload.most == buffer.untyped_storage().nbytes()
    loss.backward()
    assert Both.together == [True]
    assert torch.equal(x.grad, torch.full((8,), 4.0))


def test_what_must_stay_is_saved_where_it_is():
    weight = torch.ones(4, requires_grad=True)
    offload = Offload(CPU)
    with offload.forward([weight]):
        loss = (weight[:2] * weight[2:]).sum()
    assert offload.most == 0
    loss.backward()


def test_the_cpu_is_refused_in_words():
    with pytest.raises(UserError, match="on the CPU it is there already: use offload=none"):
        Trainer(RunSpec(layout=Layout(dp=1, offload="activations")), Mesh.single(CPU))
