"""The learning rate as a closed form of the step: nothing to save, nothing to resume."""

from __future__ import annotations

import math

from meshwright.spec.run import RunSpec


def lr_at(run: RunSpec, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0, whatever the layout or the number of micro-batches.

    Linear warm-up reaches the highest rate at its last step; then a cosine (Loshchilov and Hutter 2017) that ends at
    `floor` times it with the run's last step, or a constant rate with a linear decay to the floor at the end.
    """
    schedule, highest = run.lr_schedule, run.optimizer.lr
    if step < schedule.warmup:
        return highest * (step + 1) / schedule.warmup
    if schedule.decay == "cosine":
        first, length = schedule.warmup, run.steps - schedule.warmup
        way = (step - first + 1) / length if length else 1.0
        share = 0.5 * (1.0 + math.cos(math.pi * min(way, 1.0)))
    else:
        length = schedule.decay_steps or 0
        way = (step - (run.steps - length) + 1) / length if length else 0.0
        share = 1.0 - min(max(way, 0.0), 1.0)
    return highest * (schedule.floor + (1.0 - schedule.floor) * share)
