"""Our tensor-parallel step, with and without sequence parallelism, beside torch's `parallelize_module` and one rank.

    python benchmarks/tensor.py [--ranks 2] [--rounds 40] [--only NAME …] [--no-yield]

All train the same stack of Llama blocks on the same hidden states: forward, the sum of squares as loss, backward, fused
AdamW. The peer has ColwiseParallel and RowwiseParallel, and PrepareModuleInput in front of attention and MLP, so that
each half block sends as often as ours; beside `sp` SequenceParallel too. Before the race loss and gradients of each
contestant are compared with those of the plain stack. "one rank" is rank 0 alone with the plain stack on one thread,
the other ranks wait; beside it, on two ranks, ours on one thread a rank.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import meshwright.comm.mesh
import race
from meshwright.comm.mesh import Mesh
from meshwright.model.build import build
from meshwright.model.init import initialise_
from meshwright.parallel import tensor, zero
from meshwright.parallel.placement import cut_out
from meshwright.spec import splitting
from meshwright.spec.cuts import Cut
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Optimizer
from meshwright.train.optimizer import FlatAdamW

PEER, PEER_SP, OURS, OURS_SP, ALONE = "parallelize_module", "parallelize_module sp", "tp", "tp sp", "one rank"
CHUNKED = "tp sp, 2 chunks"
PAIRS = ((OURS, PEER), (OURS_SP, PEER_SP), (CHUNKED, OURS_SP), (OURS, ALONE), (OURS_SP, ALONE))
TOLERANCE = 1e-4  # of gradients in float32, relative to the largest of the tensor


@dataclass(frozen=True)
class Case:
    model: ModelSpec
    sequences: int
    seq_len: int
    contestants: tuple[str, ...]


def llama(hidden: int, layers: int, ffn: int) -> ModelSpec:
    return ModelSpec(
        family="llama", vocab=8, hidden=hidden, layers=layers, heads=8, kv_heads=4, ffn=ffn, max_seq=512
    )  # fmt: skip


CASES = {
    "communication": Case(llama(256, 6, 704), 1, 64, (PEER, PEER_SP, OURS, OURS_SP)),
    "computation": Case(llama(256, 4, 704), 4, 128, (PEER, PEER_SP, OURS, OURS_SP, CHUNKED)),
    "one rank": Case(llama(1024, 1, 2816), 4, 256, (ALONE, OURS, OURS_SP)),
}


class Stack(nn.Module):
    """Blocks of the plain model, from hidden states [B, T, D] to hidden states."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        model = build(spec)
        initialise_(model, seed=0)
        self.blocks, self.rotary = model.blocks, model.rotary

    def forward(self, x: Tensor, length: int) -> Tensor:
        context = (*self.rotary(length), None)
        for block in self.blocks:
            x = block(x, *context)
        return x


Plan = dict[str, splitting.Split]


class Contestant(ABC):
    """A stack laid out over the ranks of `tp`, and with `sp` this rank's part of the sequence x [B, T, D]."""

    def __init__(self, stack: Stack, x: Tensor, mesh: Mesh, sp: bool) -> None:
        group = mesh.group("tp")
        self.stack, self.length = stack, x.size(1)
        self.x = x.chunk(group.size, dim=1)[group.rank].contiguous() if sp else x

    def accumulate(self) -> Tensor:
        """Forward and backward; the loss, with `sp` this rank's part of it."""
        loss = self.stack(self.x, self.length).square().sum()
        loss.backward()
        return loss.detach()

    @abstractmethod
    def gradients(self) -> Iterator[tuple[str, Tensor, tuple[Cut, ...]]]:
        """After `accumulate`: each parameter's name, its gradient, and how this is cut."""

    @abstractmethod
    def step(self) -> None:
        """One training step."""


class Ours(Contestant):
    """As the trainer does it: flat buffers, ZeRO 0, without clipping. Without a cut where `mesh` has one rank."""

    def __init__(self, stack: Stack, x: Tensor, mesh: Mesh, plan: Plan, sp: bool, chunks: int = 1) -> None:
        super().__init__(stack, x, mesh, sp)
        alone = mesh.sizes["tp"] == 1
        placements = None if alone else tensor.apply(stack, mesh, plan, sequence=sp, chunks=chunks)[1]
        self.sharded = zero.shard(stack, mesh, options=zero.Options(join=1_000_000), placements=placements)
        self.optimizer = FlatAdamW(self.sharded, Optimizer())

    def accumulate(self) -> Tensor:
        self.sharded.begin()
        self.sharded.micro(last=True)
        loss = super().accumulate()
        for _ in self.sharded.finish():
            pass
        return loss

    def step(self) -> None:
        self.accumulate()
        self.optimizer.step(1e-4)

    def gradients(self) -> Iterator[tuple[str, Tensor, tuple[Cut, ...]]]:
        for unit in self.sharded.units:
            for piece in unit.pieces:
                where = piece.placement
                yield where.name, piece.of(unit.gradient_shard).view(where.local_shape), where.cuts


class Peer(Contestant):
    def __init__(self, stack: Stack, x: Tensor, mesh: Mesh, sp: bool) -> None:
        super().__init__(stack, x, mesh, sp)
        outside = Shard(1) if sp else Replicate()
        plan = {
            "self_attn": PrepareModuleInput(
                input_layouts=(outside, None, None, None), desired_input_layouts=(Replicate(), None, None, None)
            ),
            "mlp": PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),)),
            "self_attn.o_proj": RowwiseParallel(output_layouts=outside),
            "mlp.down_proj": RowwiseParallel(output_layouts=outside),
        }
        plan |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        if sp:
            plan |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        for block in stack.blocks:
            for name, module in block.named_modules():  # what the styles distribute are torch's own
                if type(module).__name__ == "Linear":
                    block.set_submodule(name, as_torchs(module))
            parallelize_module(block, mesh.device_mesh["tp"], plan)
        kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}  # plain and DTensors do not mix in one call
        for parameter in stack.parameters():
            kinds.setdefault((isinstance(parameter, DTensor), parameter.ndim >= 2), []).append(parameter)
        self.optimizers = [
            torch.optim.AdamW(members, lr=1e-4, betas=Optimizer().betas, weight_decay=0.1 * matrix, fused=True)
            for (_, matrix), members in kinds.items()
        ]

    def step(self) -> None:
        self.accumulate()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> Iterator[tuple[str, Tensor, tuple[Cut, ...]]]:
        for name, parameter in self.stack.named_parameters():
            grad = parameter.grad
            yield name, grad.full_tensor() if isinstance(grad, DTensor) else grad, ()


def as_torchs(layer: nn.Module) -> nn.Linear:
    """The same linear layer as torch's own class, which is what the styles know."""
    linear = nn.Linear(layer.weight.size(1), layer.weight.size(0), bias=layer.bias is not None, device="meta")
    linear.weight, linear.bias = layer.weight, layer.bias
    return linear


def contestant(name: str, case: Case, mesh: Mesh, x: Tensor) -> Contestant:
    stack = Stack(case.model)
    if name in (PEER, PEER_SP):
        return Peer(stack, x, mesh, sp=name == PEER_SP)
    plan = {
        key.removeprefix("model.").replace("layers.", "blocks.", 1): split
        for key, split in splitting.plan(case.model).items()
        if ".layers." in key
    }
    if name == ALONE:
        return Ours(stack, x, Mesh.single(torch.device("cpu")), plan, sp=False)
    return Ours(stack, x, mesh, plan, sp=name != OURS, chunks=2 if name == CHUNKED else 1)


def check(name: str, it: Contestant, case: Case, x: Tensor) -> float:
    """The largest difference of loss and gradients from the plain stack's; raises if one is above TOLERANCE."""
    plain = Stack(case.model)
    expected = plain(x, x.size(1)).square().sum()
    expected.backward()
    loss = it.accumulate()
    if it.x is not x:
        dist.all_reduce(loss)
    worst = abs(float(loss / expected.detach()) - 1)
    seen = 0
    for which, grad, cuts in it.gradients():
        right = cut_out(plain.get_parameter(which).grad, cuts)
        worst = max(worst, float((grad - right).abs().max() / right.abs().max()))
        seen += 1
    assert seen == len(list(plain.parameters())), f"{name}: {seen} gradients"
    assert worst < TOLERANCE, f"{name}: {worst:.1e} from the plain stack"
    for parameter in it.stack.parameters():
        parameter.grad = None
    return worst


def contest(rank: int, ranks: int, rounds: int, only: list[str], no_yield: bool) -> None:
    if no_yield:
        meshwright.comm.mesh.yield_to_computing = lambda: None
    mesh = Mesh.create(Layout(tp=ranks, dp=1), device=torch.device("cpu"), timeout=120)
    for name, case in CASES.items():
        if (only and name not in only) or (ALONE in case.contestants and ranks > 2):
            continue
        x = torch.randn(case.sequences, case.seq_len, case.model.hidden, generator=torch.Generator().manual_seed(1))
        all_of_them = {each: contestant(each, case, mesh, x) for each in case.contestants}
        worst = max(check(each, it, case, x) for each, it in all_of_them.items())
        steps = {each: it.step for each, it in all_of_them.items()}
        if ALONE in steps and rank > 0:
            steps[ALONE] = lambda: None
        result = race.race(steps, rounds)
        if rank == 0:
            report(name, case, ranks, result, worst)
        dist.barrier()


def report(name: str, case: Case, ranks: int, result: race.Result, worst: float) -> None:
    size = sum(p.numel() for p in Stack(case.model).parameters())
    tokens = case.sequences * case.seq_len
    print(f"{name}: {case.model.layers} blocks of {case.model.hidden}, {size / 1e6:.1f} M parameters, {tokens} tokens")
    print(f"  tp={ranks}; losses and gradients as the plain stack's (largest difference {worst:.1e})")
    for contestant, ms in result.milliseconds.items():
        print(f"  {contestant:36} {ms:8.1f} ms a step (median)")
    for one, other in PAIRS:
        if {one, other} <= result.times.keys():
            median, low, high = result.ratio(one, other)
            print(f"  {one} / {other}: {median:.3f} (quartiles {low:.3f} to {high:.3f})")
    print(f"  controls: {case.contestants[0]} with itself {result.itself:.3f}, contention {result.contention:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--no-yield", action="store_true", help="leave Gloo's reading threads their priority")
    options = parser.parse_args()
    race.start_ranks(options.ranks, contest, options.ranks, options.rounds, options.only, options.no_yield)
