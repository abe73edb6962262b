"""The verdict of a proof, as data: what was compared, what differs, and what the differences look like."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.spec.run import RunSpec
from meshwright.spec.traffic import TrafficKey, TrafficRow
from meshwright.verify.activations import Difference
from meshwright.verify.compare import Comparison
from meshwright.verify.evidence import Evidence

ACTIVATION_BOUND = 0.05
"""Largest accepted difference of saved activations, as a part of what was predicted."""


@dataclass(frozen=True)
class Check:
    """One figure, predicted (or the reference's) and found, at the rank where they differ most."""

    what: str
    expected: float
    found: float
    rank: int
    passed: bool


@dataclass(frozen=True)
class Report:
    """Everything a proof found. `tensors` are worst first; `findings` say in words what is wrong.

    `activation_differences` are told also where the sum is within its bound.
    """

    run: RunSpec
    steps: int
    bound: float
    tensors: list[Comparison]
    scalars: list[Check]
    traffic: list[Check]
    states: list[Check]
    activations: list[Check]
    activation_differences: list[Difference]
    findings: list[str]

    @property
    def passed(self) -> bool:
        checks = (*self.tensors, *self.scalars, *self.traffic, *self.states, *self.activations)
        return all(check.passed for check in checks)

    @property
    def worst(self) -> float:
        """The largest difference of any tensor."""
        return max((c.difference for c in self.tensors), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json; infinities and not-a-numbers as strings."""
        tensors = [asdict(c) | {"passed": c.passed} for c in self.tensors]
        plain = asdict(self) | {
            "tensors": tensors,
            "run": self.run.model_dump(mode="json"),
            "passed": self.passed,
            "worst": self.worst,
        }
        cleaned: dict[str, Any] = _json(plain)
        return cleaned


def _json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return value


def check_scalars(ranks: Sequence[Evidence], reference: Evidence, bound: float) -> list[Check]:
    """Loss, valid tokens and gradient norm before clipping, for each step: what every rank reports."""
    checks = []
    for step in range(len(reference.losses)):
        for what, of in (("loss", "losses"), ("valid tokens", "tokens"), ("gradient norm", "norms")):
            expected = getattr(reference, of)[step]
            found = [getattr(evidence, of)[step] for evidence in ranks]
            worst = max(range(len(found)), key=lambda r: _relative(found[r], expected))
            limit = 0.0 if of == "tokens" else bound
            passed = _relative(found[worst], expected) <= limit
            checks.append(Check(f"{what}, step {step + 1}", expected, found[worst], worst, passed))
    return checks


def _relative(found: float, expected: float) -> float:
    value = abs(found - expected) / max(abs(expected), 1e-300) if found != expected else 0.0
    return value if math.isfinite(value) else math.inf


def check_traffic(ranks: Sequence[Evidence], predicted: Iterable[TrafficRow]) -> list[Check]:
    """Count, payload and wire bytes of every predicted or recorded row, over all ranks and steps; exact."""
    foretold = {row.key: row for row in predicted}
    recorded = [(r, {row.key: row for row in rows}) for r, e in enumerate(ranks) for rows in e.traffic]
    keys = dict.fromkeys((*foretold, *(key for _, rows in recorded for key in rows)))
    checks = []
    for key in keys:
        for field, unit in (("count", "collectives"), ("payload", "payload bytes"), ("wire", "wire bytes")):
            expected = getattr(foretold[key], field) if key in foretold else 0
            found = [(r, getattr(rows[key], field) if key in rows else 0) for r, rows in recorded]
            rank, value = max(found, key=lambda pair: abs(pair[1] - expected), default=(0, 0))
            checks.append(Check(f"{words(key)}: {unit}", expected, value, rank, value == expected))
    return checks


def words(key: TrafficKey) -> str:
    """A ledger row's key in one line."""
    micro = "" if key.micro is None else f", micro-batch {key.micro}"
    return f"{key.operation} over {key.axis}, {key.reason}, {key.phase}{micro}"


def check_states(ranks: Sequence[Evidence], predicted: Mapping[str, int]) -> list[Check]:
    """Bytes held by category, on every rank; exact."""
    checks = []
    for category in dict.fromkeys((*predicted, *(c for e in ranks for c in e.states))):
        expected = predicted.get(category, 0)
        found = [evidence.states.get(category, 0) for evidence in ranks]
        worst = max(range(len(found)), key=lambda r: abs(found[r] - expected))
        checks.append(Check(f"{category}, bytes", expected, found[worst], worst, found[worst] == expected))
    return checks


def check_activations(rank: int, predicted: int, found: int) -> Check:
    """Bytes saved for backward of one rank's largest micro-batch, within ACTIVATION_BOUND.

    Not exact as all else is: what an operation saves is torch's affair, and changes with its releases.
    """
    passed = abs(found - predicted) <= ACTIVATION_BOUND * predicted
    return Check(f"activations, bytes (within {ACTIVATION_BOUND:.0%})", predicted, found, rank, passed)
