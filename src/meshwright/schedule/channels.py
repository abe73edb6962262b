"""What ranks must be to one another: every message has both its ends, in one order, and no rank waits for ever.

Each rank's own list is proven before (`lists`): it computes only what it has posted a receive for.
"""

from __future__ import annotations

from meshwright.schedule.actions import RECEIVES, SENDS, Action, Channel, Schedule, partner, payload, words
from meshwright.schedule.errors import ScheduleError
from meshwright.schedule.numbers import Numbers

POSTED, SENT = 1, 2


# -- both ends ------------------------------------------------------------------------------------------------------


def check_channels(schedule: Schedule) -> None:
    """Prove that both ends of each channel have the same messages in the same order; raises ScheduleError."""
    numbers = Numbers(schedule.stages, schedule.micros)
    base, micros = numbers.base, schedule.micros
    ends: dict[Channel, tuple[list[int], list[int]]] = {channel: ([], []) for channel in schedule.channels}
    lists = [ends[channel] if channel else None for channel in numbers.channels]
    for actions in schedule.ranks:
        for kind, stage, micro in actions:
            if kind in SENDS or kind in RECEIVES:
                place = base[kind] + stage
                both = lists[place]
                assert both is not None and micro is not None  # `lists` has proven it
                both[kind in RECEIVES].append(place * micros + micro)
    for channel, (sent, received) in ends.items():
        if sent != received:
            sends = [numbers.send(number) for number in sent]
            receives = [numbers.receive(number) for number in received]
            raise ScheduleError(_what_differs(schedule, channel, sends, receives))


def _what_differs(schedule: Schedule, channel: Channel, sends: list[Action], receives: list[Action]) -> str:
    source, target, _ = channel
    for receive in receives:
        if partner(receive) not in sends:
            return (
                f"rank {target} waits at {_place(schedule, target, receive)}: nobody sends {payload(receive)} from "
                f"stage {partner(receive).stage}; put the send into the list of rank {source}"
            )
    for send in sends:
        if partner(send) not in receives:
            return (
                f"rank {source} waits at {_place(schedule, source, send)}: nobody receives {payload(send)} on stage "
                f"{partner(send).stage}; put the receive into the list of rank {target}"
            )
    number, send, receive = next(
        (number, send, receive)
        for number, (send, receive) in enumerate(zip(sends, receives, strict=True))
        if partner(send) != receive
    )
    return (
        f"{channel.payload} from rank {source} to rank {target} are sent and received in different orders: message "
        f"{number} is {_place(schedule, source, send)} on rank {source}, and {_place(schedule, target, receive)} on "
        f"rank {target}; use one order on both"
    )


def _place(schedule: Schedule, rank: int, action: Action) -> str:
    return f"action {schedule.ranks[rank].index(action)} ({words(action)})"


# -- waiting --------------------------------------------------------------------------------------------------------


def check_waiting(schedule: Schedule) -> None:
    """Prove that all ranks come to the end of their lists where each send blocks until its receive is posted.

    The ranks are worked off as far as they go, in whatever order: nothing that has happened is undone, so they get
    equally far in each. Raises ScheduleError with the ranks that wait for one another.
    """
    numbers = Numbers(schedule.stages, schedule.micros)
    base, channels, micros = numbers.base, numbers.channels, schedule.micros
    state = bytearray(numbers.all)
    at = [0] * schedule.pipeline_ranks
    waiting: dict[int, int] = {}  # for a message, the rank
    ready = list(range(schedule.pipeline_ranks))
    while ready:
        rank = ready.pop()
        actions = schedule.ranks[rank]
        for position in range(at[rank], len(actions)):
            kind, stage, micro = actions[position]
            place = base.get(kind, -1) + stage if micro is not None else -1
            if not channels[place]:
                continue
            assert micro is not None
            message = place * micros + micro
            if kind in RECEIVES:
                state[message] |= POSTED
            elif not state[message] & (POSTED if kind in SENDS else SENT):
                waiting[message] = rank
                at[rank] = position
                break
            elif kind in SENDS:
                state[message] |= SENT
            if message in waiting:
                ready.append(waiting.pop(message))
    if waiting:
        raise ScheduleError(_cycle(schedule, {rank: at[rank] for rank in waiting.values()}))


def _cycle(schedule: Schedule, stuck: dict[int, int]) -> str:
    """Ranks that wait for one another: from any that is stuck, for whom it waits, and so on until one comes again."""
    met: list[int] = []
    said: list[str] = []
    rank = min(stuck)
    while rank not in met:
        met.append(rank)
        action = schedule.ranks[rank][stuck[rank]]
        awaited = _awaited(action)
        other = schedule.stages[awaited.stage]
        verb = "post" if awaited.kind in RECEIVES else "come to"
        said.append(
            f"rank {rank} at action {stuck[rank]} ({words(action)}) for rank {other} to {verb} "
            f"{_place(schedule, other, awaited)}"
        )
        rank = other
    first = met.index(rank)
    return (
        f"ranks {', '.join(map(str, sorted(met[first:])))} wait for one another: {'; '.join(said[first:])}. "
        "Post a receive, or send, before what waits"
    )


def _awaited(action: Action) -> Action:
    """What another rank must do before an action that waits is done."""
    kind, stage, micro = action
    if kind in SENDS:
        return partner(action)
    return (
        Action("send_activations", stage - 1, micro)
        if kind == "forward"
        else Action("send_gradients", stage + 1, micro)
    )
