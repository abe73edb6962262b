"""What ranks of this machine do to each other: collectives by size and group, and how busy ranks slow each other down.

Started as `python -m meshwright.train.probing_ranks FOLDER`; the folder holds `probe.json`, and gets `ranks.json`.
All collectives go through `comm`, as in training. They are measured in turns, so that a noisy moment is nobody's alone,
and medians are kept.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm import runtime
from meshwright.comm.collectives import Group
from meshwright.comm.mesh import Mesh
from meshwright.predict.cost.cpu import curve
from meshwright.spec.layout import Layout
from meshwright.spec.traffic import Operation
from meshwright.train.probing import CASES, TINY, Effort, Timer, Work
from meshwright.train.probing_steps import stepper
from meshwright.train.report import run_guarded

SIZES = (1 << 8, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
LEAST = 1e-6  # seconds
LARGE = (1 << 24, 1 << 26)  # beside these, on accelerators
TIMEOUT = 120.0
OVERLAP = 1 << 22  # bytes of the collective that computing is measured beside


def sizes(timer: Timer) -> tuple[int, ...]:
    """Bytes of payload."""
    if timer.effort.small:
        return SIZES[1:3]
    return SIZES if timer.device.type == "cpu" else (*SIZES, *LARGE)


def collectives(group: Group, payload: int, device: torch.device) -> dict[Operation, Work]:
    """Each collective of `payload` bytes, as the ledger counts them."""
    n, count = group.size, payload // 4 // group.size * group.size
    whole, part = torch.ones(count, device=device), torch.ones(count // n, device=device)
    other = torch.empty_like(whole)

    def told(issue: Callable[..., Any], *tensors: Tensor, **options: Any) -> Work:
        return lambda: issue(*tensors, reason="probe", phase="forward", **options).wait()

    found: dict[Operation, Work] = {
        "all_reduce": told(group.all_reduce, whole, awaited=True),
        "all_gather": told(group.all_gather, other, part),
        "reduce_scatter": told(group.reduce_scatter, part, whole),
        "all_to_all": told(group.all_to_all, other, whole),
        "shift": told(group.shift, other, whole),
    }
    if n == 2:
        found["send"] = lambda: _to_and_fro(group, whole)
    return found


def _to_and_fro(group: Group, t: Tensor) -> None:
    """A message there, and one back."""
    mine, other = group.rank, 1 - group.rank
    for sender in (0, 1):
        pending = (group.send if sender == mine else group.recv)(t, other, reason="probe", phase="forward")
        pending.wait()


def piece(device: torch.device, small: bool) -> Work:
    """Some computing between collectives, a few milliseconds of a core, or less of an accelerator."""
    rows = 16 if small else 256 if device.type == "cpu" else 4096
    x, weight = torch.randn(rows, rows, device=device), torch.randn(3 * rows, rows, device=device)

    def compute() -> None:
        for _ in range(2):
            F.silu(F.linear(x, weight))

    return compute


def measure(mesh_of: dict[int, Mesh], timer: Timer) -> list[tuple[Operation, int, int, Any]]:
    """Rows of `Constants.collectives`: groups of each size that the meshes have, all groups of one at once.

    What is kept is by how much computing takes longer that a collective follows. Ranks that compute never come at quite
    the same moment, and find caches full of other things; one collective after another would be done much sooner.
    """
    everybody = next(iter(mesh_of.values())).world_group
    works: dict[tuple[int, int, Operation], Work] = {}
    for ranks, mesh in mesh_of.items():
        for size in sizes(timer):
            for operation, work in collectives(mesh.group("tp"), size, timer.device).items():
                works[ranks, size, operation] = work
    took: dict[tuple[int, int, Operation], list[float]] = {key: [] for key in works}
    between = piece(timer.device, timer.effort.small)
    for turn in range(timer.effort.rounds + 1):
        for key, work in works.items():
            repeats = 2 if key[1] > 1 << 18 or timer.effort.small else 4
            alone = _repeated(everybody, timer, repeats, between)
            both = _repeated(everybody, timer, repeats, between, work)
            if turn:  # the first connects
                took[key].append(both - alone)
    rows: dict[tuple[Operation, int], dict[int, float]] = {}
    for (ranks, size, operation), times in took.items():
        half = 2 if operation == "send" else 1
        rows.setdefault((operation, ranks), {})[size] = max(_short(statistics.median(times) / half), LEAST)
    return [(operation, everybody.size, ranks, curve(points)) for (operation, ranks), points in sorted(rows.items())]


def _repeated(everybody: Group, timer: Timer, repeats: int, *works: Work) -> float:
    """Seconds of all `works` one after another, of so many times."""
    everybody.barrier("probe")
    start = time.perf_counter()
    for _ in range(repeats):
        for work in works:
            work()
    timer.wait()
    return (time.perf_counter() - start) / repeats


def relay(group: Group, timer: Timer, tokens: int) -> float:
    """Seconds of a hop where so many tokens go round the group, and who has one computes before it sends it on."""
    apart, t = group.size // tokens, torch.ones(1 << 15, device=timer.device)
    between = piece(timer.device, timer.effort.small)
    hops = 4 if timer.effort.small else 24
    following, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size

    def round_() -> None:
        for hop in range(hops):
            if (group.rank - hop) % apart == 0:
                between()
                group.send(t, following, reason="probe", phase="forward").wait()
            if (group.rank - hop - 1) % apart == 0:
                group.recv(t, before, reason="probe", phase="forward").wait()

    times = [_repeated(group, timer, 1, round_) / hops for _ in range(timer.effort.rounds)]
    return statistics.median(times)


def uneven(group: Group, timer: Timer, cores: int) -> float:
    """How far the system is from giving as many ranks as there are cores one each, while the others wait for them: 0,
    they are as fast as one alone; 1, as if all were computing."""
    alone, many = relay(group, timer, 1), relay(group, timer, cores)
    return min(max((many / alone - 1) / (group.size / cores - 1), 0.0), 1.0)


def busy(everybody: Group, timer: Timer, step: Work, counts: Sequence[int]) -> list[tuple[int, float]]:
    """Seconds of `step` on rank 0 while so many ranks do the same and the others wait, for each of `counts`."""
    times: dict[int, list[float]] = {ranks: [] for ranks in counts}
    for _ in range(timer.effort.rounds):
        for ranks, took in times.items():
            everybody.barrier("probe")
            start = time.perf_counter()
            if everybody.rank < ranks:
                step()
                timer.wait()
            took.append(time.perf_counter() - start)
    everybody.barrier("probe")
    return [(ranks, statistics.median(took)) for ranks, took in times.items()]


def contention(group: Group, timer: Timer, step: Work) -> float:
    """The part of a collective's time that computing beside it loses: 0, they are beside each other; 1, one after the
    other."""
    t = torch.ones(OVERLAP // (64 if timer.effort.small else 1) // 4, device=timer.device)
    took: dict[str, list[float]] = {"both": [], "computing": [], "moving": []}
    for _ in range(timer.effort.rounds):
        for what, times in took.items():
            group.barrier("probe")
            start = time.perf_counter()
            pending = [
                group.all_reduce(t, reason="probe", phase="backward", async_=True)
                for _ in range(2)
                if what != "computing"
            ]
            if what != "moving":
                step()
            for each in pending:
                each.wait()
            timer.wait()
            times.append(time.perf_counter() - start)
    both, computing, moving = (statistics.median(times) for times in took.values())
    return min(max((both - max(computing, moving)) / min(computing, moving), 0.0), 1.0)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def main(folder: Path) -> None:
    asked = json.loads((folder / "probe.json").read_text())
    device = runtime.pick_device(asked["device"], runtime.place().local_rank)
    runtime.init(device, TIMEOUT)
    world = dist.get_world_size()
    timer = Timer(device, Effort(**asked["effort"]))
    groups = [n for n in range(2, world + 1) if (world % n == 0 and n & (n - 1) == 0) or n == world]
    meshes = {n: Mesh.create(Layout(tp=n, dp=world // n), device=device, timeout=TIMEOUT) for n in groups}
    with torch.no_grad():
        rows = measure(meshes, timer)
    step = stepper((TINY if timer.effort.small else CASES[0]).run("fp32"), Mesh.single(device))
    step()
    found = {
        "collectives": rows,
        "busy": busy(meshes[world].world_group, timer, step, [1, *groups]),
        "contention": contention(meshes[world].group("tp"), timer, step),
    }
    cores = len(os.sched_getaffinity(0)) if device.type == "cpu" else world
    if world > cores and world % cores == 0:
        found["uneven"] = uneven(meshes[world].group("tp"), timer, cores)
    if dist.get_rank() == 0:
        (folder / "ranks.json").write_text(json.dumps(found))
    runtime.shutdown()


def asked_of(device: str, effort: Effort) -> str:
    """The contents of `probe.json`."""
    return json.dumps({"device": device, "effort": asdict(effort)})


if __name__ == "__main__":
    raise SystemExit(run_guarded(lambda: main(Path(sys.argv[1]))))
