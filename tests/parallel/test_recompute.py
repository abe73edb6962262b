"""Blocks computed again in backward: the same bits, and what is kept meanwhile."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.model.build import build
from meshwright.model.dropout import DropoutKey
from meshwright.model.init import initialise_
from meshwright.parallel.recompute import Recompute, _Frame
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec
from meshwright.verify.activations import measure
from parallel.blocks import Blocks, Counts, batch

LLAMA = ModelSpec(family="llama", vocab=37, hidden=24, layers=5, heads=4, kv_heads=2, ffn=40, max_seq=32)
GPT2 = ModelSpec(family="gpt2", vocab=37, hidden=24, layers=5, heads=4, max_seq=32)
DROPPED = GPT2.model_copy(update={"resid_dropout": 0.3, "embd_dropout": 0.2, "attn_dropout": 0.4})
MODES = {
    "full": {},
    "every 2": {"every": 2},
    "every 9": {"every": 9},
    "linear": {"keep": ["linear"]},
    "attention": {"keep": ["attention"]},
    "all": {"keep": ["linear", "attention", "softmax", "activation"]},
}


def gradients(
    spec: ModelSpec, attention: str, dtype: torch.dtype, mode: dict[str, object] | None, dropout: str = "counter"
) -> list[torch.Tensor]:
    model = build(spec, attention=attention, loss="full", dropout=dropout, dtype=dtype)
    initialise_(model, 1)
    model.train()
    if mode is not None:
        Recompute(model.blocks, rng=dropout == "torch", **mode)
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):  # two micro-batches, the second onto the first one's gradients
        tokens, targets = torch.randint(spec.vocab, (2, 3, 20), generator=generator)
        model(tokens, targets, dropout=DropoutKey(1, 0, torch.arange(3))).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("spec", "attention", "dropout"),
    [
        (LLAMA, "sdpa", "counter"),
        (LLAMA, "explicit", "counter"),
        (GPT2, "sdpa", "counter"),
        (DROPPED, "explicit", "counter"),
        (DROPPED, "explicit", "torch"),
        (DROPPED, "sdpa", "torch"),
    ],
    ids=["llama sdpa", "llama explicit", "gpt2 sdpa", "gpt2 explicit dropout", "torch's dropout", "fused and dropped"],
)
def test_gradients_have_the_same_bits(spec, attention, dropout, dtype):
    expected = gradients(spec, attention, dtype, None, dropout)
    for name, mode in MODES.items():
        found = gradients(spec, attention, dtype, mode, dropout)
        assert all(map(torch.equal, found, expected)), name


@pytest.mark.parametrize(("every", "inputs"), [(1, 6), (2, 3), (4, 2), (6, 1)])
def test_a_region_keeps_its_input_and_nothing_else(every, inputs):
    model, x = Blocks(), batch()
    Recompute(model.layers, every=every)
    kept = measure(model, lambda: model(x), inputs=[x]).kept
    size = 4 * 4 * 8
    in_blocks = [k for k in kept if k.where]
    # the first region's input is x itself; the scale, which all of them take, stands once
    assert sorted(k.bytes for k in in_blocks) == [4 * 8] + [size] * (inputs - 1)
    assert {k.where for k in in_blocks} <= {f"layers.{min(i + every, 6) - 1}" for i in range(0, 6, every)}


def test_a_recompute_ends_at_the_last_tensor_that_backward_needs():
    model = Blocks(2)

    def count(backward: bool) -> int:
        loss = model(batch())
        with FlopCounterMode(display=False) as counter:
            if backward:
                loss.backward()
        return counter.get_total_flops()

    plain = count(True)
    Recompute(model.layers, every=2)
    product = 2 * 4 * 4 * 16
    assert count(True) - plain == 3 * product  # up, down, up; not the last down


def test_each_region_is_computed_again_once_even_if_the_graph_is_kept():
    blocks = nn.Sequential(*[Counts() for _ in range(4)])
    Recompute(blocks, every=2)
    loss = blocks(batch()).sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in blocks.parameters()]
    assert [block.calls for block in blocks] == [2] * 4
    loss.backward()
    assert [block.calls for block in blocks] == [2] * 4
    for parameter, gradient in zip(blocks.parameters(), once, strict=True):
        assert torch.equal(parameter.grad, 2 * gradient)


def test_what_was_computed_again_is_freed_as_backward_goes_on():
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)) for _ in range(4)]).double()

    def fullest() -> int:
        def step():
            blocks(batch()).sum().backward()

        return measure(blocks, step).total

    Recompute(blocks)
    assert fullest() <= 4 * 4 * 4 * 8  # inputs only: inner tensors are no longer autograd's to keep


def test_a_forward_without_gradients_keeps_nothing():
    model = Blocks()
    Recompute(model.layers, every=2)
    with torch.no_grad():
        assert not model(batch()).requires_grad
    assert measure(model, lambda: model(batch())).kept  # and the next one does


class Fails(Counts):
    fail = False

    def forward(self, x):
        if self.fail:
            raise ValueError("odd")
        return super().forward(x)


@pytest.mark.parametrize("keep", [[], ["linear"]])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("place", [0, 1])
def test_a_forward_that_fails_leaves_no_hooks_behind(place, every, keep):
    blocks = nn.Sequential(*[Fails() for _ in range(2)])
    Recompute(blocks, every=every, keep=keep)
    blocks[place].fail = True
    with pytest.raises(ValueError, match="odd"):
        blocks(batch())
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    assert x.exp().grad_fn._saved_result is not None  # saved as it is, by no frame
    blocks[place].fail = False
    blocks(batch()).sum().backward()
    assert all(p.grad is not None for p in blocks.parameters())


def test_a_kept_output_lives_no_longer_than_what_is_computed_from_it():
    there = []

    class Forgets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4).double()

        def forward(self, x):
            y = self.linear(x)
            memory = weakref.ref(y.untyped_storage())
            z = y + 1
            del y
            there.append(memory() is not None)
            return torch.tanh(z)

    block = Forgets()
    Recompute([block], keep=["linear"])
    block(batch()).sum().backward()
    assert there == [True, False]  # kept in forward; when it has had its turn in the recompute, gone


def test_autocast_is_as_it_was():
    def run(recompute: bool):
        torch.manual_seed(0)
        blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
        if recompute:
            Recompute(blocks)
        with torch.autocast("cpu", torch.bfloat16):
            loss = blocks(batch().float()).float().sum()
        loss.backward()
        return [p.grad for p in blocks.parameters()]

    assert all(map(torch.equal, run(True), run(False)))


def test_what_a_region_held_is_freed_once_it_has_been_computed_again():
    """Kept outputs and handles go though the graph is held."""
    block = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)).double()
    frames: list[_Frame] = []
    made = _Frame.__init__

    def noted(self, *args):
        made(self, *args)
        frames.append(self)

    with mock.patch.object(_Frame, "__init__", noted):
        Recompute([block], keep=["linear"])
        loss = block(batch()).sum()
        assert len(frames[0]._keeper.saved_tensors) == 2  # its input, and what the first of the linear layers put out
        loss.backward(retain_graph=True)
    (frame,) = frames
    assert frame._keeper is None and not frame._calls and not frame._handles


# -- with random numbers from torch's generators ----------------------------------------------------------------------


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x):
        return nn.functional.dropout(torch.tanh(self.linear(x)), 0.5)


def test_random_numbers_that_nobody_sets_back_are_refused():
    block = Drops()
    Recompute([block])
    with pytest.raises(UserError, match="draws random numbers from torch's generators"):
        block(batch())


def test_torchs_random_numbers_are_drawn_again():
    def run(recompute: bool):
        torch.manual_seed(3)
        blocks = nn.Sequential(*[Drops() for _ in range(4)])
        if recompute:
            Recompute(blocks, every=2, rng=True)
        torch.manual_seed(5)
        blocks(batch()).sum().backward()
        return [p.grad for p in blocks.parameters()], torch.rand(3)

    (expected, after), (found, after_too) = run(False), run(True)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(after, after_too)  # the recompute has drawn nothing from whoever comes next
