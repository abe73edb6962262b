from __future__ import annotations

import itertools

import pytest

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
