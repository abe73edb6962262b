"""The example in docs/tensor.md runs as it stands there, and computes what one device would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples import example_of, run_example_on


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


def plainly(data_ranks: int) -> list[str]:
    """The same training in one process."""
    torch.manual_seed(1)
    model = nn.Sequential()
    model.mlps, model.out = nn.Sequential(MLP(), MLP()), nn.Linear(16, 1)
    data = [torch.Generator().manual_seed(rank) for rank in range(data_ranks)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001 / (data_ranks * 8))
    for _ in range(20):
        for generator in data:
            x = torch.randn(8, 16, generator=generator)
            (model(x) - x.sum(1, keepdim=True)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [f"{name} {value.norm():.4f}" for name, value in model.named_parameters()]


@pytest.mark.parametrize("world", [2, 4])
def test_the_example_runs(ranks: Any, tmp_path: Path, world: int) -> None:
    found = dict(line.split() for line in run_example_on(ranks, example_of("tensor.md"), world, tmp_path))
    expected = dict(line.split() for line in plainly(world // 2))
    assert found.keys() == expected.keys()
    assert all(abs(float(found[name]) - float(expected[name])) < 3e-4 for name in expected)
