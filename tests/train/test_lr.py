from __future__ import annotations

import itertools

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from meshwright.spec.run import LrSchedule, Optimizer, RunSpec
from meshwright.train.lr import lr_at


def rates(steps: int, **schedule: object) -> list[float]:
    run = RunSpec(steps=steps, optimizer=Optimizer(lr=2.0), lr_schedule=LrSchedule(**schedule))
    return [lr_at(run, step) for step in range(steps)]


def test_cosine():
    found = rates(12, warmup=4, decay="cosine", floor=0.5)
    assert found[:4] == [0.5, 1.0, 1.5, 2.0]
    assert found[7] == pytest.approx(1.5)  # half-way down: the middle between highest and floor
    assert found[-1] == pytest.approx(1.0)
    assert all(a > b for a, b in itertools.pairwise(found[3:]))


def test_constant_then_decay():
    found = rates(10, warmup=2, decay="constant", decay_steps=4, floor=0.0)
    assert found == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0])


def test_constant_for_ever():
    assert rates(5, warmup=0, decay="constant", decay_steps=0) == [2.0] * 5


def test_nothing_but_warm_up():
    assert rates(4, warmup=4) == [0.5, 1.0, 1.5, 2.0]


def test_a_trial_shorter_than_its_warm_up_takes_the_same_rates():
    assert rates(3, warmup=10) == rates(30, warmup=10)[:3]


def by_torch(steps: int, warmup: int, decay: str, decay_steps: int | None, floor: float) -> list[float]:
    """The same schedule put together from torch's schedulers, its rates at steps 0 … `steps` - 1.

    Torch's phases begin with the rate from which they start; ours end, with their last step, at the rate to which
    they lead: warm-up at the whole rate, the run at the floor. So a decay of n steps is torch's of n steps begun one
    step early, at the last step before it, where the rate is the whole one in both. With no warm-up a cosine has no
    such step: torch's would be before the run, whose first step is one step down.
    """
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    early = int(warmup == 0)
    parts: list[torch.optim.lr_scheduler.LRScheduler] = []
    begins = []
    if warmup > 1:
        parts.append(LinearLR(optimizer, start_factor=1 / warmup, end_factor=1.0, total_iters=warmup - 1))
        begins.append(warmup - 1)
    if decay == "cosine":
        parts.append(CosineAnnealingLR(optimizer, T_max=steps - warmup, eta_min=2.0 * floor))
    else:
        length = decay_steps or 0
        parts.append(ConstantLR(optimizer, factor=1.0))
        if length:
            begins.append(steps - length - 1 + early)
            parts.append(LinearLR(optimizer, start_factor=1.0, end_factor=floor, total_iters=length))
    schedule = SequentialLR(optimizer, parts, begins)
    found = []
    for _ in range(steps + early):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found[early:]


@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup", [0, 1, 2, 20])
@pytest.mark.parametrize(
    ("decay", "decay_steps"), [("cosine", None), ("constant", 0), ("constant", 1), ("constant", 80)]
)
def test_every_step_is_torchs(decay: str, decay_steps: int | None, warmup: int, floor: float) -> None:
    found = rates(100, warmup=warmup, decay=decay, decay_steps=decay_steps, floor=floor)
    assert found == pytest.approx(by_torch(100, warmup, decay, decay_steps, floor), rel=1e-9, abs=1e-12)
