"""How long a large schedule takes to make, prove and time; and the proof of all small ones.

    python benchmarks/schedule.py [--ranks 64] [--micro-batches 512] [--chunks 4] [--rounds 5]
    python benchmarks/schedule.py --prove
    python benchmarks/schedule.py --groups

Seconds of the clock, the median of some rounds, of `interleaved`. --prove instead makes every named schedule of up to
8 ranks, 32 micro-batches and 4 chunks, checks it, and compares its simulated bubble with the closed form, exactly.
--groups shows what it costs to let the last group of interleaved micro-batches be smaller.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from fractions import Fraction

from meshwright.schedule import bubble, check, interleaved, make
from meshwright.schedule.timeline import simulate


def large(ranks: int, micros: int, chunks: int, rounds: int) -> None:
    schedule = make("interleaved", ranks, micros, chunks)
    actions = sum(map(len, schedule.ranks))
    parts: dict[str, Callable[[], object]] = {
        "make": lambda: make("interleaved", ranks, micros, chunks),
        "check": lambda: check(schedule),
        "simulate": lambda: simulate(schedule, send=0.1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            began = time.perf_counter()
            part()
            seconds[name].append(time.perf_counter() - began)
    print(f"interleaved, p = {ranks}, m = {micros}, v = {chunks}: {actions:,} actions")
    for name, each in seconds.items():
        median = statistics.median(each)
        spread = f"{min(each):.2f} to {max(each):.2f}"
        print(f"{name:9} {median:.2f} s ({spread}), {median / actions * 1e6:.2f} µs an action")
    both = [sum(each) for each in zip(seconds["make"], seconds["check"], strict=True)]
    print(f"made and checked in {statistics.median(both):.2f} s; load average {os.getloadavg()[0]:.1f}")


def groups() -> None:
    """What groups of nearly equal size are worth, against groups of p and a smaller last one."""
    even = interleaved._groups

    def last_smaller(ranks: int, micros: int) -> list[range]:
        return [range(start, min(start + ranks, micros)) for start in range(0, micros, ranks)]

    print("interleaved, p = 4, v = 2: bubble with groups of nearly equal size, and with a smaller last one")
    for micros in range(4, 17):
        found = []
        for interleaved._groups in (even, last_smaller):
            found.append(simulate(make("interleaved", 4, micros, 2)).bubble)
        print(f"m = {micros:2}  {found[0]:.1%}  {found[1]:.1%}")
    interleaved._groups = even


def prove() -> None:
    began, number = time.perf_counter(), 0
    for ranks in range(1, 9):
        for micros in range(1, 33):
            sizes = [(name, ranks, micros, 1) for name in ("naive", "gpipe", "1f1b")]
            sizes += [("interleaved", ranks, micros, chunks) for chunks in (2, 3, 4) if ranks > 1]
            for each in sizes:
                schedule = make(*each)
                check(schedule)
                assert simulate(schedule, forward=Fraction(1), backward=Fraction(2)).bubble == bubble(*each), each
                number += 1
    print(f"{number} schedules proven, bubbles as in closed form, in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prove", action="store_true")
    parser.add_argument("--groups", action="store_true")
    options = parser.parse_args()
    if options.prove:
        prove()
    elif options.groups:
        groups()
    else:
        large(options.ranks, options.micro_batches, options.chunks, options.rounds)
