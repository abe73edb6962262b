"""Our pipeline's step beside torch's `torch.distributed.pipelining`: the same stages, micro-batches and schedules.

    python benchmarks/pipeline.py [--ranks 2] [--rounds 40] [--only NAME …]

Both train the same stages of Llama blocks on the same hidden states: forward and backward of all micro-batches, the sum
of squares as loss, fused AdamW. Torch's gradients are sums as ours are (`scale_grads=False`). Before the race loss and
gradients of each contestant are compared with those of the whole stack on one rank. "small" stages take little longer
than their messages; "heavy" ones are mostly matrix products.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import race
from meshwright.comm.mesh import Mesh
from meshwright.model.build import build
from meshwright.model.init import initialise_
from meshwright.parallel import zero
from meshwright.parallel.pipeline import Pipeline
from meshwright.parallel.together import ShardedStages
from meshwright.schedule import make
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Optimizer
from meshwright.train.optimizer import FlatAdamW

TORCHS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
TOLERANCE = 1e-4  # of gradients in float32, relative to the largest of the tensor
LR = 1e-4


@dataclass(frozen=True)
class Case:
    """blocks: of each stage. sequences: of each micro-batch."""

    hidden: int
    blocks: int
    sequences: int
    seq_len: int
    micros: int

    def model(self, stages: int) -> ModelSpec:
        return ModelSpec(
            family="llama", vocab=8, hidden=self.hidden, layers=stages * self.blocks, heads=4, kv_heads=2,
            ffn=self.hidden * 11 // 4, max_seq=512,
        )  # fmt: skip


CASES = {"small": Case(64, 1, 1, 32, 8), "heavy": Case(384, 2, 2, 128, 8)}


class Part(nn.Module):
    """Blocks of the plain model, from hidden states [B, T, D] to hidden states."""

    def __init__(self, blocks: Sequence[nn.Module], context: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.context = (*context, None)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *self.context)
        return x


def parts(case: Case, stages: int) -> list[Part]:
    """The stages, filled alike on every rank."""
    model = build(case.model(stages))
    initialise_(model, seed=0)
    context = model.rotary(case.seq_len)
    blocks = list(model.blocks)
    return [Part(blocks[i : i + case.blocks], context) for i in range(0, len(blocks), case.blocks)]


def loss_of(out: Tensor, target: Tensor | None = None) -> Tensor:
    return out.square().sum()


class Contestant(ABC):
    """A rank's stages `mine` of a pipeline over x [micro-batches · B, T, D]."""

    mine: dict[int, Part]

    @abstractmethod
    def accumulate(self) -> float:
        """Forward and backward of all micro-batches; the sum of their losses on the last stage's rank, else 0."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """After `accumulate`: by "stage.parameter"."""

    @abstractmethod
    def step(self) -> None:
        """One training step."""


class Ours(Contestant):
    def __init__(self, name: str, case: Case, mesh: Mesh, chunks: int, x: Tensor) -> None:
        ranks = mesh.sizes["pp"]
        schedule = make(name, ranks, case.micros, chunks)
        every = parts(case, ranks * chunks)
        self.mine = {stage: every[stage] for stage in schedule.of_rank(mesh.coords["pp"])}
        options = zero.Options(join=1_000_000)
        self.sharded = ShardedStages([zero.shard(part, mesh, options=options) for part in self.mine.values()])
        self.stages = dict(zip(self.mine, self.sharded.stages, strict=True))
        self.pipeline = Pipeline(mesh, schedule, torch.float32)
        self.optimizer = FlatAdamW(self.sharded, Optimizer())
        self.last = ranks * chunks - 1
        self.x = x.chunk(case.micros)
        self.loss = torch.zeros(())

    # What the engine asks.

    def shape(self, micro: int) -> Sequence[int]:
        return self.x[micro].shape

    def forward(self, stage: int, micro: int, hidden: Tensor | None) -> Tensor:
        self.stages[stage].forward(micro)
        out: Tensor = self.mine[stage](self.x[micro] if hidden is None else hidden)
        self.stages[stage].end_pass(backward=False)
        if stage < self.last:
            return out
        loss = loss_of(out)
        self.loss += loss.detach()
        return loss

    def before_backward(self, stage: int, micro: int, last: bool) -> None:
        self.stages[stage].backward(micro, last=last)

    def after_backward(self, stage: int, micro: int) -> None:
        self.stages[stage].end_pass(backward=True)

    def accumulate(self) -> float:
        self.loss = torch.zeros(())
        self.sharded.begin()
        self.pipeline.run(self)
        for _ in self.sharded.finish():
            pass
        return float(self.loss)

    def step(self) -> None:
        self.accumulate()
        self.optimizer.step(LR)

    def gradients(self) -> dict[str, Tensor]:
        return {
            f"{stage}.{piece.placement.name}": piece.of(unit.gradient_shard).view(piece.placement.shape)
            for stage, sharded in self.stages.items()
            for unit in sharded.units
            for piece in unit.pieces
        }


class Torchs(Contestant):
    def __init__(self, name: str, case: Case, mesh: Mesh, chunks: int, x: Tensor) -> None:
        ranks, rank = mesh.sizes["pp"], mesh.coords["pp"]
        group = dist.new_group(list(range(ranks)))
        every = parts(case, ranks * chunks)
        self.mine = {stage: every[stage] for stage in range(rank, ranks * chunks, ranks)}
        stages = [
            PipelineStage(part, stage, ranks * chunks, torch.device("cpu"), group=group)
            for stage, part in self.mine.items()
        ]
        make_: Callable[..., object] = TORCHS[name]
        given = stages if name == "interleaved" else stages[0]
        self.schedule = make_(given, case.micros, loss_fn=loss_of, scale_grads=False)
        parameters = [p for part in self.mine.values() for p in part.parameters()]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=Optimizer().betas, fused=True)
        self.first, self.last = 0 in self.mine, ranks * chunks - 1 in self.mine
        self.x = x

    def accumulate(self) -> float:
        losses: list[Tensor] = []
        given = (self.x,) if self.first else ()
        if self.last:
            self.schedule.step(*given, target=self.x, losses=losses)
        else:
            self.schedule.step(*given)
        return float(sum(loss.detach() for loss in losses)) if losses else 0.0

    def step(self) -> None:
        self.accumulate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, Tensor]:
        return {
            f"{stage}.{name}": p.grad
            for stage, part in self.mine.items()
            for name, p in part.named_parameters()
            if p.grad is not None
        }


def check(it: Contestant, case: Case, stages: int, x: Tensor) -> float:
    """The largest difference of the loss and of this rank's gradients from those of all stages on one rank."""
    whole = nn.Sequential(*parts(case, stages))
    expected = torch.zeros(())
    for part in x.chunk(case.micros):
        loss = loss_of(whole(part))
        loss.backward()
        expected += loss.detach()
    total = torch.tensor(it.accumulate())
    dist.all_reduce(total)
    worst = abs(float(total / expected) - 1)
    found = it.gradients()
    right = {name: p.grad for name, p in whole.named_parameters() if int(name.partition(".")[0]) in it.mine}
    assert found.keys() == right.keys()
    for name, gradient in found.items():
        worst = max(worst, float((gradient - right[name]).abs().max() / right[name].abs().max()))
    assert worst < TOLERANCE, f"{type(it).__name__}: {worst:.1e} from one rank"
    for part in it.mine.values():
        for parameter in part.parameters():
            parameter.grad = None
    return worst


def contest(rank: int, ranks: int, rounds: int, only: list[str]) -> None:
    mesh = Mesh.create(Layout(pp=ranks, dp=1), device=torch.device("cpu"), timeout=120)
    for name, case in CASES.items():
        if only and name not in only:
            continue
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(case.micros * case.sequences, case.seq_len, case.hidden, generator=generator)
        for schedule in TORCHS:
            chunks = 2 if schedule == "interleaved" else 1
            both: dict[str, Contestant] = {
                "torch": Torchs(schedule, case, mesh, chunks, x),
                "ours": Ours(schedule, case, mesh, chunks, x),
            }
            worst = max(check(it, case, ranks * chunks, x) for it in both.values())
            result = race.race({who: it.step for who, it in both.items()}, rounds)
            if rank == 0:
                report(name, schedule, case, ranks, chunks, result, worst)
            dist.barrier()


def report(name: str, schedule: str, case: Case, ranks: int, chunks: int, result: race.Result, worst: float) -> None:
    ours, torchs = (result.milliseconds[who] for who in ("ours", "torch"))
    median, low, high = result.ratio("ours", "torch")
    print(
        f"{name}, {schedule}, pp={ranks}{f' × {chunks} chunks' if chunks > 1 else ''}: {case.micros} micro-batches of "
        f"{case.sequences} × {case.seq_len}, {case.blocks} blocks of {case.hidden} a stage"
    )
    print(f"  losses and gradients as one rank's (largest difference {worst:.1e})")
    print(f"  torch.distributed.pipelining {torchs:8.1f} ms a step (median), ours {ours:8.1f}")
    print(f"  ours / torch: {median:.3f} (quartiles {low:.3f} to {high:.3f})")
    print(f"  controls: torch with itself {result.itself:.3f}, contention {result.contention:.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="*", default=[], choices=list(CASES))
    options = parser.parse_args()
    race.start_ranks(options.ranks, contest, options.ranks, options.rounds, options.only)
