"""What the ranks computed, moved and held, against the reference and the predictions."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.predict.memory import saved, states
from meshwright.predict.traffic import traffic
from meshwright.spec.batch import micro_batches, micro_steps
from meshwright.spec.run import RunSpec
from meshwright.verify.activations import Difference, SavedBytes
from meshwright.verify.activations import compare as compare_activations
from meshwright.verify.compare import BOUNDS, compare_tensors, diagnose
from meshwright.verify.evidence import Evidence
from meshwright.verify.report import (
    Check,
    Report,
    check_activations,
    check_scalars,
    check_states,
    check_traffic,
)


def judge(run: RunSpec, steps: int, ranks: Sequence[Evidence], expected: Evidence) -> Report:
    """Compare what the ranks computed with the reference and the predictions."""
    bound = BOUNDS[run.precision]
    tensors = compare_tensors(ranks, expected, bound)
    scalars = check_scalars(ranks, expected, bound)
    moved = check_traffic(ranks, traffic(run, run.layout))
    held = check_states(ranks, states(run))
    kept, differences = _activations(run, ranks)
    factors = {
        "dp": run.layout.data_ranks,
        "micro-batches": micro_steps(run.batch.sequences, run.layout.data_ranks, run.batch.micro),
    }
    findings = diagnose(tensors, factors, len(ranks))
    findings += [
        f"{c.what}: expected {c.expected:.12g}, rank {c.rank} has {c.found:.12g}" for c in scalars if not c.passed
    ]
    findings += [
        f"traffic: {c.what}: predicted {c.expected:.12g}, rank {c.rank} recorded {c.found:.12g}"
        for c in moved
        if not c.passed
    ]
    findings += [
        f"memory: {c.what}: predicted {c.expected:.0f}, rank {c.rank} holds {c.found:.0f}" for c in held if not c.passed
    ]
    if not all(c.passed for c in kept):
        findings += [f"activations of {d.where or 'the model'}: {_difference(d)}" for d in differences]
    return Report(run, steps, bound, tensors, scalars, moved, held, kept, differences, findings)


def _activations(run: RunSpec, ranks: Sequence[Evidence]) -> tuple[list[Check], list[Difference]]:
    checks: list[Check] = []
    differences: list[Difference] = []
    for rank, evidence in enumerate(ranks):
        micros = micro_batches(run.batch.sequences, run.layout.data_ranks, rank, run.batch.micro)
        rows = max(len(micro) for micro in micros)
        foretold = saved(run, rows)
        found = SavedBytes(tuple(evidence.activations))
        checks.append(check_activations(rank, sum(s.bytes for s in foretold), found.total))
        if not differences:
            differences = compare_activations(foretold, found)
    return checks, differences


def _difference(d: Difference) -> str:
    only = [f"only predicted: {', '.join(d.only_predicted)}"] if d.only_predicted else []
    only += [f"only measured: {', '.join(d.only_measured)}"] if d.only_measured else []
    return f"predicted {d.predicted} bytes, measured {d.measured}; {'; '.join(only)}"
