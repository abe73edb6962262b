"""Blocks whose regions tests of recompute compute again."""

from __future__ import annotations

import torch
from torch import nn


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


class Counts(nn.Module):
    """Calls of a block, in forward and again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4).double(), 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.linear(x))
