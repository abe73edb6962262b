"""How far layouts are from float64 in two-byte precisions, over how far one device is: see docs/decisions.

    python benchmarks/narrow_bounds.py [--seeds 3]

Each layout's gradients over two steps, of every combination of dtypes; differences as `verify` takes them. Those that
come to a quarter of their fixed bound count for the ratio, which verify/narrow.py allows to be TIMES beyond the bound.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

import race
from meshwright.comm.mesh import Mesh
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, LrSchedule, Optimizer, RunSpec
from meshwright.verify.compare import bound_of, differences
from meshwright.verify.evidence import Evidence
from meshwright.verify.narrow import expected_of, narrow_gradients
from meshwright.verify.unequal import proof_data
from meshwright.verify.worker import collect

STEPS = 2
LLAMA = ModelSpec(
    family="llama", vocab=101, hidden=24, layers=2, heads=4, kv_heads=1, ffn=24, max_seq=32,
    qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
GPT2 = ModelSpec(family="gpt2", vocab=101, hidden=24, layers=2, heads=4, max_seq=32)
LAYOUTS = (
    (LLAMA, Layout(dp=2, tp=2, sp=True, zero=3)),
    (LLAMA, Layout(dp=4, zero=1)),
    (LLAMA, Layout(dp=1, tp=4, sp=True)),
    (GPT2, Layout(dp=2, tp=2)),
    (GPT2, Layout(dp=4)),
)
DTYPES = (
    {"precision": "bf16"},
    {"precision": "bf16", "grad_dtype": "bf16"},
    {"precision": "bf16", "reduce_dtype": "bf16"},
    {"precision": "bf16", "attention": "explicit"},
    {"precision": "fp16"},
    {"precision": "fp16", "grad_dtype": "fp16"},
    {"precision": "fp16", "attention": "explicit"},
)


def measured(rank: int, seeds: int) -> None:
    ratios: list[float] = []
    farthest: dict[str, list[float]] = {}
    for model, layout in LAYOUTS:
        mesh = Mesh.create(layout, device=torch.device("cpu"), timeout=60)
        for dtypes in DTYPES:
            for seed in range(seeds):
                run = RunSpec(
                    model=model, data=Data(seq_len=12), batch=Batch(sequences=7, micro=2), layout=layout, seed=seed,
                    optimizer=Optimizer(clip=0.5), lr_schedule=LrSchedule(warmup=2), **dtypes,
                )  # fmt: skip
                found: list[Evidence | None] = [None] * mesh.world
                dist.all_gather_object(found, collect(run, mesh, proof_data(run), STEPS))
                if rank == 0:
                    ranks = [each for each in found if each is not None]
                    compare(run, ranks, ratios, farthest.setdefault(run.precision, [0.0, 0.0]))
    if rank == 0:
        every = torch.tensor(ratios)
        print(f"{torch.backends.cpu.get_cpu_capability()}, seeds: {seeds}, gradients over a quarter: {len(ratios)}")
        quantiles = ", ".join(f"{every.quantile(q):.2f}" for q in (0.5, 0.99, 1.0))
        print(f"ratio: median, 99 of 100, most: {quantiles}")
        for precision, (layouts, one) in farthest.items():
            print(f"{precision}: farthest layout {layouts:.3f}, farthest one device {one:.3f}")


def compare(run: RunSpec, ranks: list[Evidence], ratios: list[float], farthest: list[float]) -> None:
    """Add one run's ratios, and what is farther than all before."""
    expected = expected_of(run, STEPS, ranks)
    one = differences(narrow_gradients(run, STEPS, ranks), expected)
    each = [differences(evidence, expected) for evidence in ranks]
    layout = {key: max(found[key] for found in each) for key in one}
    ratios += [layout[key] / one[key] for key in one if layout[key] > bound_of(run) / 4]
    farthest[:] = max(farthest[0], *layout.values()), max(farthest[1], *one.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    race.start_ranks(4, measured, options.seeds)
