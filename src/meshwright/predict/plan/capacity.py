"""How much of a device's memory a run may hold: what is left when everybody else has theirs."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.cluster import Device

GB = 10**9


@dataclass(frozen=True)
class Allowance:
    """What is not the run's: `context` bytes, and of the rest the part `fragments`.

    context: the driver's context and the libraries' workspaces, and the buffers of the communicators. fragments: what
    the allocator holds and cannot hand out, since blocks of other sizes lie between.
    """

    context: int
    fragments: float

    def usable(self, memory: int) -> float:
        """Bytes of a device of `memory` bytes that a run may hold."""
        return max((memory - self.context) * (1 - self.fragments), 0.0)

    def needed(self, held: float) -> float:
        """Bytes that a device must have for a run that holds `held`."""
        return held / (1 - self.fragments) + self.context


ACCELERATOR = Allowance(context=2 * GB, fragments=0.04)
"""A CUDA context and cuBLAS's workspace take about 0.6 GB, NCCL's communicators of four axes a few hundred MB each."""
CPU = Allowance(context=GB // 2, fragments=0.02)
"""Python and torch's libraries in each rank."""


def allowance(device: Device) -> Allowance:
    """That of a device."""
    return CPU if device.kind == "cpu" else ACCELERATOR
