"""Sends, receives, reductions and the step, put in between what the ranks compute.

A send stands right behind the computing action that makes what it sends. A receive is posted AHEAD computing actions
before its consumer: one, and the message can arrive while that one computes; two, and the sender mostly finds it posted
and need not ask first, which spares small messages a way there and back. Earlier would only hold a buffer for longer,
so it is done only where the rule below asks for it. A stage is reduced behind its last backward, after what others wait
for has been sent.

**Why no rank waits for ever**, even if every send blocked until its receive is posted. Let all computing actions run
as early as they can, backward in twice the time of forward, and messages in none. Order all messages by when they
were made in that run (and by name where that is the same). The rule: on each rank,

1. receives are posted in this order, and
2. a receive stands before every send of a later message. (A receive may stand before a send of an earlier message too:
   posting does not block.)

Assume that some messages are never handed over, and take the first of them, x. All earlier ones are.

- Its sender gets to send it: sends before it on that rank are of earlier messages, as a rank makes its messages one
  after another; and what computes before it needs messages that were made before x was, for computing takes time.
- Its receiver gets to post it: sends before the receive are of earlier messages (2), and what computes before it needs
  messages whose receives were posted before, hence earlier messages (1).

So x is handed over: there is no such x. Both ends of a channel also have its messages in the same order, by 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.schedule.actions import Action, Schedule
from meshwright.schedule.numbers import Numbers

UNITS = {"forward": 2, "backward": 4, "backward_input": 2, "backward_weight": 2}
"""What computing takes where messages are put in order: whole numbers, so that the order is everywhere the same."""
NOTHING = -1
AHEAD = 2
"""Computing actions for which a receive is posted before its message is needed."""


def communicating(name: str, stages: Sequence[int], micros: int, order: Sequence[Sequence[Action]]) -> Schedule:
    """The schedule whose ranks compute in the given order; stages: the rank of each.

    The order must be one that ranks can compute in.
    """
    numbers = Numbers(stages, micros)
    lists = [_Computing(actions, numbers) for actions in order]
    made = _made(lists, numbers)
    ranks = tuple(tuple(_with_messages(each, made, numbers)) for each in lists)
    return Schedule(name, tuple(stages), micros, ranks)


class _Computing:
    """What one rank computes; for each action the numbers of what it needs of another stage and makes for one.

    Stages on one rank hand things over too, and the first and last stages make what nobody needs.
    """

    def __init__(self, actions: Sequence[Action], numbers: Numbers) -> None:
        self.actions = actions
        self.needs: list[int] = []
        self.makes: list[int] = []
        stages, micros = numbers.stages, numbers.micros
        for kind, stage, micro in actions:
            assert micro is not None
            if kind == "forward":
                self.needs.append((stage - 1) * micros + micro if stage else NOTHING)
                self.makes.append(stage * micros + micro)
            elif kind == "backward_weight":
                self.needs.append(NOTHING)
                self.makes.append(NOTHING)
            else:
                self.needs.append((stages + stage + 1) * micros + micro if stage + 1 < stages else NOTHING)
                self.makes.append((stages + stage) * micros + micro)


def _made(lists: Sequence[_Computing], numbers: Numbers) -> list[int]:
    """When each message is made where all computing runs as early as it can and messages take no time."""
    made = [-1] * numbers.all
    clocks, at = [0] * len(lists), [0] * len(lists)
    waiting: dict[int, int] = {}  # for a message, the rank
    ready = list(range(len(lists)))
    while ready:
        rank = ready.pop()
        each, clock = lists[rank], clocks[rank]
        for position in range(at[rank], len(each.actions)):
            needed, message = each.needs[position], each.makes[position]
            if needed != NOTHING:
                arrived = made[needed]
                if arrived < 0:
                    waiting[needed] = rank
                    at[rank] = position
                    break
                clock = max(clock, arrived)
            clock += UNITS[each.actions[position].kind]
            if message != NOTHING:
                made[message] = clock
                if message in waiting:
                    ready.append(waiting.pop(message))
        clocks[rank] = clock
    assert not waiting, f"an order in which ranks {sorted(waiting.values())} wait for ever"
    return made


def _with_messages(each: _Computing, made: Sequence[int], numbers: Numbers) -> list[Action]:
    """What a rank computes, and its messages. A message's key is its place in the order of all messages."""
    every, micros, channels = numbers.all, numbers.micros, numbers.channels
    sends = [
        (made[message] * every + message, position)
        for position, message in enumerate(each.makes)
        if message != NOTHING and channels[message // micros]
    ]
    posts = _posts(each, sends, made, numbers)
    last = {action.stage: position for position, action in enumerate(each.actions)}
    reduced = {position: stage for stage, position in last.items()}
    sends.reverse()
    posts.reverse()
    actions: list[Action] = []
    for position, action in enumerate(each.actions):
        while posts and posts[-1][0] <= position:
            actions.append(numbers.receive(posts.pop()[1] % every))
        actions.append(action)
        if sends and sends[-1][1] == position:
            key, _ = sends.pop()
            while posts and posts[-1][0] == position + 1 and posts[-1][1] < key:
                actions.append(numbers.receive(posts.pop()[1] % every))
            actions.append(numbers.send(key % every))
        if position in reduced:
            while posts and posts[-1][0] == position + 1:
                actions.append(numbers.receive(posts.pop()[1] % every))
            actions.append(Action("reduce", reduced[position], None))
    actions.append(Action("step", min(last), None))
    return actions


def _posts(
    each: _Computing, sends: Sequence[tuple[int, int]], made: Sequence[int], numbers: Numbers
) -> list[tuple[int, int]]:
    """Where receives are posted, by the rule above: the computing action before which each stands, and its key."""
    every, micros, channels = numbers.all, numbers.micros, numbers.channels
    receives = [
        (made[needed] * every + needed, max(position - AHEAD, 0))
        for position, needed in enumerate(each.needs)
        if needed != NOTHING and channels[needed // micros]
    ]
    receives.sort(reverse=True)
    posts = []
    latest, later = len(each.actions), len(sends)
    for key, position in receives:
        while later and sends[later - 1][0] > key:
            later -= 1
            latest = min(latest, sends[later][1] + 1)
        latest = min(latest, position)
        posts.append((latest, key))
    posts.reverse()
    return posts
