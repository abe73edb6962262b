"""Measure this machine into a cluster: what a device computes, what ranks send, and what they cost each other."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshwright.comm.runtime import pick_device
from meshwright.predict.cost.step import step_time
from meshwright.spec.cluster import Cluster, Device, Flops, Link
from meshwright.spec.devices import KINDS, Kind, of
from meshwright.train.launch import launch
from meshwright.train.probing import CASES, TINY, Effort, Timer, peaks
from meshwright.train.probing_ranks import asked_of
from meshwright.train.probing_steps import fit_device, middle, slowed, threads, with_constants

WORKER = "meshwright.train.probing_ranks"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(device: str = "auto", ranks: int | None = None, nodes: int = 1) -> Cluster:
    """This machine as it is known without measuring: its accelerators by name, else its cores.

    ranks: devices of it; by default as many as there are. nodes: how many such machines there are. Raises UserError
    where the machine has no such device.
    """
    found = pick_device(device, (ranks or 1) - 1)
    if found.type == "cpu":
        count = cores()
        memory = _memory()
        cluster = of(KINDS["cpu"], nodes, ranks or count)
        own = cluster.device.model_copy(update={"memory": memory // count, "name": f"CPU core of {count}"})
        return cluster.model_copy(update={"device": own, "cores": count, "host_memory": memory})
    name = torch.cuda.get_device_name(found)
    here = of(_kind(name, found), nodes, ranks or torch.accelerator.device_count())
    return here.model_copy(update={"cores": cores(), "host_memory": _memory()})


def _kind(name: str, device: torch.device) -> Kind:
    """The preset that the name of an accelerator means; of one that nobody knows, an H100's links."""
    words = name.lower().replace("-", " ").split()
    memory = torch.cuda.get_device_properties(device).total_memory
    fitting = [
        kind for key, kind in KINDS.items() if key.split("-")[0] in words and ("pcie" in key) == ("pcie" in words)
    ]
    if fitting:
        return min(fitting, key=lambda kind: abs(kind.device.memory - memory))
    unknown = Device(name=name, kind="gpu", flops=Flops(fp32=1e13), memory=memory, bandwidth=1e12)
    base = KINDS["h100"]
    return Kind(unknown, base.inner, base.outer, base.stack)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def probe(
    ranks: int | None = None,
    *,
    device: str = "auto",
    effort: Effort | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Cluster:
    """Measure this machine, with up to `ranks` ranks at once; by default one for each device, or core.

    Raises UserError for devices that are not there, RanksEnded where ranks fail.
    """
    effort = effort or Effort()
    cluster = machine(device, ranks)
    here = pick_device(device, 0)
    cpu = here.type == "cpu"
    precision = "fp32" if cpu else "bf16"
    say("measuring what one device computes")
    timer, before = Timer(here, effort), torch.get_num_threads()
    torch.set_num_threads(1 if cpu else before)
    try:
        if cpu:
            reached = peaks(timer)
            flops = cluster.device.flops.model_copy(update=reached)
            cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update={"flops": flops})})
        cluster = middle([fit_device(timer, cluster, precision) for _ in range(effort.passes)])
        if cpu and (cluster.cores or 1) > 1:
            say(f"measuring what {cluster.cores} threads are worth")
            case = TINY if effort.small else CASES[-1]
            many = statistics.median(threads(timer, case, precision, cluster.cores or 1) for _ in range(effort.passes))
            cluster = with_constants(cluster, {"threads": ((cluster.cores, _short(many)),)})
    finally:
        torch.set_num_threads(before)
    counts = [count for count in range(2, cluster.devices + 1) if count & (count - 1) == 0 or count == cluster.devices]
    measured = []
    for count in counts:
        say(f"measuring {count} ranks")
        measured.append(_ranks(count, device, effort))
    if cpu and measured:
        cluster = _again(cluster, measured[0]["busy"][0][1], effort)
    return _together(cluster, measured)


def _again(cluster: Cluster, alone: float, effort: Effort) -> Cluster:
    """`cluster` as fast as it was both in the beginning and later, when a rank's step took `alone`: what computes is
    corrected by half of what is between."""
    run = (TINY if effort.small else CASES[0]).run("fp32")
    known = step_time(run, run.layout, cluster.model_copy(update={"cores": 1})).seconds
    return slowed(cluster, (known / alone) ** 0.5)


def _ranks(count: int, device: str, effort: Effort) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="meshwright-probe-") as name:
        folder = Path(name)
        (folder / "probe.json").write_text(asked_of(device, effort))
        launch([name], ranks=count, folder=folder, quiet=True, entry=WORKER, check=True)
        found: dict[str, Any] = json.loads((folder / "ranks.json").read_text())
        return found


def _together(cluster: Cluster, measured: list[dict[str, Any]]) -> Cluster:
    """`cluster` with what was measured among 2, 4, … ranks, fewest first."""
    if not measured:
        return cluster
    rows = [row for each in measured for row in each["collectives"]]
    constants: dict[str, Any] = {"collectives": tuple(_frozen(row) for row in rows)}
    if cluster.device.kind == "cpu":
        slower = {1: 1.0}
        for each in measured:
            (_, alone), *others = each["busy"]
            slower |= {n: _short(took / alone / max(n / (cluster.cores or 1), 1)) for n, took in others}
        constants |= {"busy": tuple(slower.items()), "overlap_message": False}
        constants["uneven"] = max((_short(each["uneven"]) for each in measured if "uneven" in each), default=0.0)
    constants["contention"] = _short(measured[0]["contention"])
    sums = {row[2]: dict(row[3]) for row in rows if row[0] == "all_reduce" and row[1] == row[2]}
    curve = sums[min(sums)]
    least, most = min(curve), max(curve)
    inner = Link(
        name=cluster.links[0].name, devices=cluster.links[0].devices, latency=curve[least], bandwidth=most / curve[most]
    )
    cluster = cluster.model_copy(update={"links": (inner, *cluster.links[1:])})
    return with_constants(cluster, constants)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list | tuple) else value


def _short(value: float) -> float:
    return float(f"{value:.4g}")
