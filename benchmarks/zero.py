"""Our ZeRO stages beside torch's DistributedDataParallel and fully_shard.

    python benchmarks/zero.py [--ranks 2] [--rounds 40] [--only NAME …]

All train the same plain model on the same tokens: forward, backward, clipping by global norm, fused AdamW.
Stages 0 to 2 are compared with DistributedDataParallel (`gradient_as_bucket_view`), stage 3 with `fully_shard` of the
same units: each block, and the rest.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import race
from data_parallel import CASES, Tokens, ours, peer, torchs_step
from meshwright.comm.mesh import Mesh
from meshwright.model.build import build
from meshwright.model.init import initialise_
from meshwright.spec.layout import Layout
from meshwright.spec.run import Batch, Data, RunSpec

PAIRS = (
    ("stage 0", "DistributedDataParallel"),
    ("stage 1", "DistributedDataParallel"),
    ("stage 2", "stage 1"),
    ("stage 3", "fully_shard"),
)


def sharded_peer(run: RunSpec, rank: int, ranks: int, data: Tokens) -> race.Step:
    model = build(run.model)
    initialise_(model, run.seed)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model.model.embed_tokens)
    fully_shard([model.model.norm, model.lm_head])
    fully_shard(model)
    return torchs_step(model, run, rank, ranks, data)


def contest(rank: int, ranks: int, rounds: int) -> None:
    for name, (model, sequences, seq_len) in CASES.items():
        run = RunSpec(
            model=model,
            data=Data(seq_len=seq_len),
            batch=Batch(sequences=sequences * ranks, micro=sequences),
            layout=Layout(dp=ranks),
        )
        data = Tokens(model.vocab, run.batch.sequences, seq_len)
        contestants = {"DistributedDataParallel": peer(run, rank, ranks, data)}
        for stage in range(4):
            laid_out = run.model_copy(update={"layout": Layout(dp=ranks, zero=stage)})
            mesh = Mesh.create(laid_out.layout, device=torch.device("cpu"), timeout=60)
            contestants[f"stage {stage}"] = ours(laid_out, mesh, data)
        contestants["fully_shard"] = sharded_peer(run, rank, ranks, data)
        result = race.race(contestants, rounds)
        if rank == 0:
            report(name, run, result)
        dist.barrier()


def report(name: str, run: RunSpec, result: race.Result) -> None:
    size = sum(p.numel() for p in build(run.model, device="meta").parameters())
    tokens = run.batch.micro * run.data.seq_len
    print(f"{name}: {size / 1e6:.1f} M parameters, {tokens} tokens a rank, dp={run.layout.dp}")
    for contestant, ms in result.milliseconds.items():
        print(f"  {contestant:36} {ms:8.1f} ms a step (median)")
    for one, other in PAIRS:
        median, low, high = result.ratio(one, other)
        print(f"  {one} / {other}: {median:.3f} (quartiles {low:.3f} to {high:.3f})")
    print(f"  controls: peer with itself {result.itself:.3f}, contention {result.contention:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    race.start_ranks(options.ranks, contest, options.ranks, options.rounds)
