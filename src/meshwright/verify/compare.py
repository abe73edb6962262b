"""A layout's evidence against the reference: one measure for every tensor, and a name for what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from meshwright.spec.run import RunSpec
from meshwright.verify.evidence import KINDS, Evidence

FLOOR = 1e-6
BOUNDS = {"float64": 1e-10, "fp32": 1e-3, "bf16": 0.05, "fp16": 0.02}
"""Largest accepted difference by the narrowest dtype that computes or sums, in the measure of `difference`."""


def bound_of(run: RunSpec) -> float:
    """The bound for `run`'s precision, gradients and reduction. In two bytes a gradient's may be wider: narrow.py."""
    return max(BOUNDS[name] for name in (run.precision, run.grad_dtype, run.reduce_dtype) if name != "auto")


def is_narrow(run: RunSpec) -> bool:
    """Whether anything is computed or summed in two bytes."""
    return bound_of(run) > BOUNDS["fp32"]


@dataclass(frozen=True)
class Comparison:
    """One tensor (kind and name), at the rank and step where it differs most from the reference.

    `ratio` is ‖a‖ / ‖b‖ and `cosine` that of the angle between them; both are 1 where both tensors are zero.
    `since` is the first step at which it differs by more than `bound`, None where it never does, and `since_ranks` are
    the ranks on which it does so at that step.
    """

    kind: str
    name: str
    rank: int
    step: int
    difference: float
    ratio: float
    cosine: float
    since: int | None = None
    since_ranks: tuple[int, ...] = ()
    bound: float = 0.0

    @property
    def passed(self) -> bool:
        return self.since is None


def difference(a: Tensor, b: Tensor, scale: float) -> float:
    """‖a − b‖ / max(‖b‖, 10⁻⁶ · √n · scale), `scale` the root mean square over all tensors of the kind.

    Some gradients are zero in mathematics and noise in floating point (GPT-2's key bias): the floor keeps noise from
    being compared with noise. Not a number counts as infinitely different.
    """
    a, b = a.double(), b.double()
    floor = FLOOR * math.sqrt(b.numel()) * scale
    value = float(torch.linalg.vector_norm(a - b)) / max(float(torch.linalg.vector_norm(b)), floor, 1e-300)
    return value if math.isfinite(value) else math.inf


def compare_tensors(
    ranks: Sequence[Evidence],
    reference: Evidence,
    bound: float,
    *,
    others: Mapping[str, float] = MappingProxyType({}),
    holds: Callable[[int, str], bool] = lambda rank, name: True,
) -> list[Comparison]:
    """One comparison a tensor, the worst over ranks and steps, worst tensor first.

    others: other bounds of single tensors, by the keys of evidence. holds: whether a rank should have the parameter of
    a name; it must then, and must not otherwise.
    """
    scales = _root_mean_squares(reference.tensors)
    all_of: dict[tuple[str, str], list[Comparison]] = {}
    for key, expected in reference.tensors.items():
        kind, step, name = key.split("/", 2)
        for rank, evidence in enumerate(ranks):
            if not holds(rank, name) and key not in evidence.tensors:
                continue
            figures = _figures(evidence.tensors.get(key), expected, scales[f"{kind}/{step}"])
            comparison = Comparison(kind, name, rank, int(step), *figures, bound=others.get(key, bound))
            all_of.setdefault((kind, name), []).append(comparison)
    for rank, evidence in enumerate(ranks):
        for key in evidence.tensors:
            kind, step, name = key.split("/", 2)
            if key in reference.tensors and holds(rank, name):
                continue  # else a rank has what the plain model, or its stage, has not
            extra = Comparison(kind, name, rank, int(step), math.inf, math.nan, math.nan, bound=bound)
            all_of.setdefault((kind, name), []).append(extra)
    worst = [_worst(comparisons) for comparisons in all_of.values()]
    return sorted(worst, key=lambda c: (-c.difference, KINDS.index(c.kind), c.name))


def differences(evidence: Evidence, reference: Evidence) -> dict[str, float]:
    """How far each of `evidence`'s tensors is from the reference's, by its key."""
    scales = _root_mean_squares(reference.tensors)
    found = {}
    for key, tensor in evidence.tensors.items():
        kind, step, _ = key.split("/", 2)
        found[key] = difference(tensor, reference.tensors[key], scales[f"{kind}/{step}"])
    return found


def _worst(comparisons: Sequence[Comparison]) -> Comparison:
    failed = [c for c in comparisons if not c.difference <= c.bound]
    since = min((c.step for c in failed), default=None)
    at_first = tuple(c.rank for c in failed if c.step == since)
    return replace(max(failed or comparisons, key=lambda c: c.difference), since=since, since_ranks=at_first)


def _figures(found: Tensor | None, expected: Tensor, scale: float) -> tuple[float, float, float]:
    """Difference, ratio and cosine of one tensor; infinitely different where it is missing or misshapen."""
    if found is None or found.shape != expected.shape:
        return math.inf, math.nan, math.nan
    a, b = found.double().flatten(), expected.double().flatten()
    size_a, size_b = float(torch.linalg.vector_norm(a)), float(torch.linalg.vector_norm(b))
    zero = size_a == 0 and size_b == 0
    ratio = 1.0 if zero else size_a / size_b if size_b else math.inf
    cosine = 1.0 if zero else float(a @ b) / (size_a * size_b) if size_a and size_b else 0.0
    return difference(a, b, scale), ratio, cosine


def _root_mean_squares(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    squares: dict[str, float] = {}
    counts: dict[str, int] = {}
    for key, tensor in tensors.items():
        group = "/".join(key.split("/", 2)[:2])
        squares[group] = squares.get(group, 0.0) + float(tensor.double().square().sum())
        counts[group] = counts.get(group, 0) + tensor.numel()
    return {group: math.sqrt(total / counts[group]) for group, total in squares.items()}


def diagnose(comparisons: Sequence[Comparison], factors: Mapping[str, int], ranks: int) -> list[str]:
    """In words, where a difference first shows and what it looks like; whatever differs later follows from it.

    `factors` names the numbers that a wrong scale would show: {"dp": 2, "micro-batches": 3}.
    """
    failed = [c for c in comparisons if c.since is not None]
    if not failed:
        return []
    kind, step = min(((c.kind, c.since or 0) for c in failed), key=_order)
    first = [c for c in failed if c.kind == kind and c.since == step]
    where = sorted({rank for c in first for rank in c.since_ranks})
    when = f"after step {step}" if step else "before the first step"
    found = [
        f"{kind} differs {when}, on {'every rank' if len(where) == ranks else f'rank {listed(where)} only'}: "
        + _names(first, [c for c in comparisons if c.kind == kind])
    ]
    found += _wrong_scale(first, factors)
    later = len(failed) - len(first)
    if later:
        found.append(f"{later} other tensors differ too, from then on or later")
    return found


def _order(event: tuple[str, int]) -> tuple[int, int]:
    kind, step = event
    return step, KINDS.index(kind)


def _wrong_scale(failed: Sequence[Comparison], factors: Mapping[str, int]) -> list[str]:
    """Where tensors point the right way: the factor they are off by, under every name that it may have."""
    ratios = [c.ratio for c in failed if c.cosine > 1 - 1e-6]
    said: dict[float, list[str]] = {}
    for name, factor in factors.items():
        if factor > 1:
            said.setdefault(float(factor), []).append(f"{name} = {factor}")
            said.setdefault(1 / factor, []).append(f"1 / {name} = 1/{factor}")
    for value, names in said.items():
        hits = sum(abs(ratio / value - 1) < 1e-6 for ratio in ratios)
        if hits:
            return [f"{hits} of them are scaled by exactly {' or '.join(names)}"]
    return []


def _names(some: Sequence[Comparison], of: Sequence[Comparison]) -> str:
    if len(some) == len(of):
        return f"all {len(of)} tensors"
    return f"{len(some)} of {len(of)} tensors ({listed([c.name for c in some])})"


def listed(items: Sequence[object], most: int = 4) -> str:
    """The first few of `items`, and a sign that there are more."""
    return ", ".join(map(str, items[:most])) + (", …" if len(items) > most else "")
