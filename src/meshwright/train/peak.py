"""The FLOPs a second that utilisation is measured against: the maker's figure, or on a CPU a measured one."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from meshwright.model.build import DTYPES
from meshwright.predict.peaks import peak


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
    return Peak(_measured(device, DTYPES[precision]), "a 1024 × 1024 matrix product measured at the start")


def _measured(device: torch.device, dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    a = torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        a @ a
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
