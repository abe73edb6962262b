"""Blocks computed again in backward: the same bits, what is kept meanwhile, and what cannot be computed again."""

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
from meshwright.parallel.residency import Residency
from meshwright.parallel.zero import Options, shard
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec
from meshwright.verify.activations import measure

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


class Mix(nn.Module):
    """A block of several modules, with arguments beside the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x, scale, *, shift=0.0):
        return x + self.down(torch.tanh(self.up(x) * scale)) + shift


class Blocks(nn.Module):
    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Mix() for _ in range(blocks)]).double()

    def forward(self, x):
        scale = x.new_full((4, 1), 0.5)
        for layer in self.layers:
            x = layer(x, scale, shift=0.25)
        return x.square().sum()


def batch() -> torch.Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)


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


class Counts(nn.Module):
    """Calls of a block, in forward and again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4).double(), 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.linear(x))


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


# -- what cannot be computed again --------------------------------------------------------------------------------


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


# -- over ZeRO -------------------------------------------------------------------------------------------------------


def laid_out(mesh, stage: int, every: int | None, ahead: int = 1, gather: str = "micro", micros: int = 2):
    """Gradients, gathers by unit, most units held at once, and the ledger's rows, of a step."""
    model = Blocks()
    recompute = None if every is None else Recompute(model.layers, every=every)
    sharded = shard(model, mesh, stage, options=Options(ahead=ahead, gather=gather), recompute=recompute)
    gathers: list[str] = []
    most = 0
    ask = Residency._ask

    def asked(self, stay):
        nonlocal most
        if not stay.resident and stay.gather is None:
            gathers.append(stay.unit.name)
        ask(self, stay)
        most = max(most, sum(unit.parameters.untyped_storage().nbytes() > 0 for unit in sharded.units))

    Residency._ask = asked
    try:
        sharded.begin()
        for micro in range(micros):
            sharded.micro(micro, last=micro == micros - 1)
            model(batch() * (1 + mesh.rank)).backward()
            sharded.end_micro()
        list(sharded.finish())
    finally:
        Residency._ask = ask
    rows = [(row.key, row.count, row.payload) for row in mesh.ledger.rows()]
    found = {p.name: g.clone() for p, g in sharded.named_gradients()}
    held = sum(unit.parameters.untyped_storage().nbytes() > 0 for unit in sharded.units)
    return found, gathers, most, rows, held


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_sums_the_same_bits_and_sends_the_same(ranks, stage):
    plain = ranks.run(2, laid_out, stage, None)
    for every in (1, 2, 4):
        for (found, *_, rows, _), (expected, *_, expected_rows, _) in zip(
            ranks.run(2, laid_out, stage, every), plain, strict=True
        ):
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert rows == expected_rows


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_stage_3_holds_a_region_and_the_next_units_and_gathers_none_twice(ranks, ahead):
    b = [f"blocks.{i}" for i in range(6)]
    for _, gathers, most, _, held in ranks.run(2, laid_out, 3, 2, ahead, "micro", 1):
        # forward; then 5 is there, 4 is needed for the recompute; then pairs, each from its first block on
        assert gathers == [*b, b[4], b[2], b[3], b[0], b[1]]
        assert most == (2 if ahead == 0 else 2 + ahead)
        assert held == 0
    for _, gathers, most, _, _ in ranks.run(2, laid_out, 3, 1, ahead, "micro", 1):
        assert gathers == [*b, *reversed(b[:5])]
        assert most == 1 + ahead
    for _, gathers, most, _, _ in ranks.run(2, laid_out, 3, 2, ahead, "micro", 2):  # the second as the first
        assert gathers == 2 * [*b, b[4], b[2], b[3], b[0], b[1]]
        assert most == (2 if ahead == 0 else 2 + ahead)


def test_parameters_gathered_for_a_step_are_gathered_once(ranks):
    for _, gathers, _, _, held in ranks.run(2, laid_out, 3, 2, 1, "step"):
        assert gathers == [f"blocks.{i}" for i in range(6)]
        assert held == 0


class Sums(nn.Module):
    """A block that sums over the ranks, as a split layer does."""

    def __init__(self, group, recompute_of) -> None:
        super().__init__()
        self.linear, self.group, self.recompute_of = nn.Linear(4, 4).double(), group, recompute_of

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        total = y.detach().clone()
        self.group.all_reduce(total, reason="test", phase=self.recompute_of().phase)
        return torch.sin(y * total)


def sums(mesh) -> list[tuple[str, int]]:
    recompute: Recompute | None = None
    blocks = nn.Sequential(*[Sums(mesh.group("dp"), lambda: recompute) for _ in range(3)])
    recompute = Recompute(blocks)
    blocks(batch()).sum().backward()
    return sorted((row.key.phase, row.count) for row in mesh.ledger.rows())


def test_a_collective_that_is_repeated_stands_in_phase_recompute(ranks):
    assert ranks.run(2, sums) == [[("forward", 3), ("recompute", 3)]] * 2
