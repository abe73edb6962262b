"""All ranks stop when one was asked to: how they hear of it, and at which points.

A signal reaches some ranks only (a node that is taken away signals its own). Each rank puts what it was asked into a
reduction that all share: at the end of a step and of a validation into one that is made anyway, at the start and at
the end of the run into one of its own. So all leave at the same point, and none waits for one that has left.
"""

from __future__ import annotations

import signal

import torch

from meshwright.comm.mesh import Mesh
from meshwright.train.signals import StopFlag

# Shared by adding up: any SIGTERM outweighs every SIGINT.
STOP_VALUES = {signal.SIGINT: 1.0, signal.SIGTERM: 1e6}


class StoppedEarlyError(Exception):
    """Asked to stop by `signal` before the first step: nothing has changed since the last checkpoint."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class Stopping:
    """Whether this run is to stop, on one rank of `mesh`. `signal` is the one that all ranks agreed to stop for."""

    def __init__(self, flag: StopFlag, mesh: Mesh) -> None:
        self._flag, self._mesh = flag, mesh
        self.signal: int | None = None

    @property
    def asked(self) -> int | None:
        """The signal that came to this very rank."""
        return self._flag.requested

    def value(self) -> float:
        """What this rank adds to a sum over all ranks."""
        return STOP_VALUES.get(self.asked or 0, 0.0)  # type: ignore[call-overload,no-any-return]

    def heard(self, total: float) -> bool:
        """Whether the sum of all ranks' values says to stop."""
        if total > 0:
            self.signal = signal.SIGTERM if total >= STOP_VALUES[signal.SIGTERM] else signal.SIGINT
        return self.signal is not None

    def ask(self) -> bool:
        """Whether any rank was asked to stop; all ranks must call it at the same point."""
        total = torch.tensor([self.value()], dtype=torch.float64, device=self._mesh.device)
        self._mesh.world_group.all_reduce(total, reason="stop", phase="step")
        return self.heard(float(total))

    def check(self) -> None:
        """The same before the first step, where it raises StoppedEarlyError on all ranks."""
        if self.ask() and self.signal is not None:
            raise StoppedEarlyError(self.signal)
