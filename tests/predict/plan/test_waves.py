"""Schedules timed in waves take what schedule/timeline.py says, to the last bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.predict.plan.space import Pipe
from meshwright.predict.plan.waves import length, order_of
from meshwright.schedule import make
from meshwright.schedule.timeline import simulate

times = st.floats(0.01, 10)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Pipe, int, int]:
    name = draw(st.sampled_from(["1f1b", "gpipe", "interleaved"]))
    chunks = draw(st.integers(2, 4)) if name == "interleaved" else 1
    return Pipe(name, chunks), draw(st.integers(2, 6)), draw(st.integers(1, 15))


@settings(max_examples=150, deadline=None)
@given(schedules(), st.data())
def test_a_step_takes_as_long(schedule: tuple[Pipe, int, int], data: st.DataObject) -> None:
    pipe, ranks, micros = schedule
    stages = ranks * pipe.chunks
    alike = data.draw(st.booleans())

    def each() -> list[float]:
        return [data.draw(times)] * stages if alike else data.draw(st.lists(times, min_size=stages, max_size=stages))

    layouts = [(each(), each(), data.draw(st.one_of(st.just(0.0), times)), each(), each()) for _ in range(2)]
    expected = []
    for forward, backward, send, reduce, step in layouts:
        made = make(pipe.schedule, ranks, micros, pipe.chunks)
        timeline = simulate(made, forward=forward, backward=backward, send=send, reduce=reduce, step=step)
        expected.append(timeline.length)
    forward, backward, send, reduce, step = (np.array(column) for column in zip(*layouts, strict=True))
    sends = np.repeat(send[:, None], stages, axis=1)
    found = length(order_of(pipe, ranks, micros), forward, backward, sends, reduce, step[:, :ranks].max(axis=1))
    assert found.tolist() == expected


@pytest.mark.parametrize("pipe", [Pipe("1f1b"), Pipe("gpipe"), Pipe("interleaved", 2)])
def test_the_order_is_the_schedules(pipe: Pipe) -> None:
    made, order = make(pipe.schedule, 4, 8, pipe.chunks), order_of(pipe, 4, 8)
    for rank, actions in enumerate(made.ranks):
        computing = [(each.stage, each.kind == "forward") for each in actions if each.kind in ("forward", "backward")]
        assert list(zip(order.stage[rank].tolist(), order.forward[rank].tolist(), strict=True)) == computing
