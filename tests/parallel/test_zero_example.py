"""The example in docs/zero.md runs as it stands there, and computes what one device would."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from examples import example_of, run_example


def plainly(world: int) -> list[str]:
    """The same training in one process."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)), nn.Linear(16, 1))
    data = [torch.Generator().manual_seed(rank) for rank in range(world)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 / (world * 2 * 8))
    for _ in range(20):
        for _ in range(2):
            for generator in data:
                x = torch.randn(8, 16, generator=generator)
                (model(x) - x.sum(1, keepdim=True)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [f"{name} {value.norm():.4f}" for name, value in model.named_parameters()]


def test_the_example_runs_under_two_ranks(tmp_path: Path) -> None:
    found = dict(line.split() for line in run_example(example_of("zero.md"), 2, tmp_path))
    expected = dict(line.split() for line in plainly(2))
    assert found.keys() == expected.keys()
    assert all(abs(float(found[name]) - float(expected[name])) < 3e-4 for name in expected)
