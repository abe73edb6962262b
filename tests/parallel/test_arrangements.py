"""The ways to put two cut layers one after the other: each is the plain one, and sends what docs/tensor.md says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.comm.mesh import Mesh
from meshwright.model.layers import Conv1D
from meshwright.parallel import tensor
from meshwright.parallel.placement import Placement, cut_out
from meshwright.parallel.recompute import Recompute
from meshwright.spec.errors import UserError
from meshwright.spec.splitting import Split

B, T, D, F = 3, 8, 12, 32
SIZE = 8  # bytes of a float64

ARRANGEMENTS: dict[str, tuple[Split, Split]] = {
    "columns, rows": (Split("columns"), Split("rows")),
    "columns, columns after columns": (
        Split("columns"),
        Split("columns", options=("gather_input", "gather_output")),
    ),
    "columns gathered, twice": (
        Split("columns", options=("gather_output",)),
        Split("columns", options=("gather_output",)),
    ),
    "rows scattered, twice": (Split("rows", options=("scatter_input",)), Split("rows", options=("scatter_input",))),
    "rows scattered, columns gathered": (
        Split("rows", options=("scatter_input",)),
        Split("columns", options=("gather_output",)),
    ),
}
TRAFFIC: dict[str, dict[tuple[str, str], int]] = {
    # by operation and phase, width of what is sent for each token
    "columns, rows": {("all_reduce", "forward"): D, ("all_reduce", "backward"): D},
    "columns, columns after columns": {
        ("all_gather", "forward"): F + D,
        ("reduce_scatter", "backward"): F,
        ("all_reduce", "backward"): D,
    },
    "columns gathered, twice": {("all_gather", "forward"): F + D, ("all_reduce", "backward"): F + D},
    "rows scattered, twice": {("all_reduce", "forward"): F + D, ("all_gather", "backward"): D + F},
    "rows scattered, columns gathered": {
        ("all_reduce", "forward"): F,
        ("all_gather", "forward"): D,
        ("all_gather", "backward"): D,
        ("all_reduce", "backward"): F,
    },
}


class MLP(nn.Module):
    def __init__(self, kind: str = "linear") -> None:
        super().__init__()
        sizes = (D, F), (F, D)
        if kind == "linear":
            self.up, self.down = (nn.Linear(*size, dtype=torch.float64) for size in sizes)
        else:
            where: Any = {"dtype": torch.float64, "device": torch.device("cpu")}
            self.up, self.down = (Conv1D(*size, **where) for size in sizes)
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Stack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mlps = nn.ModuleList([MLP(kind), MLP(kind)])

    def forward(self, x: Tensor) -> Tensor:
        for mlp in self.mlps:
            x = x + mlp(x)
        return x


def made(kind: str) -> tuple[Stack, Tensor, Tensor]:
    """The plain stack, its input and its output's gradient, the same every time."""
    torch.manual_seed(3)
    return Stack(kind), torch.randn(B, T, D, dtype=torch.float64), torch.randn(B, T, D, dtype=torch.float64)


def part(mesh: Mesh, x: Tensor, sequence: bool) -> Tensor:
    group = mesh.group("tp")
    return x.chunk(group.size, dim=1)[group.rank] if sequence else x


def differences(
    mesh: Mesh, cut: nn.Module, placements: dict[str, Placement], kind: str, sequence: bool
) -> dict[str, float]:
    """Largest difference from the plain stack of the output, the input's gradient, and every parameter's."""
    plain, x, weight = made(kind)
    mine, mine_weight = (part(mesh, t, sequence).clone() for t in (x, weight))
    x.requires_grad_()
    mine.requires_grad_()
    right = plain(x)
    right.backward(weight)
    out = cut(mine)
    out.backward(mine_weight)
    assert x.grad is not None
    pairs = {"out": (out, part(mesh, right, sequence)), "x": (mine.grad, part(mesh, x.grad, sequence))}
    for name, placement in placements.items():
        grad = cut.get_parameter(name).grad
        assert grad is not None
        if placement.partial is not None:  # what the step would sum
            mesh.group("tp").all_reduce(grad, reason="test", phase="step")
        expected = plain.get_parameter(name).grad
        assert expected is not None
        pairs[name] = (grad, cut_out(expected, placement.cuts))
    return {name: float((a - b).abs().max()) for name, (a, b) in pairs.items()}


def rows_of(mesh: Mesh) -> dict[tuple[str, str], tuple[int, int, float]]:
    """By operation and phase, how many, payload and bytes on the wire of what the layers sent."""
    found: dict[tuple[str, str], tuple[int, int, float]] = {}
    for row in mesh.ledger.rows():
        if row.key.phase != "step":
            assert row.key.reason.startswith("tp.") and row.key.axis == "tp", row
            before = found.get((row.key.operation, row.key.phase), (0, 0, 0.0))
            found[row.key.operation, row.key.phase] = (
                before[0] + row.count, before[1] + row.payload, before[2] + row.wire
            )  # fmt: skip
    return found


def arrange(mesh: Mesh, name: str, kind: str, keep: tuple[str, ...] | None) -> Any:
    stack, *_ = made(kind)
    recompute = None if keep is None else Recompute(stack.mlps, keep=keep)
    up, down = ARRANGEMENTS[name]
    _, placements = tensor.apply(stack, mesh, {"mlps.*.up": up, "mlps.*.down": down}, recompute=recompute)
    return differences(mesh, stack, placements, kind, sequence=False), rows_of(mesh)


@pytest.mark.parametrize("name", ARRANGEMENTS)
@pytest.mark.parametrize("world", [2, 4])
def test_each_arrangement_is_the_plain_one_and_sends_its_bytes(ranks: Any, name: str, world: int) -> None:
    kind = "conv1d" if world == 4 else "linear"  # weights the other way round
    for found, rows in ranks.run(world, arrange, name, kind, None, axes={"tp": world}):
        assert max(found.values()) < 1e-12, found
        assert {key: row[1] for key, row in rows.items()} == {
            key: 2 * B * T * width * SIZE for key, width in TRAFFIC[name].items()
        }
        for (operation, _), (_, payload, wire) in rows.items():
            assert wire == (2 if operation == "all_reduce" else 1) * payload * (world - 1) / world


@pytest.mark.parametrize("name", ARRANGEMENTS)
@pytest.mark.parametrize("keep", [(), ("linear",)])
def test_each_arrangement_is_computed_again(ranks: Any, name: str, keep: tuple[str, ...]) -> None:
    for found, rows in ranks.run(2, arrange, name, "linear", keep, axes={"tp": 2}):
        assert max(found.values()) < 1e-12, found
        payload = {key: row[1] for key, row in rows.items() if key[1] != "recompute"}
        assert payload == {key: 2 * B * T * width * SIZE for key, width in TRAFFIC[name].items()}


def in_chunks(mesh: Mesh, chunks: int) -> Any:
    stack, *_ = made("linear")
    plan = {"mlps.*.up": Split("columns"), "mlps.*.down": Split("rows")}
    _, placements = tensor.apply(stack, mesh, plan, sequence=True, chunks=chunks)
    return differences(mesh, stack, placements, "linear", sequence=True), rows_of(mesh)


@pytest.mark.parametrize("chunks", [1, 2, 3, 9])
def test_the_sequence_gathered_in_chunks_is_the_same(ranks: Any, chunks: int) -> None:
    whole = 2 * B * T * D * SIZE
    pieces = len(torch.empty(T // 2).chunk(chunks))  # not more than there are positions
    for found, rows in ranks.run(2, in_chunks, chunks, axes={"tp": 2}):
        assert max(found.values()) < 1e-12, found
        assert {key: row[:2] for key, row in rows.items()} == {
            ("all_gather", "forward"): (2 * pieces, whole),
            ("reduce_scatter", "forward"): (2, whole),
            ("all_gather", "backward"): (4, 2 * whole),  # of the outputs' gradient, and of the input once more
            ("reduce_scatter", "backward"): (2, whole),
        }


def test_options_beside_sequence_parallelism_are_refused() -> None:
    """A norm between such layers would see the whole sequence on every rank, and its gradient be added up over them."""
    plan = {"up": Split("columns", options=("gather_output",)), "down": Split("rows", options=("scatter_input",))}
    with pytest.raises(UserError, match="up, down gather or scatter features, and between such layers every rank"):
        tensor.apply(MLP(), Mesh.single(torch.device("cpu")), plan, sequence=True)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (Split("columns", options=("scatter_input",)), "up is cut by columns, which have no scatter_input"),
        (
            Split("rows", options=("gather_input", "gather_output")),
            "by rows, which have no gather_input, gather_o",
        ),
        (Split("columns", heads=4, options=("gather_output",)), "leave fused and heads out"),
        (Split("columns", fused=(16, 16), options=("gather_output",)), "leave fused and heads out"),
    ],
)
def test_options_that_a_layer_has_not_are_refused(split: Split, words: str) -> None:
    with pytest.raises(UserError, match=words):
        tensor.apply(MLP(), Mesh.single(torch.device("cpu")), {"up": split})
