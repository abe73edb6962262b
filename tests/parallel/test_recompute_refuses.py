"""What recompute cannot compute again, and refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.parallel.recompute import Recompute
from meshwright.spec.errors import UserError
from parallel.blocks import Blocks, Counts, batch


class Writes(nn.Module):
    def forward(self, x):
        return x.mul_(2).exp()


class Drifts(Counts):
    """Another shape at each call."""

    def forward(self, x):
        y = super().forward(x)
        return y * torch.ones(1 if self.calls % 2 else 4, 1, dtype=x.dtype, requires_grad=True)


def test_a_block_that_writes_to_its_input_is_refused():
    block = Writes()
    Recompute([block])
    with pytest.raises(UserError, match="writes to its input in place"):
        block(batch() * 1)


def test_a_block_that_does_something_else_the_second_time_is_refused():
    block = Drifts()
    Recompute([block])
    loss = block(batch()).sum()
    with pytest.raises(UserError, match="did something else when it was computed again"):
        loss.backward()


class Changes(nn.Module):
    """Computes what `first` says, and what `then` says when it is computed again."""

    def __init__(self, first, then) -> None:
        super().__init__()
        self.linear, self.ways = nn.Linear(4, 4).double(), [then, first]

    def forward(self, x):
        return self.ways.pop()(self.linear, x)


def with_bias(linear, x):
    return torch.sin(linear(x)).exp()


def without_bias(linear, x):
    return torch.sin(nn.functional.linear(x, linear.weight)).exp()


def narrower(linear, x):
    return torch.sin(linear(x).float()).double().exp()


def shorter(linear, x):
    return torch.sin(linear(x))


@pytest.mark.parametrize(
    ("keep", "then"),
    [(["linear"], without_bias), ([], narrower), ([], shorter)],
    ids=["another kept operator", "another dtype", "fewer saved tensors"],
)
def test_a_block_that_changes_is_refused_and_the_next_one_is_not(keep, then):
    block = Changes(with_bias, then)
    recompute = Recompute([block], keep=keep)
    loss = block(batch()).sum()
    with pytest.raises(UserError, match="did something else when it was computed again"):
        loss.backward()
    assert recompute.phase == "forward"
    block.ways = [with_bias, with_bias]
    block(batch()).sum().backward()
    assert block.ways == []  # it was computed again


def test_a_block_that_runs_backward_in_its_own_forward_is_refused():
    def inside(linear, x):
        y = torch.tanh(linear(x))
        return y * torch.autograd.grad(y.sum(), x, retain_graph=True)[0]

    block = Changes(inside, inside)
    Recompute([block])
    with pytest.raises(UserError, match="runs backward within its own forward"):
        block(batch())


def test_blocks_that_are_no_chain_are_refused():
    class Branches(Blocks):
        def forward(self, x):
            return (self.layers[0](x, 1.0) + self.layers[1](x, 1.0)).sum()

    model = Branches()
    Recompute(model.layers, every=2)
    with pytest.raises(UserError, match="recompute_every above 1 needs blocks that are called one after the other"):
        model(batch())
    branches = Branches()
    Recompute(branches.layers)
    branches(batch()).backward()


def test_arguments_that_differ_within_a_region_are_refused():
    class Scaled(Blocks):
        def forward(self, x):
            for index, layer in enumerate(self.layers):
                x = layer(x, 1.0 + index // 2)
            return x.sum()

    model = Scaled()
    Recompute(model.layers, every=2)
    model(batch()).backward()
    model = Scaled()
    Recompute(model.layers, every=3)
    with pytest.raises(UserError, match="otherwise the same arguments"):
        model(batch())


class WritesToKept(nn.Module):
    """Writes in place to what its linear layer put out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x):
        rows = self.linear(x[None])  # of three dimensions: the product's output under another shape
        return torch.tanh(rows.mul_(0.5))[0] * x


def test_writing_to_a_kept_output_is_refused_where_it_is_kept():
    block = WritesToKept()
    Recompute([block], keep=["linear"])
    with pytest.raises(UserError, match="writes in place to the output of an operator that is kept"):
        block(batch())
    plain, again = WritesToKept(), WritesToKept()
    again.load_state_dict(plain.state_dict())
    Recompute([again])
    for module in (plain, again):
        module(batch()).sum().backward()
    assert torch.equal(plain.linear.weight.grad, again.linear.weight.grad)


def test_writing_between_the_blocks_of_a_region_is_refused():
    class Between(Blocks):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x, 1.0)
                x.mul_(0.5)
            return x.sum()

    model = Between()
    Recompute(model.layers, every=2)
    with pytest.raises(UserError, match="blocks that are called one after the other"):
        model(batch())


def test_keywords_that_differ_within_a_region_are_refused():
    class Shifted(Blocks):
        def forward(self, x):
            for index, layer in enumerate(self.layers):
                x = layer(x, 1.0, shift=float(index))
            return x.sum()

    model = Shifted()
    Recompute(model.layers, every=2)
    with pytest.raises(UserError, match="otherwise the same arguments"):
        model(batch())


@pytest.mark.parametrize(
    "arguments",
    [([1.0], {}), ([True], {}), ([1, 2], {}), ([1], {"shift": 0.0})],
    ids=["another type", "a bool", "one more", "another keyword"],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_what_is_not_quite_the_same_within_a_region_is_refused(arguments, swapped):
    class Two(nn.Sequential):
        def forward(self, x):
            for block, (more, named) in zip(self, calls, strict=True):
                x = block(x, *more, **named)
            return x

    class Block(nn.Module):
        def forward(self, x, *scales, shift=0.0):
            return torch.tanh(x) * sum(scales) + shift

    calls = [([1], {}), arguments]
    if swapped:
        calls.reverse()
    model = Two(Block(), Block())
    Recompute(model, every=2)
    with pytest.raises(UserError, match="otherwise the same arguments"):
        model(batch())


def test_a_forward_that_fails_between_two_blocks_leaves_nothing_to_the_next():
    class Breaks(Blocks):
        fail = True

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, 1.0)
                if self.fail:
                    raise ValueError("odd")
            return x.sum()

    model = Breaks()
    Recompute(model.layers, every=2)
    with pytest.raises(ValueError, match="odd"):
        model(batch())
    model.fail = False
    model(batch()).backward()
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    assert x.exp().grad_fn._saved_result is not None  # no frame of the first forward is in between
