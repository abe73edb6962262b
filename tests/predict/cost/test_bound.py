"""The closed form is never above the simulation, and equal where nothing is uneven."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.predict.cost.bound import Stages, bound
from meshwright.schedule import make
from meshwright.schedule.timeline import simulate

TIME = st.floats(0, 10, allow_nan=False)


def simulated(stages: Stages, name: str, ranks: int, micros: int, chunks: int) -> float:
    schedule = make(name, ranks, micros, chunks)
    durations = {field: getattr(stages, field).tolist() for field in Stages._fields}
    return simulate(schedule, **durations).length


@given(
    name=st.sampled_from(["naive", "gpipe", "1f1b", "interleaved"]),
    ranks=st.integers(2, 5),
    micros=st.integers(1, 9),
    chunks=st.integers(2, 3),
    data=st.data(),
)
def test_never_above_the_simulation(name: str, ranks: int, micros: int, chunks: int, data: st.DataObject) -> None:
    chunks = chunks if name == "interleaved" else 1
    number = ranks * chunks
    stages = Stages(*(np.array(data.draw(st.lists(TIME, min_size=number, max_size=number))) for _ in Stages._fields))
    stages.step[ranks:] = 0  # a rank's step is asked of its first stage
    holders = [stage % ranks for stage in range(number)]
    exact = simulated(stages, name, ranks, micros, chunks)
    assert bound(stages, holders, micros) <= exact * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "ranks", "micros", "chunks"),
    [("gpipe", 4, 7, 1), ("1f1b", 4, 7, 1), ("1f1b", 3, 1, 1), ("interleaved", 4, 8, 3), ("interleaved", 4, 2, 3)],
)
def test_exact_where_stages_are_even(name: str, ranks: int, micros: int, chunks: int) -> None:
    number = ranks * chunks
    stages = Stages(np.full(number, 1.0), np.full(number, 2.5), np.zeros(number), np.full(number, 0.3), np.ones(number))
    holders = [stage % ranks for stage in range(number)]
    exact = simulated(stages, name, ranks, micros, chunks)
    assert float(bound(stages, holders, micros)) == pytest.approx(exact, rel=0.3 * chunks / exact)


def test_many_layouts_at_once() -> None:
    rng = np.random.default_rng(0)
    stages = Stages(*(rng.uniform(1, 2, (6, 4)) for _ in Stages._fields))
    together = bound(stages, range(4), np.arange(1, 7))
    alone = [float(bound(Stages(*(each[i] for each in stages)), range(4), i + 1)) for i in range(6)]
    assert together.tolist() == pytest.approx(alone)


def test_what_is_left_to_reduce_is_waited_for() -> None:
    zeros = np.zeros(3)
    late = Stages(np.ones(3), np.ones(3), zeros, np.array([0.0, 0.0, 50.0]), zeros)
    assert float(bound(late, range(3), 4)) == 2 + 4 * 2 + 50
