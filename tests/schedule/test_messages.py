"""Where messages stand among what ranks compute: never so that a rank waits for ever, and early, but not too early."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule import Schedule, check, make
from meshwright.schedule.actions import COMPUTING, SENDS
from meshwright.schedule.files import written

sys.path.insert(0, str(Path(__file__).parent))
from pipelines import runs, scrambled


def text(schedule: Schedule, rank: int) -> str:
    return " ".join(map(written, schedule.ranks[rank]))


@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_any_order_in_which_ranks_can_compute_gets_messages_that_cannot_stop_it(seed):
    schedule = scrambled(seed)
    check(schedule)
    assert runs(schedule)


def test_one_forward_one_backward():
    schedule = make("1f1b", 2, 3)
    assert text(schedule, 0) == (
        "0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B0 0RECV_B2 0F2 0SEND_F2 0B1 0B2 0REDUCE_GRAD 0STEP"
    )
    assert text(schedule, 1) == (
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1RECV_F2 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2 1REDUCE_GRAD 1STEP"
    )


@pytest.mark.parametrize("sizes", [("naive", 4, 5), ("gpipe", 4, 5), ("1f1b", 4, 9), ("interleaved", 4, 8, 3)])
def test_a_receive_is_posted_two_computations_ahead(sizes):
    schedule = make(*sizes)
    consumers = {"recv_activations": ("forward",), "recv_gradients": ("backward",)}
    for actions in schedule.ranks:
        places = {action: place for place, action in enumerate(actions)}
        computing = [place for place, action in enumerate(actions) if action.kind in COMPUTING]
        for place, (kind, stage, micro) in enumerate(actions):
            if kind in consumers:
                consumer = next(places[a] for a in actions if a.kind in consumers[kind] and a[1:] == (stage, micro))
                before = computing.index(consumer)
                assert place < computing[max(before - 2, 0)]


@pytest.mark.parametrize("sizes", [("naive", 4, 5), ("gpipe", 4, 5), ("1f1b", 4, 9), ("interleaved", 4, 8, 3)])
def test_a_send_stands_right_behind_what_makes_it_but_for_receives(sizes):
    for actions in make(*sizes).ranks:
        for place, action in enumerate(actions):
            if action.kind in SENDS:
                behind = [a for a in actions[:place] if a.kind in COMPUTING][-1]
                assert behind[1:] == action[1:]
                assert {"send_activations": "forward", "send_gradients": "backward"}[action.kind] == behind.kind


def test_few_buffers_wait_at_once():
    for sizes, most in (
        (("naive", 8, 16), 2),
        (("gpipe", 8, 16), 3),
        (("1f1b", 8, 16), 3),
        (("interleaved", 8, 24, 4), 4),
    ):
        assert max(max(posted) for posted in check(make(*sizes)).posted) == most


def test_a_stage_is_reduced_behind_its_last_backward_while_others_go_on():
    schedule = make("interleaved", 2, 2, 2)
    assert text(schedule, 0).endswith("0RECV_B1 2B1 2SEND_B1 2REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD 0STEP")
    assert text(schedule, 1).endswith("1RECV_B1 3B1 3SEND_B1 3REDUCE_GRAD 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD 1STEP")


def test_stages_of_one_rank_need_no_messages():
    assert text(make("gpipe", 1, 2), 0) == "0F0 0F1 0B0 0B1 0REDUCE_GRAD 0STEP"


def test_channels_have_a_direction():
    assert make("1f1b", 3, 4).channels == (
        (0, 1, "activations"), (1, 0, "gradients"), (1, 2, "activations"), (2, 1, "gradients"),
    )  # fmt: skip
    assert set(make("interleaved", 2, 4, 2).channels) == {
        (source, 1 - source, payload) for source in (0, 1) for payload in ("activations", "gradients")
    }
