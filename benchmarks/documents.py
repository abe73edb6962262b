"""What keeping packed documents apart costs: a block's forward and backward with a mask and without, by length.

    python benchmarks/documents.py [--rounds 15]

One device. The mask of documents is B·T² numbers, made once for all blocks, and torch's fused attention then takes the
mask instead of its own causal one, whose upper half it leaves out. Rounds alternate; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from meshwright.model.build import build
from meshwright.model.documents import positions_inside
from meshwright.model.init import initialise_
from meshwright.spec.model import ModelSpec

LENGTHS = (256, 512, 1024, 2048, 4096)
SPEC = ModelSpec(family="llama", vocab=256, hidden=512, layers=1, heads=8, kv_heads=4, ffn=1408, max_seq=max(LENGTHS))


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(length: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of the block alone and with documents kept apart, and of making the mask."""
    model = build(SPEC)
    initialise_(model, seed=0)
    (block,) = model.blocks
    tokens = torch.zeros(1, length, dtype=torch.int64)
    documents = (torch.arange(length) * 5 // length)[None]  # five of them
    x, gradient = torch.randn(2, 1, length, SPEC.hidden)
    positions = positions_inside(documents)
    given = {
        "alone": model.context(tokens, x.dtype, None, None, None, None),
        "documents": model.context(tokens, x.dtype, positions, length, documents, None),
    }

    def step(name: str) -> None:
        block(x.clone().requires_grad_(), *given[name]).backward(gradient)

    times: dict[str, list[float]] = {"alone": [], "documents": [], "mask": []}
    for index in range(rounds + 2):
        for name in given if index % 2 else reversed(given):
            times[name].append(seconds(partial(step, name)))
        times["mask"].append(seconds(lambda: block.self_attn.core.mask(length, x.dtype, x.device, documents)))
    return {name: found[2:] for name, found in times.items()}


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    print("| length | a block alone, ms | documents / alone | the mask, ms, for all blocks | the mask, MB |")
    print("|---|---|---|---|---|")
    for length in LENGTHS:
        times = measure(length, rounds)
        alone, making = (1e3 * statistics.median(times[name]) for name in ("alone", "mask"))
        ratio = statistics.median(b / a for a, b in zip(times["alone"], times["documents"], strict=True))
        held = 4 * length * length / 1e6
        print(f"| {length} | {alone:.1f} | {ratio:.2f} | {making:.2f} | {held:.1f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    main(parser.parse_args().rounds)
