"""The example in docs/zero.md runs as it stands there, and computes what one device would."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

PAGE = Path(__file__).parents[2] / "docs" / "zero.md"


def run_example(text: str, world: int, folder: Path) -> list[str]:
    """What rank 0 prints."""
    script = folder / "own.py"
    script.write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{world}"}
    shared |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=shared | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "LOCAL_WORLD_SIZE": f"{world}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        told = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, told
    return told[0][0].splitlines()


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
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = dict(line.split() for line in run_example(example, 2, tmp_path))
    expected = dict(line.split() for line in plainly(2))
    assert found.keys() == expected.keys()
    assert all(abs(float(found[name]) - float(expected[name])) < 3e-4 for name in expected)
