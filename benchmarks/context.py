"""Attention over the ranks of `cp`: the zigzag ring beside one rank and the contiguous ring, and all methods by length.

    python benchmarks/context.py [--only race table four memory] [--rounds 7]

race: forward and backward of causal attention, two ranks of one thread each; "one rank" is rank 0 alone with torch's
fused attention over the whole sequence, the other waits. table: every method that two ranks have, by length and heads;
four: every method on four ranks, which share the cores where there are fewer. Beside what was measured stands what is
predicted: bytes from predict/context.py, and a time of (FLOPs of the busiest rank) / (rate of one rank's attention at
that length) + (bytes that a rank sends) / (rate of one shift), as if nothing ran under anything. memory: the most that
a rank holds in a step, beside its own parts of q, k, v and the gradient, and the largest tensor in it.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import race
from meshwright.comm.mesh import Mesh
from meshwright.parallel import context
from meshwright.predict.context import Attention, flops, in_passing, kept, needed_flops, traffic
from meshwright.spec.layout import AXES
from meshwright.spec.sequence import Method, Order, positions
from meshwright.verify.peak import SCRATCH, Watch

WIDTH = 64
RACES = [(4096, (8, 8)), (4096, (8, 2)), (4096, (2, 2)), (8192, (8, 2))]
TABLE = [(length, heads) for length in (1024, 4096) for heads in ((8, 8), (8, 2))]
FOUR = [(1024, (8, 8)), (1024, (8, 2)), (2048, (8, 2))]
MEMORY = 8192


@dataclass(frozen=True)
class Case:
    """One sequence of float32 numbers, causal."""

    method: Method
    order: Order
    length: int
    heads: int
    kv_heads: int
    inner: int = 1

    def predicted(self, cp: int) -> Attention:
        return Attention(
            self.method, cp, self.order, 1, self.length, self.heads, self.kv_heads, WIDTH, 4, self.inner
        )  # fmt: skip

    def inputs(self) -> list[Tensor]:
        random = torch.Generator().manual_seed(0)
        counts = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [torch.randn(1, self.length, heads, WIDTH, generator=random) for heads in counts]


class Step:
    """Forward and backward of a case on this rank's part."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        mine = positions(case.length, mesh.sizes["cp"], mesh.coords["cp"], case.order)
        *inputs, self.grad = (each[:, mine].contiguous() for each in case.inputs())
        self.inputs = [each.requires_grad_() for each in inputs]
        self.case, self.mesh, self.mine = case, mesh, mine

    def __call__(self) -> Tensor:
        for each in self.inputs:
            each.grad = None
        how = {"method": self.case.method, "order": self.case.order, "inner": self.case.inner}
        out = context.attention(*self.inputs, self.mesh, **how)
        out.backward(self.grad)
        return out


class Alone:
    """The whole sequence on one rank."""

    def __init__(self, case: Case) -> None:
        *inputs, self.grad = case.inputs()
        self.inputs = [each.requires_grad_() for each in inputs]

    def __call__(self) -> Tensor:
        for each in self.inputs:
            each.grad = None
        q, k, v = (each.transpose(1, 2) for each in self.inputs)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        out.backward(self.grad)
        return out


def check(step: Step, alone: Alone) -> float:
    """The largest difference from one rank's, of the output and of the gradients, relative to the largest there."""
    found = [step().detach(), *(each.grad for each in step.inputs)]
    right = [alone().detach(), *(each.grad for each in alone.inputs)]
    worst = max(float((a - b[:, step.mine]).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True))
    assert worst < 1e-4, f"{step.case}: {worst:.1e} from one rank's"
    return worst


def races(rank: int, mesh: Mesh, rounds: int) -> None:
    for length, (heads, kv_heads) in RACES:
        cases = {f"ring {order}": Case("ring", order, length, heads, kv_heads) for order in ("zigzag", "contiguous")}
        steps = {name: Step(case, mesh) for name, case in cases.items()}
        alone = Alone(cases["ring zigzag"])
        worst = max(check(step, alone) for step in steps.values())
        entries = {**steps, "one rank": alone if rank == 0 else lambda: None}
        result = race.race(entries, rounds, warmup=1)
        if rank == 0:
            print(
                f"T={length}, {heads}/{kv_heads} heads of {WIDTH}, cp=2; differences from one rank at most {worst:.1e}"
            )
            for name, ms in result.milliseconds.items():
                print(f"  {name:24} {ms:8.1f} ms forward and backward (median)")
            for other in ("one rank", "ring contiguous"):
                median, low, high = result.ratio("ring zigzag", other)
                print(f"  ring zigzag / {other}: {median:.3f} (quartiles {low:.3f} to {high:.3f})")
            print(f"  controls: ring zigzag with itself {result.itself:.3f}, contention {result.contention:.2f}")


def table(rank: int, mesh: Mesh, rows: list[tuple[int, tuple[int, int]]], rounds: int) -> None:
    cp = mesh.sizes["cp"]
    rate = seconds_a_byte(mesh)
    if rank == 0:
        print(f"cp={cp}; a shift moves {1e-9 / rate:.2f} GB/s")
        print("       T  heads  method   order          ms   predicted    MB sent   predicted")
    for length, (heads, kv_heads) in rows:
        cases = [Case("gather", "zigzag", length, heads, kv_heads), Case("rsa", "zigzag", length, heads, kv_heads)]
        cases += [Case("ring", order, length, heads, kv_heads) for order in ("zigzag", "striped", "contiguous")]
        cases += [Case("ulysses", "contiguous", length, heads, kv_heads)]
        cases += [Case("usp", "zigzag", length, heads, kv_heads, inner=2)] if cp == 4 else []
        alone = Alone(cases[0])
        one = statistics.median(race.timed(alone if rank == 0 else lambda: None) for _ in range(rounds))
        own = sum(needed_flops(Attention("ring", 1, "zigzag", 1, length, heads, kv_heads, WIDTH, 4), 0))
        if rank == 0:
            print(f"  {length:6}  {heads}/{kv_heads:<4} one rank {'':10} {1e3 * one:7.1f}")
        steps = [Step(case, mesh) for case in cases]
        times: list[list[float]] = [[] for _ in steps]
        for index in range(rounds + 1):
            for step, found in zip(steps, times, strict=True):
                seconds = race.timed(step)
                if index:
                    found.append(seconds)
        for case, step, found in zip(cases, steps, times, strict=True):
            mesh.ledger.clear()
            step()
            sent = sum(row.wire for row in mesh.ledger.take())
            it = case.predicted(cp)
            right = sum(row.wire for row in traffic(it, 1, None))
            # rsa has no causal mode: what it computes is what it calls for.
            work = flops if case.method == "rsa" else needed_flops
            busiest = max(sum(work(it, each)) for each in range(cp))
            expected = busiest / (own / one) + sent * rate
            if rank == 0:
                ms = 1e3 * statistics.median(found)
                what = f"{length:6}  {heads}/{kv_heads:<4} {case.method:8} {case.order:10}"
                print(f"  {what} {ms:7.1f}   {1e3 * expected:9.1f}   {sent / 1e6:8.2f}   {right / 1e6:9.2f}")
    contention = race.contention()  # by all ranks together
    if rank == 0:
        print(f"  control: contention {contention:.2f}")


def seconds_a_byte(mesh: Mesh) -> float:
    """Of a shift of 8 MiB over the ranks of cp."""
    a, b = torch.ones(1 << 21), torch.empty(1 << 21)
    group = mesh.group("cp")
    times = [race.timed(lambda: group.shift(b, a, reason="benchmark", phase="step").wait()) for _ in range(7)]
    each = torch.tensor([statistics.median(times[2:]) / (4 << 21)], dtype=torch.float64)
    dist.broadcast(each, 0)
    return float(each)


def memory(rank: int, mesh: Mesh) -> None:
    cp = mesh.sizes["cp"]
    for method in ("ring", "rsa"):
        mesh = make_mesh(rank, cp)  # whose buffers have not grown for anything else
        case = Case(method, "zigzag", MEMORY, 2, 2)
        step = Step(case, mesh)
        scratch = mesh.group("cp").scratch
        known = {"given": [each.untyped_storage() for each in (*step.inputs, step.grad)], SCRATCH: scratch.kept()}
        with Watch(known) as watch:
            step()
        peak = watch.peak()
        it = case.predicted(cp)
        if rank == 0:
            held = peak.total - peak.categories["given"]
            largest = max(peak.made.values())
            own = sum(row.bytes for row in kept(it) if row.what != "q")
            print(f"{method} at T={MEMORY}, cp={cp}, 2 heads of {WIDTH}: {held / 1e6:.1f} MB at most beside its inputs")
            passing = in_passing(it) + (it.scores * 4 // cp if method == "rsa" else 0)  # a product before it is placed
            expected = own + passing + it.q + it.kv
            print(
                f"  predicted {expected / 1e6:.1f} MB: kept {own / 1e6:.1f}, in passing {passing / 1e6:.1f}, gradients"
            )
            print(f"  most of it in {next(iter(peak.made))}: {largest / 1e6:.1f} MB")
            print(f"  T × T/cp for every head: {it.scores * 4 / 1e6:.1f} MB")
        dist.barrier()


def make_mesh(rank: int, ranks: int) -> Mesh:
    sizes = {axis: ranks if axis == "cp" else 1 for axis in AXES}
    return Mesh(sizes, AXES, rank, torch.device("cpu"), timeout=120)


def run(rank: int, ranks: int, only: list[str], rounds: int) -> None:
    mesh = make_mesh(rank, ranks)
    if ranks == 4:
        table(rank, mesh, FOUR, 3)
        return
    if "race" in only:
        races(rank, mesh, rounds)
    if "table" in only:
        table(rank, mesh, TABLE, 3)
    if "memory" in only:
        memory(rank, mesh)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["race", "table", "four", "memory"]
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.only != ["four"]:
        race.start_ranks(2, run, 2, options.only, options.rounds)
    if "four" in options.only:
        race.start_ranks(4, run, 4, options.only, options.rounds)
