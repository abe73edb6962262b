"""Runs of small models, held against the plain model on one device."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.comm.mesh import Mesh
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, LrSchedule, Optimizer, RunSpec
from meshwright.verify.evidence import Evidence
from meshwright.verify.judge import judge
from meshwright.verify.reference import reference
from meshwright.verify.report import Report
from meshwright.verify.unequal import proof_data
from meshwright.verify.worker import collect

STEPS = 2


def small_proof(model: ModelSpec, data: Data, sequences: int, layout: dict[str, Any], **options: Any) -> RunSpec:
    """In float64, with clipping that acts."""
    return RunSpec(
        model=model,
        data=data,
        batch=Batch(sequences=sequences, micro=2),
        layout=Layout(**{"dp": 1, "zero_join": 0, **layout}),
        precision="float64",
        optimizer=Optimizer(clip=0.5),
        lr_schedule=LrSchedule(warmup=2),
        **options,
    )


def alone(run: RunSpec) -> Evidence:
    """What the plain model comes to in this run, the same in every layout."""
    return _alone(run.model_copy(update={"layout": Layout(dp=1, zero_join=0)}))


@functools.cache
def _alone(run: RunSpec) -> Evidence:
    return reference(run, proof_data(run), STEPS)


def evidence(mesh: Mesh, run: RunSpec) -> Evidence:
    return collect(run, mesh, proof_data(run), STEPS)


def on_ranks(ranks: Any, run: RunSpec, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(mesh, run, *args)` of every rank of the run's layout."""
    axes = {axis: run.layout.size(axis) for axis in ("tp", "cp", "dp", "pp")}
    found: list[Any] = ranks.run(run.layout.world, function, run, *args, axes=axes, order=run.layout.order)
    return found


def one_by_one(mesh: Mesh, runs: Sequence[RunSpec]) -> list[Evidence]:
    """Each run on a mesh of its own, as if its ranks were new."""
    found = []
    for run in runs:
        gc.collect()
        gc.freeze()  # what earlier runs left is not looked at when this one's tensors are counted
        found.append(evidence(Mesh.create(run.layout, device=mesh.device, timeout=20), run))
    return found


def evidence_of_each(ranks: Any, runs: Sequence[RunSpec]) -> list[list[Evidence]]:
    """Every rank's, of runs in one world: the same ranks take them one by one, as a start costs as much as a run."""
    (world,) = {run.layout.world for run in runs}
    return list(map(list, zip(*ranks.run(world, one_by_one, runs, timeout=120), strict=True)))


def assert_proven(report: Report, *of: Any) -> None:
    """Losses, gradients, moments and parameters below 1e-10; bytes sent and held to the byte."""
    assert report.passed, (*of, report.findings)
    assert report.worst < 1e-10, of
    assert all(check.expected == check.found for check in (*report.traffic, *report.states)), of


def prove(ranks: Any, run: RunSpec) -> Report:
    """Asserts what `assert_proven` says."""
    report = judge(run, STEPS, on_ranks(ranks, run, evidence), alone(run))
    assert_proven(report)
    return report


def prove_each(ranks: Any, runs: Sequence[RunSpec]) -> None:
    """The same of runs in one world."""
    for run, found in zip(runs, evidence_of_each(ranks, runs), strict=True):
        assert_proven(judge(run, STEPS, found, alone(run)), run.layout, run.model)


FAULTY = small_proof(
    ModelSpec(family="llama", vocab=37, hidden=16, layers=2, heads=2, ffn=24, max_seq=32),
    Data(seq_len=10),
    11,
    {"dp": 2},
)
"""The run that faults are planted in."""
