"""What is measured becomes the constants by which the prediction of a piece equals what it took."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from meshwright.predict.cost.constants import Constants, constants_of
from meshwright.predict.cost.operators import Flash, Move, Product
from meshwright.predict.cost.roofline import product, seconds
from meshwright.spec.devices import cluster
from meshwright.train import probing, probing_steps
from meshwright.train.probing import Case, Effort, Timer, fit_operators, fit_products, operators

CPU = torch.device("cpu")
EFFORT = Effort(seconds=0.001, rounds=1, small=True)
TIMER = Timer(CPU, EFFORT)


def test_products_are_fitted_to_the_shapes_that_were_measured():
    truth = replace(constants_of(cluster("cpu")), product=0.8, depth=16.0, sustained=1.0)
    shapes = [(m, n, k) for m in (64, 256, 1024) for n in (64, 256) for k in (32, 256, 1024)]
    measured = {shape: product(Product(1, *shape), truth, 50e9, 1e11, 4) for shape in shapes}
    peak, found = fit_products(measured, constants_of(cluster("cpu")), 1e11, 4)
    assert found.depth == 16.0
    # Whatever is called the peak, a product takes as long as it took.
    for shape, took in measured.items():
        assert product(Product(1, *shape), found, peak, 1e11, 4) == pytest.approx(took, rel=0.02)


def test_operators_are_the_models_own_and_have_a_prediction_each():
    case = Case(64, 1, 16)
    known = {each.name for each in (*probing.block(case.sizes(4)), *probing.embedding(case.sizes(4)))}
    known |= {each.name for each in probing.head(case.sizes(4))}
    names = [name for name, forward, backward in operators(case, CPU, torch.float32) if (forward(), backward())]
    assert set(names) <= known
    # All that is no product is measured.
    assert known - set(names) == {"qkv", "out", "up", "down", "logits"}


def test_each_kind_of_operator_gets_the_part_that_makes_its_prediction_what_it_took(monkeypatch: pytest.MonkeyPatch):
    """Each operator takes a time that only its own constant explains."""
    truth = replace(
        Constants(), kernel=1e-6, stream=0.5, exponential=0.2, softmax=0.2, norm=0.3, norm_backward=0.1, lookup=0.4,
        flash=0.6, flash_backward=0.35,
    )  # fmt: skip

    def as_predicted(timer, known, forward, backward):
        for works in (known.forward, known.backward):
            for work in works:
                if isinstance(work, Flash) or (isinstance(work, Move) and work.bytes):
                    yield work, seconds(work, truth, 1e9, 1e9, 4)

    monkeypatch.setattr(probing, "_timed", as_predicted)
    found = fit_operators(TIMER, replace(Constants(), kernel=1e-6), 1e9, 1e9, torch.float32)
    for name in ("stream", "exponential", "softmax", "norm", "norm_backward", "lookup", "flash", "flash_backward"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name)), name


def test_every_figure_that_is_fitted_is_a_positive_number():
    found = probing_steps.fit_device(TIMER, cluster("cpu"), "fp32").constants
    assert set(found) == {*probing_steps.FITTED, "watched"}
    assert all(math.isfinite(value) and value >= 0 for value in found.values())
    zero = {name for name, value in found.items() if value == 0}
    assert zero <= {"depth", "flash_width", "host", "host_backward", "host_step", "watched"}


def test_threads_are_as_many_as_before(monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    assert probing_steps.threads(TIMER, probing.TINY, "fp32", 2) > 0
    assert torch.get_num_threads() == before


def test_a_timer_tells_the_time_of_one_run():
    calls = []
    Timer(CPU, EFFORT)(lambda: calls.append(1))
    assert len(calls) > 2
