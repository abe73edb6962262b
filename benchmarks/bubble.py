"""The bubble of a pipeline as traced, beside the schedule's as predicted.

    python benchmarks/bubble.py [--steps 5] [--micros 2 4 8]

Two ranks of one thread each; compute-heavy stages that cost the same, those of benchmarks/pipeline.py. Measured: of a
step's actions, from the first to the last, the part of both ranks' time in which they compute neither forward nor
backward (median over steps; in brackets the least and the most). Predicted: the schedule, backward twice forward,
messages free. The aim is 5 points.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import torch

import race
from meshwright.comm.mesh import Mesh
from meshwright.comm.trace import Trace, collect
from meshwright.schedule import make
from meshwright.schedule.timeline import simulate
from meshwright.spec.layout import Layout
from meshwright.train.breakdown import bubble
from pipeline import CASES, TORCHS, Ours

WARM_UP = 2
RANKS = 2


def measure(rank: int, steps: int, micros: list[int]) -> None:
    mesh = Mesh.create(Layout(pp=RANKS, dp=1), device=torch.device("cpu"), timeout=120)
    for name in TORCHS:
        chunks = 2 if name == "interleaved" else 1
        for number in micros:
            case = replace(CASES["heavy"], micros=number)
            x = torch.randn(number * case.sequences, case.seq_len, case.hidden)
            ours, trace = Ours(name, case, mesh, chunks, x), Trace(mesh.device)
            for step in range(WARM_UP + steps):
                mesh.world_group.barrier("step")
                if step >= WARM_UP:
                    mesh.tracing.now = trace
                    trace.begin_step()
                ours.accumulate()
                if mesh.tracing.now is not None:
                    trace.end_step(step)
                mesh.tracing.now = None
            ranks = collect(trace, mesh)
            if ranks is not None:
                found = sorted(bubble(ranks, step) for step in range(steps))
                predicted = simulate(make(name, RANKS, number, chunks)).bubble
                measured = statistics.median(found)
                print(
                    f"{name:12} m={number}: measured {measured:6.1%} ({found[0]:.1%} to {found[-1]:.1%}), predicted "
                    f"{predicted:6.1%}, {100 * (measured - predicted):+.1f} points",
                    flush=True,
                )
    contention = race.contention()
    if rank == 0:
        print(f"contention {contention:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--micros", type=int, nargs="*", default=[2, 4, 8])
    options = parser.parse_args()
    race.start_ranks(RANKS, measure, options.steps, options.micros)
