"""The example in docs/context.md runs as it stands there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples import example_of, run_example_on


def test_the_example_runs_under_two_ranks(ranks: Any, tmp_path: Path) -> None:
    lines = [line.split() for line in run_example_on(ranks, example_of("context.md"), 2, tmp_path)]
    assert [line[2] for line in lines] == ["out", "dk"]
    assert all(float(line[5]) < 1e-5 < 0.1 < float(line[7]) for line in lines), lines
