"""Modules to shard, the batches of a rank, and what the sums of their gradients must be."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.comm.mesh import Mesh
from meshwright.parallel.zero import Options, Sharded, shard

STAGES = [0, 1, 2, 3]
PLAIN = Options()


class Twice(nn.Module):
    """A module used twice in one forward, one that is never used, a frozen one in the middle, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.idle = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        for layer in (self.layers[0], self.layers[1], self.frozen, self.layers[0], self.layers[2]):
            x = torch.tanh(layer(x)) * self.scale
        return x.square().sum()


class Tied(nn.Module):
    """An embedding whose weight is the output layer's too, and a block of several modules between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()) for _ in range(2)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed((x * 100).long().flatten().abs() % 5)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x)).square().sum()


class Chain(nn.Module):
    """Four layers, and the sum of what they give: a loss."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def module(kind: type[nn.Module] = Twice) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def inputs(rank: int, micro: int) -> torch.Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + micro))


def single(module_: nn.Module, stage: int = 0) -> Sharded:
    return shard(module_, Mesh.single(torch.device("cpu")), stage)


def step(sharded: Sharded, batches: list[torch.Tensor]) -> None:
    sharded.begin()
    for index, batch in enumerate(batches):
        sharded.micro(index, last=index == len(batches) - 1)
        sharded.module(batch).backward()
        sharded.end_micro()
    list(sharded.finish())


def gradients(mesh, kind, stage, steps, micros, options=PLAIN):
    sharded = shard(module(kind), mesh, stage, options=options)
    for number in range(steps):
        step(sharded, [inputs(mesh.rank, 7 * number + micro) for micro in range(micros)])
    rows = mesh.ledger.rows()
    return {placement.name: gradient.clone() for placement, gradient in sharded.named_gradients()}, rows


def expected_gradients(kind, ranks, steps, micros):
    plain = module(kind)
    for rank in range(ranks):
        for micro in range(micros):
            plain(inputs(rank, 7 * (steps - 1) + micro)).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in plain.named_parameters()
        if p.requires_grad
    }
