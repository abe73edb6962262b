"""What data ranks send beside a stage's computing."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.predict.cost.constants import Constants
from meshwright.predict.cost.parts import Parts
from meshwright.predict.cost.stage import Sent, publish, sent, times
from meshwright.spec.devices import cluster
from meshwright.spec.presets import PRESETS

HIDES, SHOWS = Constants(), Constants(overlap_reduce=False, overlap_gather=False)


def moved(reduce: float, gather: float, units: float = 4.0) -> Sent:
    return Sent(np.array(reduce), np.array(gather), np.array(units))


def found(zero: int, moves: Sent, constants: Constants = HIDES, by_step: bool = False) -> tuple[float, ...]:
    """forward and backward of 10 and 20 seconds, and the tail."""
    at = times(10.0, 20.0, moves, zero=zero, by_step=by_step, constants=constants)
    return float(at.forward), float(at.backward), float(at.tail)


def test_reductions_go_under_the_last_backward_but_for_the_last_unit() -> None:
    assert found(0, moved(8, 0)) == (10, 20, 2)
    assert found(1, moved(8, 8)) == (10, 20, 2)
    assert found(0, moved(40, 0)) == (10, 20, 40 - 20 * 3 / 4)
    assert found(0, moved(8, 0), SHOWS) == (10, 20, 8)


def test_zero_2_reduces_in_every_micro_batch() -> None:
    assert found(2, moved(8, 8)) == (10, 22, 0)


def test_zero_3_gathers_in_both_passes() -> None:
    assert found(3, moved(8, 4)) == (11, 23, 0)
    assert found(3, moved(8, 40)) == (10 + 40 - 7.5, 20 + 48 - 15, 0)
    assert found(3, moved(8, 4), by_step=True) == (10, 22, 0), "gathered with the step"
    assert found(3, moved(8, 4), SHOWS) == (14, 32, 0)


def test_what_is_hidden_slows_computing_down() -> None:
    assert found(0, moved(8, 0), Constants(contention=0.5)) == (10, 20, 2 + 0.5 * 6)


@pytest.mark.parametrize(("zero", "by_step", "expected"), [(0, False, 0), (1, False, 2), (3, False, 0), (3, True, 2)])
def test_new_parameters_are_gathered_under_the_next_forward(zero: int, by_step: bool, expected: float) -> None:
    assert float(publish(10.0, moved(8, 8), zero=zero, by_step=by_step, constants=HIDES)) == expected
    shown = float(publish(10.0, moved(8, 8), zero=zero, by_step=by_step, constants=SHOWS))
    assert shown == (8 if expected else 0)


def test_bytes_by_stage_of_zero_and_shards() -> None:
    parts = Parts(PRESETS["llama2-7b"], 2048, "bf16", cluster("4x8xh100"))
    several = {"units": 4.0, "ranks": 32.0, "stride": 1.0, "reduce_bytes": 4}
    plain = sent(parts, 4e8, cut=1.0, zero=0, **several)  # type: ignore[arg-type]
    whole = sent(parts, 4e8, cut=32.0, zero=1, **several)  # type: ignore[arg-type]
    hybrid = sent(parts, 4e8, cut=8.0, zero=1, **several)  # type: ignore[arg-type]
    one = parts.collective
    assert float(plain.reduce) == pytest.approx(4 * float(one("all_reduce", 4e8, 32)))
    assert float(plain.gather) == 0
    assert float(whole.reduce) == pytest.approx(4 * float(one("reduce_scatter", 4e8, 32)))
    assert float(whole.gather) == pytest.approx(4 * float(one("all_gather", 2e8, 32)))
    inner, outer = one("reduce_scatter", 4e8, 8), one("all_reduce", 4e8 / 8, 4, 8)
    assert float(hybrid.reduce) == pytest.approx(4 * float(inner + outer))
    assert float(hybrid.gather) == pytest.approx(4 * float(one("all_gather", 2e8, 8)))


def test_arrays_are_what_numbers_are() -> None:
    moves = Sent(np.array([8.0, 40.0]), np.array([4.0, 8.0]), np.array([4.0, 4.0]))
    together = times(10.0, 20.0, moves, zero=np.array([[0], [3]]), by_step=False, constants=HIDES)
    for row, zero in enumerate((0, 3)):
        for place in range(2):
            alone = found(zero, Sent(*(each[place] for each in moves)))
            assert tuple(float(each[row, place]) for each in (together.backward, together.tail)) == alone[1:]
