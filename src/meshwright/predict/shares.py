"""Where the time of a step's forward and backward should go, if computing takes as its FLOPs and messages take none."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.predict.flops import Flops
from meshwright.predict.pipeline import by_flops
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec


@dataclass(frozen=True)
class Shares:
    """Parts of all pipeline ranks' time, which add up to 1."""

    compute: float
    recompute: float
    bubble: float


def shares(run: RunSpec, layout: Layout, *, cpu: bool) -> Shares:
    """For a resolved `layout`, on the CPU or an accelerator, which differ in what attention computes."""
    work, timeline = by_flops(run, layout, cpu=cpu)
    all_stages = sum(work, Flops(0, 0))
    recompute = (1 - timeline.bubble) * all_stages.recompute / all_stages.total
    return Shares(1 - timeline.bubble - recompute, recompute, timeline.bubble)
