"""What ranks hold at most, against counting by hand and against all moments."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule import Action, Schedule, check, make

sys.path.insert(0, str(Path(__file__).parent))
from pipelines import every, listed, scrambled

SIZES = list(every(range(1, 6), range(1, 13), range(2, 5)))


def moments(schedule: Schedule, rank: int) -> set[tuple[int, ...]]:
    """Micro-batches on each stage of a rank, after each of its actions."""
    stages = schedule.of_rank(rank)
    now = dict.fromkeys(stages, 0)
    found = set()
    for kind, stage, _ in schedule.ranks[rank]:
        now[stage] += {"forward": 1, "backward": -1, "backward_weight": -1}.get(kind, 0)
        found.add(tuple(now.values()))
    assert not any(now.values())
    return found


def buffers(schedule: Schedule, rank: int) -> tuple[int, int]:
    """The most receives that are posted and not used, of activations and of gradients."""
    users = {"forward": "recv_activations", "backward": "recv_gradients", "backward_input": "recv_gradients"}
    waiting: set[Action] = set()
    most = {"recv_activations": 0, "recv_gradients": 0}
    for action in schedule.ranks[rank]:
        if action.kind in most:
            waiting.add(action)
        elif action.kind in users:
            waiting.discard(Action(users[action.kind], *action[1:]))
        for kind in most:
            most[kind] = max(most[kind], sum(one.kind == kind for one in waiting))
    return most["recv_activations"], most["recv_gradients"]


def below(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


@settings(max_examples=60)
@given(st.one_of(st.sampled_from(SIZES).map(lambda sizes: make(*sizes)), st.integers(0, 10**6).map(scrambled)))
def test_the_fullest_moments_are_those_that_none_exceeds(schedule: Schedule):
    checked = check(schedule)
    for rank in range(schedule.pipeline_ranks):
        assert checked.posted[rank] == buffers(schedule, rank)
        seen = moments(schedule, rank)
        assert set(checked.together[rank]) == {one for one in seen if not any(below(one, other) for other in seen)}
        for index, stage in enumerate(schedule.of_rank(rank)):
            assert checked.held[stage] == max(counts[index] for counts in seen)


def test_interleaved():
    checked = check(make("interleaved", 4, 8, 2))
    assert checked.held == (8, 8, 7, 5, 4, 4, 3, 1)
    assert checked.together == (
        ((8, 3), (7, 4)),
        ((8, 1), (7, 2), (6, 3), (5, 4)),
        ((7, 0), (6, 1), (5, 2), (4, 3)),
        ((5, 0), (4, 1)),
    )


def test_activations_are_held_until_the_weights_have_their_gradients():
    assert check(listed([0], 2, "0F0 0I0 0F1 0W0 0I1 0W1 0REDUCE_GRAD 0STEP")).held == (2,)
    assert check(listed([0], 2, "0F0 0I0 0W0 0F1 0I1 0W1 0REDUCE_GRAD 0STEP")).held == (1,)


def test_a_receive_is_counted_until_its_message_is_used():
    posted = check(
        listed(
            [0, 1],
            2,
            "0RECV_B0 0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0B0 0B1 0REDUCE_GRAD 0STEP",
            "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1STEP",
        )
    ).posted
    assert posted == ((0, 2), (2, 0))
    assert posted[1].activations == 2
