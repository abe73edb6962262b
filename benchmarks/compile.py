"""What compiled blocks and each way of recompute cost beside the plain step.

    python benchmarks/compile.py [--ranks 1] [--rounds 30]

The same model trains on the same tokens: forward, backward, clipping, AdamW. Compilation happens in the warm-up, and is
timed apart.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist

import race
from data_parallel import CASES, Tokens, ours
from meshwright.comm.mesh import Mesh
from meshwright.spec.layout import Layout
from meshwright.spec.run import Batch, Data, RunSpec

WAYS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    # name: (fields of the layout, fields of the run)
    "plain": ({}, {}),
    "recompute full": ({"recompute": "full"}, {}),
    "recompute selective": ({"recompute": "selective"}, {}),
    "compiled": ({}, {"compile": "block"}),
    "compiled, recompute full": ({"recompute": "full"}, {"compile": "block"}),
}


def contest(rank: int, ranks: int, rounds: int) -> None:
    model, sequences, seq_len = CASES["computation"]
    contestants, first = {}, {}
    for name, (layout, options) in WAYS.items():
        run = RunSpec(
            model=model,
            data=Data(seq_len=seq_len),
            batch=Batch(sequences=sequences * ranks, micro=sequences),
            layout=Layout(dp=ranks, **layout),
            **options,
        )
        data = Tokens(model.vocab, run.batch.sequences, seq_len)
        mesh = Mesh.create(run.layout, device=torch.device("cpu"), timeout=600)
        contestants[name] = ours(run, mesh, data)
        began = time.perf_counter()
        contestants[name]()
        first[name] = time.perf_counter() - began
    result = race.race(contestants, rounds)
    if rank == 0:
        print(f"{model.layers} layers of {model.hidden}, {sequences} × {seq_len} tokens a rank, dp={ranks}")
        for name in WAYS:
            median, low, high = result.ratio(name, "plain")
            print(
                f"  {name:26} {result.milliseconds[name]:8.1f} ms a step, {median:.3f} of plain "
                f"(quartiles {low:.3f} to {high:.3f}); first step {first[name]:.1f} s"
            )
        print(f"  controls: plain with itself {result.itself:.3f}, contention {result.contention:.2f}")
    dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    race.start_ranks(options.ranks, contest, options.ranks, options.rounds)
