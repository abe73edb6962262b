"""Times against what can be worked out by hand, and against the definition: everything begins as soon as it can."""

from __future__ import annotations

import random
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule import Action, Schedule, ScheduleError, make
from meshwright.schedule.actions import COMPUTING, partner
from meshwright.schedule.timeline import Timeline, simulate
from meshwright.spec.errors import UserError

sys.path.insert(0, str(Path(__file__).parent))
from pipelines import changed, listed, scrambled


def test_gpipe_of_four():
    timeline = simulate(make("gpipe", 4, 4))
    assert (timeline.length, set(timeline.busy), timeline.held) == (21, {12}, (4, 4, 4, 4))
    assert f"{timeline.bubble:.1%}" == "42.9%"


def times(timeline: Timeline) -> dict[Action, tuple[float, float]]:
    found = {}
    for rank in zip(timeline.schedule.ranks, timeline.starts, timeline.ends, strict=True):
        for action, start, end in zip(*rank, strict=True):
            if action.kind != "step":
                found[action] = (start, end)
    return found


# -- by definition --------------------------------------------------------------------------------------------------


def source(schedule: Schedule, action: Action) -> Action | None:
    """The send that a computing action waits for, if it comes from another rank."""
    if action.kind == "forward":
        receive = Action("recv_activations", *action[1:])
    elif action.kind in ("backward", "backward_input"):
        receive = Action("recv_gradients", *action[1:])
    else:
        return None
    return partner(receive) if any(receive in actions for actions in schedule.ranks) else None


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_everything_begins_as_soon_as_it_can(seed):
    rng = random.Random(seed)
    schedule = rng.choice([scrambled(seed), make("interleaved", 3, 4, 2), make("1f1b", 4, 5)])
    each = {
        name: [Fraction(rng.randint(0, 9)) for _ in schedule.stages]
        for name in ("forward", "backward", "backward_input", "backward_weight", "send", "reduce", "step")
    }
    timeline = simulate(schedule, **each)
    at = times(timeline)
    for rank, actions in enumerate(schedule.ranks):
        clock = reduced = 0
        for place, action in enumerate(actions):
            kind, stage, _ = action
            start, end = timeline.starts[rank][place], timeline.ends[rank][place]
            if kind in COMPUTING:
                sent = source(schedule, action)
                assert start == max(clock, at[sent][1] if sent else 0)
                assert end == start + each[kind][stage]
                clock = end
            elif kind.startswith("recv"):
                assert start == end == clock
            elif kind.startswith("send"):
                to = schedule.stages[partner(action).stage]
                alike = [a for a in actions[:place] if a.kind == kind and schedule.stages[partner(a).stage] == to]
                assert start == max(clock, at[partner(action)][0], at[alike[-1]][1] if alike else 0)
                assert end == start + each["send"][stage]
            elif kind == "reduce":
                assert start == max(clock, reduced)
                reduced = end = start + each["reduce"][stage]
            else:
                all_ends = [end for ends in timeline.ends for end in ends[:-1]]
                used = [at[a][1] for a in at if not a.kind.startswith("send")]
                assert start == max(used) <= max(all_ends)
                assert end == start + each["step"][stage]
    assert timeline.length == max(max(ends) for ends in timeline.ends)
    assert timeline.bubble == 1 - sum(timeline.busy) / (len(schedule.ranks) * timeline.length) if timeline.length else 0


# -- by hand --------------------------------------------------------------------------------------------------------

PLAIN = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1 0REDUCE_GRAD 0STEP"
OTHER = "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1STEP"


def test_messages_take_their_time_beside_computing_and_in_order():
    timeline = simulate(listed([0, 1], 2, PLAIN, OTHER), send=3)
    at = times(timeline)
    assert at[Action("send_activations", 0, 0)] == (1, 4)
    assert at[Action("forward", 0, 1)] == (1, 2)  # beside the message
    assert at[Action("send_activations", 0, 1)] == (4, 7)  # made at 2, behind the other
    assert at[Action("backward", 1, 0)] == (5, 7)
    assert at[Action("send_gradients", 1, 0)] == (7, 10)  # another direction: nobody is in its way
    assert at[Action("backward", 0, 1)] == (13, 15)
    assert (timeline.length, timeline.busy) == (15, (6, 6))


def test_a_message_waits_for_its_receive():
    late = OTHER.replace("1RECV_F1 ", "").replace("1B0", "1B0 1RECV_F1")
    at = times(simulate(listed([0, 1], 2, PLAIN, late), send=3))
    assert at[Action("send_activations", 0, 1)] == (7, 10)


def test_stages_that_differ():
    timeline = simulate(listed([0, 1], 2, PLAIN, OTHER), forward=[1, 5], backward=[2, 10], send=[1, 0])
    at = times(timeline)
    assert at[Action("forward", 1, 0)] == (2, 7)
    assert at[Action("backward", 0, 0)] == (17, 19)
    assert timeline.busy == (6, 30)


def test_parts_of_backward_take_half_of_it_by_default():
    schedule = listed([0], 1, "0F0 0I0 0W0 0REDUCE_GRAD 0STEP")
    assert simulate(schedule, backward=5).length == 6
    assert simulate(schedule, backward_input=5).length == 7
    assert simulate(schedule, backward_weight=7, backward_input=5).length == 13


def test_reductions_run_beside_and_the_step_waits_for_all_of_them():
    timeline = simulate(make("interleaved", 2, 2, 2), reduce=10, step=1)
    reductions = [[span[1:] for span in spans if span.action.kind == "reduce"] for spans in timeline.beside]
    assert reductions == [[(11, 21), (21, 31)], [(9, 19), (19, 29)]]
    assert [spans[-1] for spans in timeline.ranks] == [(Action("step", rank, None), 31, 32) for rank in (0, 1)]
    assert (timeline.length, timeline.busy) == (32, (13, 13))


def test_spans_are_what_ranks_do_and_what_goes_on_beside():
    timeline = simulate(make("1f1b", 3, 2), send=1)
    for rank, actions in enumerate(timeline.schedule.ranks):
        own = [action for action in actions if action.kind in COMPUTING or action.kind == "step"]
        assert [span.action for span in timeline.ranks[rank]] == own
        assert {span.action.kind for span in timeline.beside[rank]} <= {"send_activations", "send_gradients", "reduce"}
        assert len(timeline.beside[rank]) == (4 if rank == 1 else 2) + 1


def test_nothing_takes_time():
    timeline = simulate(make("1f1b", 2, 2), forward=0, backward=0)
    assert (timeline.length, timeline.bubble) == (0, 0)


@pytest.mark.parametrize(
    ("durations", "said"),
    [
        ({"forward": -1}, "forward: -1 is no duration; use 0 or more"),
        ({"send": float("nan")}, "send: nan is no duration"),
        ({"backward": float("inf")}, "backward: inf is no duration"),
        ({"backward": [1, 2, 3]}, "backward: 3 durations for 2 stages; give one for all, or one for each"),
    ],
)
def test_durations_that_are_none(durations, said):
    with pytest.raises(UserError, match=said):
        simulate(make("1f1b", 2, 2), **durations)


def test_a_schedule_that_stops_is_not_timed():
    schedule = make("1f1b", 2, 2)
    broken = changed(schedule, 0, [action for action in schedule.ranks[0] if action.kind != "send_activations"])
    with pytest.raises(ScheduleError, match=r"ranks \[0, 1\] wait for ever"):
        simulate(broken)
