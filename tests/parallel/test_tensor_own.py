"""Tensor parallelism for a module of one's own, given a plan of names: what goes, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.model.layers import Conv1D
from meshwright.parallel.flat import Precision
from meshwright.parallel.placement import put_together
from meshwright.parallel.tensor import apply
from meshwright.parallel.zero import Options, shard
from meshwright.spec.errors import UserError
from meshwright.spec.splitting import Split

COLUMNS, ROWS = Split("columns"), Split("rows")
GATED = {
    "blocks.*.gate": Split("columns", reads="gate, up"),
    "blocks.*.up": Split("columns", reads="gate, up"),
    "blocks.*.down": ROWS,
}


class Gated(nn.Module):
    """Half a block as anybody writes it, with biases everywhere; `skip` leaves one of two siblings uncalled."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)
        self.skip = False

    def forward(self, x):
        h = self.norm(x)
        inner = torch.sigmoid(self.gate(h)) if self.skip else torch.sigmoid(self.gate(h)) * self.up(h)
        return x + self.down(inner)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated(8, 12) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(kind: type[nn.Module] = Model) -> nn.Module:
    torch.manual_seed(5)
    return kind().double()


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def whole_gradients(mesh, placements, found) -> dict[str, torch.Tensor]:
    """Gradients put together from all ranks' parts; of what is whole this rank's own."""
    result = {}
    for name, placement in placements.items():
        gradient = found.get_parameter(placement.names[0]).grad
        if gradient is None:
            continue
        if placement.cuts:
            parts = gradient.new_empty((mesh.world, *gradient.shape))
            mesh.group("tp").all_gather(parts, gradient.contiguous(), reason="test", phase="step")
            gradient = put_together(list(parts), placement)
        result[name] = gradient
    return result


def check(found: dict[str, torch.Tensor], plain: nn.Module) -> None:
    for name, parameter in plain.named_parameters():
        if parameter.grad is None:
            assert name not in found
        else:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-12, msg=name)


def forward_and_backward(mesh, shape):
    found = model()
    _, placements = apply(found, mesh, GATED)
    x = inputs(*shape).requires_grad_()
    out = found(x)
    out.square().sum().backward()
    shapes = {name: tuple(p.shape) for name, p in found.named_parameters()}
    return out.detach(), x.grad, whole_gradients(mesh, placements, found), shapes


@pytest.mark.parametrize("shape", [(2, 3, 8), (5, 8), (8,), (0, 3, 8)], ids=str)
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_values_are_kept_and_gradients_are_the_plain_modules(ranks, tp, shape):
    """Whatever shapes the module's own layers would have taken."""
    plain, x = model(), inputs(*shape).requires_grad_()
    expected = plain(x)
    expected.square().sum().backward()
    for out, dx, gradients, shapes in ranks.run(tp, forward_and_backward, shape, axes={"tp": tp}):
        torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dx, x.grad, rtol=1e-12, atol=1e-12)
        check(gradients, plain)
        assert shapes["blocks.1.up.weight"] == (12 // tp, 8) and shapes["blocks.1.up.bias"] == (12 // tp,)
        assert shapes["blocks.0.down.weight"] == (8, 12 // tp) and shapes["blocks.0.down.bias"] == (8,)
        assert shapes["head.weight"] == (3, 8)


def sequence_parts(mesh):
    """Blocks alone, each rank with its part of the sequence; gradients of what is whole are each rank's part."""
    found = model().blocks
    line, placements = apply(
        found, mesh, {key.removeprefix("blocks."): split for key, split in GATED.items()}, sequence=True
    )
    x = inputs(2, 6, 8).chunk(mesh.world, dim=1)[mesh.rank].clone().requires_grad_()
    out = x
    for block in found:
        out = block(out)
    out.square().sum().backward()
    gradients = whole_gradients(mesh, placements, found)
    for name, placement in placements.items():
        assert (placement.partial == "tp") == (not placement.cuts)
        if placement.partial:
            mesh.group("tp").all_reduce(gradients[name], reason="test", phase="step")
    assert line.sequence
    return out.detach(), x.grad, gradients


@pytest.mark.parametrize("tp", [2, 3])
def test_parts_of_a_sequence(ranks, tp):
    plain, x = model().blocks, inputs(2, 6, 8).requires_grad_()
    out = x
    for block in plain:
        out = block(out)
    out.square().sum().backward()
    ends = ranks.run(tp, sequence_parts, axes={"tp": tp})
    torch.testing.assert_close(torch.cat([end[0] for end in ends], dim=1), out.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([end[1] for end in ends], dim=1), x.grad, rtol=1e-12, atol=1e-12)
    for _, _, gradients in ends:
        check(gradients, plain)


def under_zero(mesh, stage):
    """Two steps of plain descent, through ZeRO's units."""
    found = model()
    line, placements = apply(found, mesh, GATED)
    sharded = shard(found, mesh, stage, placements=placements, options=Options(precision=Precision()))
    for step in range(2):
        sharded.begin()
        sharded.micro(last=True)
        found(inputs(2, 3, 8) * (1 + mesh.coords["dp"] + step)).square().sum().backward()
        for unit in list(sharded.finish()):
            with torch.no_grad():
                unit.master.sub_(unit.gradient_shard, alpha=0.001)
            sharded.publish(unit)
    assert line.group.size == 2
    return {placement.name: weight.clone() for placement, weight in sharded.named_parameters()}


@pytest.mark.parametrize("stage", range(4))
def test_under_zero(ranks, stage):
    plain = model()
    for step in range(2):
        plain.zero_grad()
        for rank in range(2):
            plain(inputs(2, 3, 8) * (1 + rank + step)).square().sum().backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.sub_(parameter.grad, alpha=0.001)
    for found in ranks.run(4, under_zero, stage, axes={"tp": 2, "dp": 2}):
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-11, atol=1e-12)


# -- siblings that are computed together -------------------------------------------------------------------------------


def siblings(mesh):
    """What one layer leaves behind for another that is not called, or called later, is never taken for new."""
    plain, found = model().blocks[0], model().blocks[0]
    _, placements = apply(found, mesh, {key.removeprefix("blocks.*."): split for key, split in GATED.items()})
    x = inputs(2, 3, 8)

    def same(a, b):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    def whole(part):
        parts = part.new_empty((mesh.world, *part.shape))
        mesh.group("tp").all_gather(parts, part.detach().contiguous(), reason="test", phase="step")
        return parts.movedim(0, -2).flatten(-2)

    for module in (plain, found):
        module.skip = True
        module(x).sum().backward()
    check(whole_gradients(mesh, placements, found), plain)
    assert plain.up.weight.grad is None
    assert not found.up.together._outputs  # nor does it hold on to memory
    # The same layer twice with one input, then its sibling.
    same(whole(found.gate(x)), plain.gate(x))
    same(whole(found.gate(x)), plain.gate(x))
    same(whole(found.up(x)), plain.up(x))
    # Another input, as new as the first.
    found.gate(x)
    same(whole(found.up(2 * x)), plain.up(2 * x))
    # Without gradients first: what was left behind has no graph.
    with torch.no_grad():
        found.gate(x)
    out = found.up(x)
    assert out.requires_grad
    # Weights, and then the input, have changed in between.
    for module in (plain, found):
        module.gate(x)
        with torch.no_grad():
            module.up.weight.mul_(2)
    same(whole(found.up(x)), plain.up(x))
    found.gate(x)
    x.add_(1)
    same(whole(found.up(x)), plain.up(x))
    with torch.inference_mode():
        same(whole(found.up(x)), plain.up(x))
        same(whole(found.gate(x * 2)), plain.gate(x * 2))
    # Called three times over within one graph: gradients add up.
    for module in (plain, found):
        module.zero_grad()
    (found.gate(x).square().sum() + found.up(x).square().sum() + found.gate(x).square().sum()).backward()
    (plain.gate(x).square().sum() * 2 + plain.up(x).square().sum()).backward()
    check(whole_gradients(mesh, placements, found), plain)


def test_siblings(ranks):
    """All is asserted on the ranks, whose failures `run` raises."""
    ranks.run(2, siblings, axes={"tp": 2})


def without_gradients(mesh):
    found = model()
    apply(found, mesh, GATED)
    with torch.no_grad():
        out = found(inputs(2, 3, 8))
    assert not out.requires_grad and not found.blocks[0].up.together._outputs
    return out


def test_without_gradients(ranks):
    expected = model()(inputs(2, 3, 8)).detach()
    for out in ranks.run(2, without_gradients, axes={"tp": 2}):
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


FROZEN = ["blocks.0.gate.weight", "blocks.0.up.bias", "blocks.1.down.weight", "blocks.1.norm.weight", "head.bias"]


def some_frozen(mesh, frozen):
    found = model()
    for name in frozen:
        found.get_parameter(name).requires_grad_(False)
    _, placements = apply(found, mesh, GATED)
    found(inputs(2, 3, 8)).square().sum().backward()
    trained = {name for name, p in found.named_parameters() if p.requires_grad}
    return whole_gradients(mesh, placements, found), trained


@pytest.mark.parametrize("frozen", [FROZEN, [n for n, _ in Model().named_parameters() if n.startswith("blocks.0")]])
def test_frozen_parameters(ranks, frozen):
    plain = model()
    for name in frozen:
        plain.get_parameter(name).requires_grad_(False)
    plain(inputs(2, 3, 8)).square().sum().backward()
    for gradients, trained in ranks.run(2, some_frozen, frozen, axes={"tp": 2}):
        check(gradients, plain)
        assert trained == {name for name, p in plain.named_parameters() if p.requires_grad}


def frozen_sibling(mesh, stage):
    found = model()
    found.get_parameter("blocks.0.gate.weight").requires_grad_(False)
    _, placements = apply(found, mesh, GATED)
    try:
        shard(found, mesh, stage, placements=placements)
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_siblings_of_which_one_is_frozen_would_wait_for_each_other(ranks, stage):
    """Computed when the first is called, the other's parameters might not have come, or be gone."""
    refused = "zero: blocks.0.gate and blocks.0.up are computed together and must be in one unit"
    for said in ranks.run(2, frozen_sibling, stage, axes={"tp": 2}):
        assert said == "nothing" if stage == 0 else said.startswith(refused), said


def states_of_parts(mesh):
    found = model()
    _, placements = apply(found, mesh, GATED)
    shard(found, mesh, 0, placements=placements)
    try:
        found.state_dict()
    except UserError as error:
        return str(error)
    return "nothing"


def test_a_state_dict_of_parts_is_refused(ranks):
    for said in ranks.run(2, states_of_parts, axes={"tp": 2}):
        assert said.startswith("tensor: state_dict() would hold this rank's parts of tensors"), said


class Sequence(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))


def a_sequence(mesh):
    found = model(Sequence)
    apply(found, mesh, {"0": COLUMNS, "2": ROWS})
    return found(inputs(5, 8)).detach()


def test_layers_by_number(ranks):
    expected = model(Sequence)(inputs(5, 8)).detach()
    for out in ranks.run(2, a_sequence, axes={"tp": 2}):
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


# -- refusals ----------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """All that cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 7)
        self.wide = nn.Linear(8, 12)
        self.table = nn.Embedding(8, 4)
        self.act = nn.GELU()
        self.bilinear = nn.Bilinear(4, 4, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.gpt2 = Conv1D(8, 12, dtype=torch.float32, device=torch.device("cpu"))
        self.drop, self.alpha = nn.Dropout(0.1), nn.AlphaDropout(0.1)
        self.watched, self.weighed = nn.Linear(8, 12), nn.Linear(8, 12)
        self.watched.register_forward_hook(lambda module, given, out: 2 * out)
        self.weighed.weight.register_hook(lambda gradient: 2 * gradient)


REFUSED = [
    ({"wide": COLUMNS, "wides": COLUMNS}, "the plan names wides, and the module has no such layer"),
    ({"wide.*": ROWS}, "the plan names wide.*, and the module has no such layer"),
    ({"norm": Split("heads")}, "the plan names norm, and the module has no such layer"),
    ({"act": COLUMNS}, "act is no linear layer, and cannot be cut by columns or rows"),
    ({"table": COLUMNS}, "table is no linear layer"),
    ({"bilinear": ROWS}, "bilinear is no linear layer"),
    ({"attention.out_proj": ROWS}, "attention.out_proj is no linear layer"),
    ({"fc": COLUMNS}, "tp=2 does not divide the 7 outputs of fc.weight; use one of 1, 7"),
    ({"wide": Split("columns", heads=3)}, "tp=2 does not divide the 12 outputs of 3 heads of wide.weight; use one of"),
    ({"wide": Split("columns", (6, 4))}, "wide.weight has 12 outputs, and the plan says 6 + 4"),
    ({"wide": Split("columns", (9, 3))}, "tp=2 does not divide the 12 outputs of wide.weight; use one of 1, 3"),
    ({"a": COLUMNS}, "a.weight and b.weight are one tensor, and the plan cuts them unlike"),
    ({"wide": Split("rows", heads=1)}, "tp=2 does not divide the 8 inputs of 1 heads of wide.weight; use one of 1"),
    ({"wide": Split("columns", reads="x"), "gpt2": Split("columns", reads="x")}, "layers of the module that read one"),
    ({"drop": Split("sequence")}, "drop draws its masks from torch's generator"),
    ({"alpha": Split("sequence")}, "alpha draws its masks from torch's generator"),
    ({"wide": COLUMNS, "watched": COLUMNS}, "watched has hooks, which what takes its place would not have"),
    ({"weighed": COLUMNS}, "weighed has hooks"),
    ({"wide": COLUMNS, "gpt2": Split("vocabulary")}, "gpt2 is neither embedding nor head"),
    ({"wide": Split("vocabulary")}, "wide is neither embedding nor head, and cannot be cut by words"),
]  # fmt: skip


def refusals(mesh, plans):
    """What is said of each plan, and whether the module is as it was."""
    found = []
    for plan in plans:
        odd = Odd()
        before = dict(odd.named_modules())
        try:
            apply(odd, mesh, plan)
            found.append(("nothing", False))
        except UserError as error:
            found.append((str(error), dict(odd.named_modules()) == before))
    return found


def test_plans_that_do_not_fit(ranks):
    plans = [plan for plan, _ in REFUSED]
    for found in ranks.run(2, refusals, plans, axes={"tp": 2}):
        for (plan, words), (said, untouched) in zip(REFUSED, found, strict=True):
            assert said.startswith(f"tensor: {words}") and untouched, (plan, said)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return out


class Repeated(nn.Module):
    """One block twice (ALBERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Half()] * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def repeated(mesh):
    found = model(Repeated)
    apply(found, mesh, {"blocks.*.up": COLUMNS, "blocks.*.down": ROWS})
    out = found(inputs(5, 8))
    out.sum().backward()
    try:
        found.state_dict()
        said = ""
    except UserError as error:
        said = str(error)
    return out.detach(), found.blocks[0].down.bias.grad, len(list(found.parameters())), said


def test_a_block_under_two_names(ranks):
    plain = model(Repeated)
    expected = plain(inputs(5, 8))
    expected.sum().backward()
    for out, bias, parameters, said in ranks.run(2, repeated, axes={"tp": 2}):
        torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(bias, plain.blocks[0].down.bias.grad, rtol=1e-12, atol=1e-12)
        assert parameters == 4 and said.startswith("tensor: state_dict() would hold this rank's parts")
