"""Recompute over ZeRO: the same sums, what is gathered for it, and what the ledger says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.parallel.recompute import Recompute
from meshwright.parallel.residency import Residency
from meshwright.parallel.zero import Options, shard
from parallel.blocks import Blocks, batch


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
