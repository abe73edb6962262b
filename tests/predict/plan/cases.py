"""Small models, runs and clusters that the tests of the search share."""

from __future__ import annotations

from typing import Any

from meshwright.predict.plan.places import Place, places
from meshwright.predict.plan.space import Grid, layout_of
from meshwright.predict.stages import stages_of
from meshwright.spec.cluster import Cluster, Device, Flops, Link
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import RunSpec

GPT2 = ModelSpec(family="gpt2", vocab=511, hidden=64, layers=8, heads=8, max_seq=2048)
LLAMA = ModelSpec(family="llama", vocab=515, hidden=64, layers=7, heads=8, kv_heads=2, ffn=160, max_seq=2048)


def run(model: ModelSpec = LLAMA, seq: int = 1024, sequences: int = 24, **fields: Any) -> RunSpec:
    """A run of a small model, its layout to be found."""
    chosen = {"precision": "bf16", "device": "cuda"} | fields
    batch = {"sequences": sequences, "micro": 1}
    return RunSpec.model_validate({"model": model, "data": {"seq_len": seq}, "batch": batch} | chosen)


def cluster(
    nodes: int = 2, per_node: int = 4, memory: int = 10**10, network: float = 1e10, kind: str = "gpu"
) -> Cluster:
    """Slow enough devices that messages matter beside small models."""
    peaks = Flops(fp32=1e12, bf16=4e12, fp16=4e12)
    device = Device.model_validate({"name": "small", "kind": kind, "flops": peaks, "memory": memory, "bandwidth": 2e11})
    links = [Link(name="near", devices=per_node, bandwidth=1e11, latency=2e-6)] if per_node > 1 else []
    if nodes > 1:
        links.append(Link(name="network", devices=nodes * per_node, bandwidth=network, latency=1e-5))
    return Cluster(
        device=device, nodes=nodes, per_node=per_node, links=tuple(links), cores=8 if kind == "cpu" else None
    )


def where(run: RunSpec, grid: Grid) -> list[list[Place]]:
    """For each pipeline of a grid the places that may hold most."""
    found = []
    for pipe in grid.pipes:
        layout = layout_of(grid.mesh, pipe, grid.shardings[0], grid.forms[0])
        found.append(places(pipe, grid.mesh.pp, stages_of(run.model, layout, run.data.seq_len)))
    return found


def checked(run: RunSpec, layout: Layout) -> RunSpec:
    """`run` with a layout, as a run file's would be checked. Raises pydantic's ValidationError."""
    return RunSpec.model_validate(run.model_dump() | {"layout": layout})
