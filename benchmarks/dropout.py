"""What counter-based dropout costs beside torch's own: a million elements, and a GPT-2 training step. One thread.

    python benchmarks/dropout.py [--rounds 21] [--step-rounds 9]

Contestants alternate within a round, in reversed order every other round. Shown are medians over rounds of CPU time,
which does not count the time that others have the core, and of the ratio to the first contestant, round by round. The
first runs twice a round: where its ratio with itself is far from 1 the minute was noisy, run it again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from data_parallel import Tokens
from meshwright.comm.mesh import Mesh
from meshwright.model.dropout import Dropout, DropoutKey
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, RunSpec
from meshwright.train.trainer import Trainer

P = 0.1
SHAPES = {"hidden states": (4, 256, 1024), "attention weights": (4, 4, 256, 256)}  # 2²⁰ elements each
MODEL = ModelSpec(family="gpt2", vocab=1024, hidden=384, layers=4, heads=6, max_seq=256)
DROPPING = {"embd_dropout": P, "attn_dropout": P, "resid_dropout": P}
SEQUENCES, LENGTH = 4, 256


def alternate(contestants: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2) -> None:
    names = list(contestants)
    entries = {**contestants, f"{names[0]} (again)": contestants[names[0]]}
    times: dict[str, list[float]] = {name: [] for name in entries}
    for index in range(warmup + rounds):
        for name in entries if index % 2 else reversed(entries):
            start = time.thread_time()
            entries[name]()
            if index >= warmup:
                times[name].append(1e3 * (time.thread_time() - start))
    for name, each in times.items():
        ratio = statistics.median(a / b for a, b in zip(each, times[names[0]], strict=True))
        print(f"    {name:40} {statistics.median(each):8.2f} ms   {ratio:5.2f}", flush=True)


def elements(dtype: torch.dtype, shape: tuple[int, ...], rounds: int) -> None:
    x = torch.randn(shape, dtype=dtype).requires_grad_()
    grad = torch.randn(shape, dtype=dtype)
    ours, key = Dropout(P, place=1), DropoutKey(1, 2, torch.arange(shape[0]))
    ways: dict[str, Callable[[], Tensor]] = {
        "counter": lambda: ours(x, key),
        "torch: F.dropout": lambda: F.dropout(x, P),
        "torch: native_dropout": lambda: torch.native_dropout(x, P, True)[0],
    }
    print("  forward")
    alternate(ways, rounds)
    print("  forward and backward")
    alternate({name: lambda way=way: torch.autograd.grad(way(), x, grad) for name, way in ways.items()}, rounds)


def steps(precision: str, rounds: int) -> None:
    def step(attention: str, dropout: str = "counter", **rates: float) -> Callable[[], object]:
        run = RunSpec.model_validate(
            {
                "model": MODEL.model_copy(update=rates),
                "data": Data(seq_len=LENGTH),
                "batch": Batch(sequences=SEQUENCES, micro=SEQUENCES),
                "layout": Layout(dp=1),
                "attention": attention,
                "dropout": dropout,
                "precision": precision,
                "device": "cpu",
            }
        )
        trainer = Trainer(run, Mesh.single(torch.device("cpu")))
        data = Tokens(MODEL.vocab, SEQUENCES, LENGTH)
        return lambda: trainer.update(1, trainer.accumulate(data, 1))

    alternate(
        {
            "explicit, no dropout": step("explicit"),
            "explicit, dropout=counter": step("explicit", **DROPPING),
            "explicit, dropout=torch": step("explicit", "torch", **DROPPING),
            "sdpa, no dropout": step("sdpa"),
            "sdpa, dropout=torch": step("sdpa", "torch", **DROPPING),
        },
        rounds,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--step-rounds", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, shape in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            print(f"{name} {list(shape)}, {str(dtype).removeprefix('torch.')}, p = {P}")
            elements(dtype, shape, given.rounds)
    for precision in ("fp32", "bf16"):
        size = f"{MODEL.layers} layers of {MODEL.hidden}, {SEQUENCES} × {LENGTH} tokens"
        print(f"a training step of GPT-2, {size}, {precision}")
        steps(precision, given.step_rounds)
