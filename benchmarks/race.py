"""Contestants' steps in alternation, in one process group, on this machine as it is.

A shared machine is noisy, so what is reported is the median over rounds of the ratio of two steps that ran one
after the other, beside two controls: the ratio of one contestant with itself, and how much slower one rank's
arithmetic runs while the other ranks do the same. A control above 1.15 says the minute was noisy: run it again.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Step = Callable[[], None]


@dataclass(frozen=True)
class Result:
    """Milliseconds a step by contestant (median), ratios to the first contestant (median, quartiles), controls."""

    milliseconds: dict[str, float]
    ratios: dict[str, tuple[float, float, float]]
    itself: float
    contention: float
    times: dict[str, list[float]]

    def ratio(self, one: str, other: str) -> tuple[float, float, float]:
        """Median and quartiles over rounds of `one`'s step over `other`'s."""
        each = sorted(a / b for a, b in zip(self.times[one], self.times[other], strict=True))
        quartiles = statistics.quantiles(each, n=4)
        return statistics.median(each), quartiles[0], quartiles[2]


def timed(step: Step) -> float:
    """Seconds from all ranks' start to all ranks' end of `step`."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def race(contestants: Mapping[str, Step], rounds: int, warmup: int = 3) -> Result:
    """Alternate the contestants' steps; the order within a round is reversed every other round."""
    names = list(contestants)
    entries = [*names, f"{names[0]} (again)"]
    steps = dict(contestants) | {entries[-1]: contestants[names[0]]}
    times: dict[str, list[float]] = {name: [] for name in entries}
    for index in range(warmup + rounds):
        for name in entries if index % 2 else reversed(entries):
            seconds = timed(steps[name])
            if index >= warmup:
                times[name].append(seconds)
    first = times[names[0]]
    ratios = {}
    for name in entries[1:]:
        each = sorted(theirs / ours for theirs, ours in zip(times[name], first, strict=True))
        quartiles = statistics.quantiles(each, n=4)
        ratios[name] = (statistics.median(each), quartiles[0], quartiles[2])
    return Result(
        {name: 1e3 * statistics.median(values) for name, values in times.items()},
        ratios,
        ratios[entries[-1]][0],
        contention(),
        times,
    )


def contention(repeats: int = 7) -> float:
    """Time of a matrix product on every rank at once over its time on rank 0 alone."""
    a = torch.randn(512, 512)

    def work() -> None:
        for _ in range(8):
            a @ a

    def alone() -> None:
        if dist.get_rank() == 0:
            work()

    pairs = [(timed(work), timed(alone)) for _ in range(repeats)]
    return statistics.median(both / one for both, one in pairs)


def start_ranks(ranks: int, function: Callable[..., None], *args: object) -> None:
    """Run `function(rank, *args)` on `ranks` processes in one Gloo group, one thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_rank, (ranks, store.port, function, args), nprocs=ranks)


def _rank(rank: int, ranks: int, port: int, function: Callable[..., None], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    function(rank, *args)
    dist.barrier()
    dist.destroy_process_group()
