"""Three steps of a trainer, the second with numbers that are not finite."""

from __future__ import annotations

import torch

SKIPPED = [(False, True, 1), (True, False, 1), (False, True, 2)]
"""What `steps` returns where the second step is skipped, and nothing else."""


def steps(trainer, data, poison, snapshot):
    """Of each step: whether it was skipped, whether anything of `snapshot(trainer)` changed, and the optimizer's count.

    poison: puts a hook that spoils the second step and returns its handle, or None on ranks that spoil nothing.
    """
    history = []
    for step in range(3):
        handle = poison() if step == 1 else None
        before = snapshot(trainer)
        update = trainer.update(step, trainer.accumulate(data, step))
        changed = any(not torch.equal(before[name], tensor) for name, tensor in snapshot(trainer).items())
        history.append((update.skipped, changed, trainer.optimizer.steps))
        if handle is not None:
            handle.remove()
    return history


def filled(weight, value):
    """A hook that makes every number of a weight's gradient `value`."""
    return weight.register_hook(lambda gradient: torch.full_like(gradient, value))
