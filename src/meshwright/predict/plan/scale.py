"""More devices or fewer: what a run would fit on, and which change would make it fit where it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.predict.plan.capacity import allowance
from meshwright.predict.plan.memory import MemoryOf
from meshwright.predict.plan.search import Candidate, Search
from meshwright.spec.cluster import MOST_DEVICES, Cluster
from meshwright.spec.run import RunSpec

SMALL = {"micro": 1, "recompute": "full"}
"""What holds least of all that a mesh may have."""
MOST_NODES = 1 << 14
LEAST_SEQ = 128


@dataclass(frozen=True)
class Change:
    """One thing that would make a run fit: what, in words, and how an option would say it."""

    words: str
    option: str


def resized(cluster: Cluster, devices: int) -> Cluster:
    """`cluster` with so many devices: part of a node, or whole nodes, as many as that takes."""
    per_node = min(devices, cluster.per_node)
    nodes = -(-devices // per_node)
    links = list(cluster.links)
    if links and links[-1].devices < nodes * per_node:
        below = links[-2].devices if len(links) > 1 else 1
        joined = -(-nodes * per_node // below) * below
        links[-1] = links[-1].model_copy(update={"devices": joined})
    return cluster.model_copy(update={"nodes": nodes, "per_node": per_node, "links": tuple(links)})


def fits(run: RunSpec, cluster: Cluster, only: Mapping[str, Any] | None = None, known: MemoryOf | None = None) -> bool:
    """Whether some layout of `run` fits on `cluster`. known: see `Search`."""
    known = known or MemoryOf(run, cpu=cluster.device.kind == "cpu")
    if known.least(cluster.devices) > allowance(cluster.device).usable(cluster.device.memory):
        return False
    narrow = {name: value for name, value in SMALL.items() if name not in (only or {})}
    if run.compile != "none":
        narrow.pop("recompute", None)
    return Search(run, cluster, only={**narrow, **(only or {})}, known=known).any_fits()


def fewest_devices(run: RunSpec, cluster: Cluster, only: Mapping[str, Any] | None = None) -> int | None:
    """The fewest devices that hold `run`, of one node or of whole nodes; None where no number of nodes does.

    More nodes are taken to hold what fewer do.
    """
    known = MemoryOf(run, cpu=cluster.device.kind == "cpu")
    for devices in range(1, cluster.per_node + 1):
        if fits(run, resized(cluster, devices), only, known):
            return devices
    most = min(MOST_NODES, MOST_DEVICES // cluster.per_node)
    nodes = 2
    while nodes <= most and not fits(run, resized(cluster, nodes * cluster.per_node), only, known):
        nodes *= 2
    if nodes > most:
        return None
    low, high = nodes // 2, nodes
    while high - low > 1:
        middle = (low + high) // 2
        held = fits(run, resized(cluster, middle * cluster.per_node), only, known)
        low, high = (low, middle) if held else (middle, high)
    return high * cluster.per_node


def changes(search: Search, nearest: Candidate) -> Iterator[Change]:
    """What would make the run of a search fit, the smallest change first; nothing where nothing of these would."""
    run, cluster, only = search.run, search.cluster, search.space.only
    if run.precision in ("bf16", "fp16") and run.grad_dtype == "auto":
        narrow = run.model_copy(update={"grad_dtype": run.precision})
        if fits(narrow, cluster, only):
            yield Change(
                f"gradients in {run.precision}, which adds them up less exactly", f"grad_dtype={run.precision}"
            )
    if run.loss == "full" and run.precision != "fp16":
        chunked = run.model_copy(update={"loss": "chunked"})
        if fits(chunked, cluster, only):
            yield Change("the loss in chunks, never all logits at once", "loss=chunked")
    seq = run.data.seq_len // 2
    while seq >= LEAST_SEQ:
        shorter = run.model_copy(update={"data": run.data.model_copy(update={"seq_len": seq})})
        if fits(shorter, cluster, only):
            yield Change(f"sequences of {seq:,} tokens", f"--seq {seq}")
            break
        seq //= 2
    bare = {name: value for name, value in only.items() if name not in ("dp", "zero_shard")}
    devices = _more(run, cluster, bare)
    if devices is not None:
        yield Change(f"{devices:,} devices in {devices // cluster.per_node:,} nodes", f"{devices} devices")
    needed = allowance(cluster.device).needed(nearest.held)
    yield Change(f"devices of {needed / 1e9:,.0f} GB", f"{needed / 1e9:.0f} GB")


def _more(run: RunSpec, cluster: Cluster, only: Mapping[str, Any]) -> int | None:
    """The fewest devices, in whole nodes, that hold a run which this cluster does not."""
    nodes = cluster.nodes
    while (nodes := 2 * nodes) * cluster.per_node <= min(64 * cluster.devices, MOST_DEVICES):
        if fits(run, resized(cluster, nodes * cluster.per_node), only):
            low, high = nodes // 2, nodes
            while high - low > 1:
                middle = (low + high) // 2
                held = fits(run, resized(cluster, middle * cluster.per_node), only)
                low, high = (low, middle) if held else (middle, high)
            return high * cluster.per_node
    return None
