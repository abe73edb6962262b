"""What the ranks computed, moved and held, against the reference and the predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshwright.predict.activations import Saved, total
from meshwright.predict.flight import kept_at_once
from meshwright.predict.states import buffers, states
from meshwright.predict.traffic import traffic
from meshwright.spec.batch import micro_steps
from meshwright.spec.run import RunSpec
from meshwright.verify.activations import Difference, SavedBytes
from meshwright.verify.activations import compare as compare_activations
from meshwright.verify.compare import bound_of, diagnose, is_narrow, listed
from meshwright.verify.evidence import Evidence
from meshwright.verify.held import OTHER
from meshwright.verify.narrow import compare_run, expected_of
from meshwright.verify.report import (
    Check,
    Report,
    check_activations,
    check_scalars,
    check_states,
    check_traffic,
)


def judge(run: RunSpec, steps: int, ranks: Sequence[Evidence], expected: Evidence | None = None) -> Report:
    """Compare what the ranks computed with the reference and the predictions.

    expected: the reference's evidence where it is at hand; not in two-byte precisions, where it depends on the ranks.
    """
    assert expected is None or not is_narrow(run)
    expected = expected or expected_of(run, steps, ranks)
    bound = bound_of(run)
    tensors = compare_run(run, steps, ranks, expected)
    scalars = check_scalars(ranks, expected, bound)
    moved = _traffic(run, ranks)
    held = _states(run, ranks)
    # What a compiled block keeps is the compiler's choice, and not predicted.
    kept, differences = _activations(run, ranks) if run.compile == "none" else ([], [])
    factors = {
        "dp": run.layout.data_ranks,
        "tp": run.layout.tp,
        "cp": run.layout.cp,
        "pp": run.layout.pp,
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
    findings += [f"memory: rank {rank} holds beside what it declares: {what}" for rank, what in _undeclared(ranks)]
    if not all(c.passed for c in kept):
        findings += [f"activations of {d.where or 'the model'}: {_difference(d)}" for d in differences]
    return Report(run, steps, bound, tensors, scalars, moved, held, kept, differences, findings)


def _traffic(run: RunSpec, ranks: Sequence[Evidence]) -> list[Check]:
    """Each rank against its own prediction; of what several sent, the check at the rank where they differ most."""
    return _worst(
        replace(check, rank=rank)
        for rank, evidence in enumerate(ranks)
        for check in check_traffic([evidence], traffic(run, run.layout, rank))
    )


def _states(run: RunSpec, ranks: Sequence[Evidence]) -> list[Check]:
    """Each rank against its own prediction, likewise."""
    found = (
        replace(check, rank=rank)
        for rank, evidence in enumerate(ranks)
        for check in check_states(
            [evidence], states(run, run.layout, rank) | {"buffers": buffers(run, run.layout, rank), OTHER: 0}
        )
    )
    return _worst(found)


def _worst(checks: Iterable[Check]) -> list[Check]:
    worst: dict[str, Check] = {}
    for check in checks:
        known = worst.get(check.what)
        if known is None or abs(check.expected - check.found) > abs(known.expected - known.found):
            worst[check.what] = check
    return list(worst.values())


def _undeclared(ranks: Sequence[Evidence]) -> list[tuple[int, str]]:
    """For the first rank that holds anything undeclared: that rank, and the largest of it in words."""
    for rank, evidence in enumerate(ranks):
        if evidence.undeclared:
            return [(rank, listed(evidence.undeclared))]
    return []


def _activations(run: RunSpec, ranks: Sequence[Evidence]) -> tuple[list[Check], list[Difference]]:
    """The check at the rank where prediction and measurement differ most, and what differs there."""
    checks: list[tuple[Check, list[Saved], SavedBytes]] = []
    for rank, evidence in enumerate(ranks):
        foretold = kept_at_once(run, run.layout, rank)
        found = SavedBytes(tuple(evidence.activations))
        checks.append((check_activations(rank, total(foretold), found.total), foretold, found))
    worst, foretold, found = max(checks, key=lambda c: (not c[0].passed, abs(c[0].expected - c[0].found)))
    return [worst], compare_activations(foretold, found)


def _difference(d: Difference) -> str:
    only = [f"only predicted: {', '.join(d.only_predicted)}"] if d.only_predicted else []
    only += [f"only measured: {', '.join(d.only_measured)}"] if d.only_measured else []
    return f"predicted {d.predicted} bytes, measured {d.measured}; {'; '.join(only)}"
