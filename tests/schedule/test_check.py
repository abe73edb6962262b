"""`check` accepts what can be run, and says of everything else where it is wrong and what would mend it."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule import Action, Schedule, ScheduleError, check, make

sys.path.insert(0, str(Path(__file__).parent))
from pipelines import changed, damaged, listed, runs, scrambled

TWO = make("1f1b", 2, 3)
GPIPE = make("gpipe", 3, 2)
LOOPED = make("interleaved", 2, 2, 2)


# -- against the oracle ---------------------------------------------------------------------------------------------


def accepted(schedule: Schedule) -> bool:
    try:
        check(schedule)
    except ScheduleError as error:
        assert str(error)
        return False
    return True


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_accepts_what_runs_and_nothing_else(seed: int):
    rng = random.Random(seed)
    schedule = damaged(rng.choice([TWO, LOOPED, GPIPE, scrambled(seed)]), rng)
    assert accepted(schedule) == runs(schedule)


# -- what is said ---------------------------------------------------------------------------------------------------


def refused(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as error:
        check(schedule)
    return str(error.value)


def without(schedule: Schedule, rank: int, *gone: Action) -> Schedule:
    return changed(schedule, rank, [action for action in schedule.ranks[rank] if action not in gone])


def swapped(schedule: Schedule, rank: int, one: Action, other: Action) -> Schedule:
    return changed(schedule, rank, [{one: other, other: one}.get(action, action) for action in schedule.ranks[rank]])


def test_a_missing_send():
    assert refused(without(TWO, 0, Action("send_activations", 0, 1))) == (
        "rank 1 waits at action 1 (receive of micro-batch 1's activations from stage 0 on stage 1): nobody sends "
        "micro-batch 1's activations from stage 0; put the send into the list of rank 0"
    )


def test_a_missing_receive():
    assert refused(without(TWO, 1, Action("recv_activations", 1, 2))) == (
        "rank 1, action 8 (forward of micro-batch 2 on stage 1) needs the receive of micro-batch 2's activations from "
        "stage 0 on stage 1 before it: this rank has none; put it in"
    )


def test_a_receive_posted_behind_its_consumer():
    late = swapped(TWO, 0, Action("recv_gradients", 0, 1), Action("backward", 0, 1))
    said = refused(late)
    assert (
        "rank 0, action 5 (backward of micro-batch 1 on stage 0) needs the receive of micro-batch 1's gradients" in said
    )
    assert said.endswith("before it: it is action 10; move it up")


def test_a_send_before_what_makes_it():
    early = swapped(TWO, 1, Action("send_gradients", 1, 0), Action("backward", 1, 0))
    assert "needs the backward of micro-batch 0 on stage 1 before it: it is action 4; move it up" in refused(early)


def test_another_order_at_one_end():
    actions = list(TWO.ranks[1])
    one, other = (actions.index(Action("recv_activations", 1, micro)) for micro in (0, 1))
    actions[one], actions[other] = actions[other], actions[one]
    actions.insert(0, actions.pop(other))
    assert refused(swapped(changed(TWO, 1, actions), 1, actions[0], actions[1])) == (
        "activations from rank 0 to rank 1 are sent and received in different orders: message 0 is action 2 (send of "
        "micro-batch 0's activations from stage 0 to stage 1) on rank 0, and action 0 (receive of micro-batch 1's "
        "activations from stage 0 on stage 1) on rank 1; use one order on both"
    )


def test_a_missing_backward():
    said = refused(without(TWO, 0, Action("backward", 0, 1)))
    assert said.endswith(
        "(reduce of stage 0) needs the backward of micro-batch 1 on stage 0 before it: this rank has none; put it in"
    )
    nothing = without(TWO, 1, *(Action(kind, 1, 2) for kind in ("forward", "backward", "send_gradients")))
    assert "needs the backward of micro-batch 2 on stage 1" in refused(nothing)


def test_a_double():
    twice = changed(TWO, 0, [*TWO.ranks[0][:2], *TWO.ranks[0][1:]])
    assert refused(twice) == (
        "rank 0, action 2 (forward of micro-batch 0 on stage 0): action 1 (forward of micro-batch 0 on stage 0) has "
        "done that; leave one out"
    )


def test_a_backward_both_whole_and_in_parts():
    both = listed([0], 1, "0F0 0I0 0B0 0REDUCE_GRAD 0STEP")
    assert "action 2 (backward of micro-batch 0 on stage 0): action 1 (backward for the input of" in refused(both)
    both = listed([0], 1, "0F0 0B0 0W0 0REDUCE_GRAD 0STEP")
    assert "action 2 (backward for the weights of micro-batch 0 on stage 0): action 1 (backward of" in refused(both)


def test_parts_in_the_wrong_order_or_not_there():
    assert "needs the backward for the input of" in refused(listed([0], 1, "0F0 0W0 0I0 0REDUCE_GRAD 0STEP"))
    assert "needs the backward for the weights of" in refused(listed([0], 1, "0F0 0I0 0REDUCE_GRAD 0STEP"))


def test_reduce_and_step():
    early = swapped(TWO, 0, Action("reduce", 0, None), Action("backward", 0, 2))
    assert refused(early).endswith(
        "needs the backward of micro-batch 2 on stage 0 before it: it is action 12; move it up"
    )
    assert refused(without(TWO, 0, Action("reduce", 0, None))) == (
        "rank 0 has no reduce of stage 0; put it in behind the stage's last backward"
    )
    assert refused(without(TWO, 1, Action("step", 1, None))) == "rank 1 has no step; put it in at the end"
    twice = changed(TWO, 0, [*TWO.ranks[0], Action("step", 0, None)])
    assert "action 13 (step) is not the last, where all ranks meet" in refused(twice)
    twice = changed(TWO, 0, [*TWO.ranks[0][:-1], *TWO.ranks[0][-2:]])
    assert "action 13 (reduce of stage 0): action 12 (reduce of stage 0) has done that" in refused(twice)
    of_second = changed(LOOPED, 0, [*LOOPED.ranks[0][:-1], Action("step", 2, None)])
    assert refused(of_second).endswith("(step) is of stage 2; use the rank's first, 0")


def test_what_is_not_there_at_all():
    assert "stage 1 is on rank 1; rank 0 has stage 0" in refused(changed(TWO, 0, [Action("forward", 1, 0)]))
    assert "stage 7 is nowhere; rank 0 has stages 0, 2" in refused(changed(LOOPED, 0, [Action("forward", 7, 0)]))
    assert "micro-batch 3: use 0 to 2" in refused(changed(TWO, 0, [Action("forward", 0, 3)]))
    assert "micro-batch None: use 0 to 2" in refused(changed(TWO, 0, [Action("forward", 0, None)]))
    assert "micro-batch 1: is of the whole batch" in refused(changed(TWO, 0, [Action("reduce", 0, 1)]))
    assert "stage 0 is the first; leave it out" in refused(changed(TWO, 0, [Action("recv_activations", 0, 0)]))
    assert "stage 1 is the last; leave it out" in refused(changed(TWO, 1, [Action("send_activations", 1, 0)]))
    near = listed([0, 0], 1, "0F0 0SEND_F0 1F0 1B0 0B0 0REDUCE_GRAD 1REDUCE_GRAD 0STEP")
    assert "stages 0 and 1 are both on rank 0 and need no messages; leave it out" in refused(near)
    assert refused(changed(TWO, 1, [])) == "rank 1 has no forward of micro-batch 0 on stage 1; put it in"


def test_stages_of_one_rank_in_the_wrong_order():
    assert "needs the forward of micro-batch 0 on stage 0 before it: it is action 1" in refused(
        listed([0, 0], 1, "1F0 0F0 1B0 0B0 0REDUCE_GRAD 1REDUCE_GRAD 0STEP")
    )
    assert "needs the backward of micro-batch 0 on stage 1 before it: it is action 3" in refused(
        listed([0, 0], 1, "0F0 1F0 0B0 1B0 0REDUCE_GRAD 1REDUCE_GRAD 0STEP")
    )


def test_shapes():
    assert refused(replace(TWO, micros=0)) == "0 micro-batches: use 1 or more"
    assert "no rank does anything" in refused(Schedule("none", (), 1, ()))
    assert "stage 1 is on rank 2: there are lists for ranks 0 to 1" in refused(replace(TWO, stages=(0, 2)))
    assert "rank 1 has no stage" in refused(replace(TWO, stages=(0, 0)))


# -- waiting --------------------------------------------------------------------------------------------------------

ENDS = "0B0 0B1 0REDUCE_GRAD 0STEP", "1B1 1SEND_B1 1REDUCE_GRAD 1STEP"


def test_ranks_that_wait_for_one_another():
    schedule = listed(
        [0, 1],
        2,
        f"0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 {ENDS[0]}",
        f"1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 {ENDS[1]}",
    )
    assert refused(schedule) == (
        "ranks 0, 1 wait for one another: rank 0 at action 3 (send of micro-batch 1's activations from stage 0 to "
        "stage 1) for rank 1 to post action 4 (receive of micro-batch 1's activations from stage 0 on stage 1); rank "
        "1 at action 3 (send of micro-batch 0's gradients from stage 1 to stage 0) for rank 0 to post action 4 "
        "(receive of micro-batch 0's gradients from stage 1 on stage 0). Post a receive, or send, before what waits"
    )
    mended = listed(
        [0, 1],
        2,
        f"0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0RECV_B1 {ENDS[0]}",
        f"1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 {ENDS[1]}",
    )
    check(mended)


def test_a_rank_that_waits_for_what_is_sent_too_late():
    schedule = listed(
        [0, 1],
        2,
        "0F0 0RECV_B0 0RECV_B1 0F1 0SEND_F1 0B0 0B1 0SEND_F0 0REDUCE_GRAD 0STEP",
        f"1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 {ENDS[1]}",
    )
    said = refused(schedule)
    assert "rank 0 at action 5 (backward of micro-batch 0 on stage 0) for rank 1 to come to action 4 (send of" in said
    assert "rank 1 at action 2 (forward of micro-batch 0 on stage 1) for rank 0 to come to action 7 (send of" in said


def lazy(schedule: Schedule) -> Schedule:
    """Each receive posted just before who needs it: what one would write without thinking of others."""
    kinds = {"forward": "recv_activations", "backward": "recv_gradients"}
    for rank, actions in enumerate(schedule.ranks):
        late: list[Action] = []
        for action in actions:
            if action.kind not in kinds.values():
                receive = Action(kinds[action.kind], *action[1:]) if action.kind in kinds else None
                late += [receive, action] if receive in actions else [action]
        schedule = changed(schedule, rank, late)
    return schedule


def test_receives_posted_when_they_are_needed_stop_three_ranks_in_a_circle():
    schedule = lazy(make("interleaved", 3, 3, 2))
    assert not runs(schedule)
    said = refused(schedule)
    assert said.startswith("ranks 0, 1, 2 wait for one another: rank 0 at action")
    for rank in range(3):
        receive = f"stage {rank} to stage {rank + 1}) for rank {(rank + 1) % 3} to post action"
        assert f"rank {rank} at action" in said and receive in said


# -- what later schedules need --------------------------------------------------------------------------------------


def test_backward_in_parts_as_in_zero_bubble_schedules():
    held = check(
        listed(
            [0, 1],
            2,
            "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0I0 0I1 0W0 0W1 0REDUCE_GRAD 0STEP",
            "1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1 1REDUCE_GRAD 1STEP",
        )
    ).held
    assert held == (2, 2)


def test_stages_in_a_v():
    check(
        listed(
            [0, 1, 1, 0],
            1,
            "0F0 0SEND_F0 3RECV_F0 3F0 0RECV_B0 3B0 3SEND_B0 3REDUCE_GRAD 0B0 0REDUCE_GRAD 0STEP",
            "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 2REDUCE_GRAD 1B0 1SEND_B0 1REDUCE_GRAD 1STEP",
        )
    )
