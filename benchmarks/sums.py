"""Sums that a rank waits for, of small tensors: by Gloo's ring, and sent to all ranks at once and added up by each.

    python benchmarks/sums.py [--ranks 4] [--rounds 20]

Milliseconds a sum (median over rounds of many sums one after the other), in alternation. See `all_reduce` in
comm/collectives.py; more than SMALL_SUM bytes go by the ring either way.
"""

from __future__ import annotations

import argparse
from unittest import mock

import torch

import race
from meshwright.comm.mesh import Mesh
from meshwright.spec.layout import Layout

SIZES = (256, 1 << 14, 1 << 16, 1 << 17, 1 << 18)
REPEATS = 40


def contest(rank: int, ranks: int, rounds: int) -> None:
    group = Mesh.create(Layout(dp=1, tp=ranks), device=torch.device("cpu"), timeout=60).group("tp")
    limit = mock.patch("meshwright.comm.collectives.lent_to_sum", lambda ranks, payload: ranks * payload)
    for size in SIZES:
        t = torch.zeros(size // 4)

        def sums(awaited: bool, t: torch.Tensor = t) -> None:
            with limit:
                for _ in range(REPEATS):
                    group.all_reduce(t, reason="race", phase="step", awaited=awaited)

        result = race.race({"ring": lambda: sums(False), "all at once": lambda: sums(True)}, rounds)
        if rank == 0:
            each = {name: ms / REPEATS for name, ms in result.milliseconds.items()}
            words = ", ".join(f"{name} {ms:.2f} ms" for name, ms in each.items())
            print(f"{size:7} bytes, {ranks} ranks: {words}; ratio {result.ratios['all at once'][0]:.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    race.start_ranks(options.ranks, contest, options.ranks, options.rounds)
