"""The FLOPs a second that utilisation is measured against: the maker's figure, or on a CPU a measured one."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from meshwright.model.build import DTYPES
from meshwright.predict.peaks import peak

LONGEST = 0.1
"""Seconds that a product may be expected to take to be measured."""


@dataclass(frozen=True)
class Peak:
    """FLOPs a second of one device in the run's precision, and where the figure comes from."""

    flops: float
    source: str


def device_peak(device: torch.device, precision: str) -> Peak:
    """The published peak of `device`, else the best of a few matrix products timed now with this rank's threads."""
    if device.type == "cuda":
        published = peak(torch.cuda.get_device_name(device), precision)  # type: ignore[arg-type]
        if published is not None:
            return Peak(*published)
    size, flops = _measured(device, DTYPES[precision])
    return Peak(flops, f"a {size} × {size} matrix product measured at the start")


def _measured(device: torch.device, dtype: torch.dtype) -> tuple[int, float]:
    """Size and FLOPs a second of the largest product of up to 1024 that takes little time: a CPU without instructions
    for 16 bits needs 5 s for one of 1024."""
    size, seconds = 128, _best(device, dtype, 128)
    while size < 1024 and 8 * seconds < LONGEST:
        size *= 2
        seconds = _best(device, dtype, size)
    return size, 2 * size**3 / seconds


def _best(device: torch.device, dtype: torch.dtype, size: int, repeats: int = 5) -> float:
    """Seconds of the fastest of a few products."""
    a = torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        a @ a
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
