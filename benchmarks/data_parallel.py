"""Our data-parallel step beside torch's DistributedDataParallel, and what the ledger costs.

    python benchmarks/data_parallel.py [--ranks 2] [--rounds 40]

Both train the same plain model on the same tokens: forward, backward with overlapped reduction, clipping by global
norm, AdamW. The peer uses `gradient_as_bucket_view`, torch's `clip_grad_norm_` and fused AdamW.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import race
from meshwright.comm.ledger import Ledger
from meshwright.comm.mesh import Mesh
from meshwright.model.build import build
from meshwright.model.init import initialise_
from meshwright.spec.batch import part
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, RunSpec
from meshwright.spec.traffic import TrafficKey
from meshwright.train.trainer import Trainer

CASES = {
    # name: (model, sequences a rank, tokens a sequence)
    "communication": (
        ModelSpec(family="llama", vocab=2048, hidden=320, layers=6, heads=5, ffn=1088, max_seq=64), 1, 64
    ),
    "computation": (
        ModelSpec(family="llama", vocab=512, hidden=192, layers=4, heads=6, ffn=512, max_seq=256), 8, 256
    ),
}  # fmt: skip


class Tokens:
    """Random token sequences in memory, with the methods of a data set that a trainer calls."""

    def __init__(self, vocab: int, sequences: int, seq_len: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(vocab, (sequences, seq_len + 1), generator=generator)

    def ids(self, step: int, sequences: int) -> torch.Tensor:
        return torch.arange(sequences)

    def batch(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.rows[torch.as_tensor(ids)]
        return rows[:, :-1], rows[:, 1:]

    def documents(self, ids: torch.Tensor) -> None:
        """None: attention knows none."""


def ours(run: RunSpec, mesh: Mesh, data: Tokens) -> race.Step:
    trainer = Trainer(run, mesh)

    def step() -> None:
        trainer.update(run.lr_schedule.warmup, trainer.accumulate(data, 0))

    return step


def peer(run: RunSpec, rank: int, ranks: int, data: Tokens) -> race.Step:
    model = build(run.model)
    initialise_(model, run.seed)
    return torchs_step(DistributedDataParallel(model, gradient_as_bucket_view=True), run, rank, ranks, data)


def torchs_step(model: torch.nn.Module, run: RunSpec, rank: int, ranks: int, data: Tokens) -> race.Step:
    """A step of a model that torch has laid out, with its own clipping and fused AdamW."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": run.optimizer.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=run.optimizer.lr, betas=run.optimizer.betas, fused=True,
    )  # fmt: skip
    mine = part(run.batch.sequences, ranks, rank)

    def step() -> None:
        tokens, targets = data.batch(torch.arange(mine.start, mine.stop))
        loss = model(tokens, targets) / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip or float("inf"))
        adam.step()
        adam.zero_grad(set_to_none=True)

    return step


def ledger_cost(records: int = 100_000) -> float:
    """Microseconds that one record takes."""
    ledger = Ledger()
    key = TrafficKey("all_reduce", "dp", "zero.reduce", "backward", None)
    start = time.perf_counter()
    for _ in range(records):
        ledger.record(key.operation, key.axis, key.reason, key.phase, key.micro, 2, 1024)
    return 1e6 * (time.perf_counter() - start) / records


def contest(rank: int, ranks: int, rounds: int) -> None:
    for name, (model, sequences, seq_len) in CASES.items():
        run = RunSpec(
            model=model,
            data=Data(seq_len=seq_len),
            batch=Batch(sequences=sequences * ranks, micro=sequences),
            layout=Layout(dp=ranks),
        )
        mesh = Mesh.create(run.layout, device=torch.device("cpu"), timeout=60)
        data = Tokens(model.vocab, run.batch.sequences, seq_len)
        us = ours(run, mesh, data)
        result = race.race({"DistributedDataParallel": peer(run, rank, ranks, data), "meshwright": us}, rounds)
        mesh.ledger.clear()
        us()
        records = sum(row.count for row in mesh.ledger.rows())
        if rank == 0:
            report(name, run, result, records)
        dist.barrier()


def report(name: str, run: RunSpec, result: race.Result, records: int) -> None:
    size = sum(p.numel() for p in build(run.model, device="meta").parameters())
    tokens = run.batch.micro * run.data.seq_len
    median, low, high = result.ratios["meshwright"]
    cost = ledger_cost()
    print(f"{name}: {size / 1e6:.1f} M parameters, {tokens} tokens a rank, dp={run.layout.dp}")
    for contestant, ms in result.milliseconds.items():
        print(f"  {contestant:36} {ms:8.1f} ms a step (median)")
    print(f"  meshwright / DistributedDataParallel: {median:.3f} (quartiles {low:.3f} to {high:.3f})")
    print(f"  controls: peer with itself {result.itself:.3f}, contention {result.contention:.2f}")
    share = 100 * records * cost / 1e3 / result.milliseconds["meshwright"]
    print(f"  ledger: {cost:.2f} µs a record × {records} records = {share:.4f}% of our step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    race.start_ranks(options.ranks, contest, options.ranks, options.rounds)
