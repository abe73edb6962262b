"""A schedule timed for many layouts at once: the events of schedule/timeline.py, worked off in waves.

What a rank computes next depends on what it has computed, on a message from another rank, on when the receive was
posted, and on the message before it on the channel. Which, is a matter of the order alone, not of how long anything
takes. So all ranks' next computing actions that depend on nothing open are one wave, worked off as arrays over ranks
and layouts; there are about as many waves as actions on one rank. The order, and where receives are posted, are those
of the generators (schedule/interleaved.py and others, schedule/messages.py), made here as arrays; a test holds the
lengths to those of `simulate`, which add up in the same way, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.predict.plan.space import Pipe
from meshwright.schedule.messages import AHEAD

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
NONE = -1


@dataclass(frozen=True)
class Order:
    """What each rank computes, of shape (ranks, actions): the stage, and whether forward; and for each action, as
    places in the flattened arrays, what makes its message, the action after which its receive is posted, and the one
    that used the message before it on the channel. NONE: no message, or nothing before."""

    stage: Ints
    forward: NDArray[np.bool_]
    maker: Ints
    posted: Ints
    before: Ints
    waves: tuple[Ints, ...]


def length(order: Order, forward: Floats, backward: Floats, send: Floats, reduce: Floats, step: Floats) -> Floats:
    """Seconds of a step of each layout; arrays of shape (layouts, stages), as `simulate` takes them. step: of shape
    (layouts,), of the rank where it takes longest, since all begin it together."""
    layouts, (ranks, actions) = len(forward), order.stage.shape
    took = np.where(order.forward, forward[:, order.stage], backward[:, order.stage]).reshape(layouts, -1)
    # A place behind all others stands for what is there from the beginning.
    zero = ranks * actions
    ends, arrived = np.zeros((layouts, zero + 1)), np.zeros((layouts, zero + 1))
    flat = order.stage.ravel()
    waits = order.maker, order.posted, order.before
    maker, posted, before = (np.where(each == NONE, zero, each).ravel() for each in waits)
    comes = order.maker.ravel() != NONE
    previous = np.where(np.arange(zero) % actions == 0, zero, np.arange(zero) - 1)
    sender = send[:, np.append(flat, 0)[maker]]
    for wave in order.waves:
        start = ends[:, previous[wave]]
        message = np.maximum(np.maximum(ends[:, maker[wave]], ends[:, posted[wave]]), arrived[:, before[wave]])
        message = message + sender[:, wave]
        message = np.where(comes[wave], message, 0.0)
        arrived[:, wave] = message
        ends[:, wave] = np.maximum(start, message) + took[:, wave]
    return _reduced(order, ends[:, :zero].reshape(layouts, ranks, actions), reduce, ranks) + step


def _reduced(order: Order, ends: Floats, reduce: Floats, ranks: int) -> Floats:
    """When the last rank has computed and reduced everything: each stage behind its last backward, one by one."""
    latest = ends[:, :, -1].max(axis=1)
    clock = np.zeros((len(ends), ranks))
    stages = reduce.shape[1]
    lasts = _last_places(order, stages)
    for place in range(stages // ranks):
        at = lasts[:, place]
        stage = order.stage[np.arange(ranks), at]
        clock = np.maximum(ends[:, np.arange(ranks), at], clock) + reduce[:, stage]
    return np.asarray(np.maximum(latest, clock.max(axis=1)))


def _last_places(order: Order, stages: int) -> Ints:
    """For each rank the places of its stages' last backwards, in their order."""
    ranks, actions = order.stage.shape
    chunk = order.stage // ranks
    found = [actions - 1 - np.argmax((chunk == each)[:, ::-1], axis=1) for each in range(stages // ranks)]
    return np.sort(np.array(found).T, axis=1)


def order_of(pipe: Pipe, ranks: int, micros: int) -> Order:
    """That of a schedule."""
    stage, micro, forward = _computing(pipe, ranks, micros)
    return _linked(stage, micro, forward, ranks * pipe.chunks, micros)


def _computing(pipe: Pipe, ranks: int, micros: int) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Stage, micro-batch and direction of what each rank computes, of shape (ranks, actions)."""
    number = pipe.chunks * micros
    rank = np.arange(ranks)[:, None]
    chunk, micro = _rounds(pipe, ranks, micros)
    if pipe.schedule == "gpipe":
        ahead = np.full((ranks, 1), number)
    elif pipe.schedule == "1f1b":
        ahead = np.minimum(ranks - rank - 1, number)
    else:
        first = int(np.argmax(chunk != 0)) if pipe.chunks > 1 else number
        ahead = np.minimum(2 * (ranks - rank - 1) + (pipe.chunks - 1) * first, number)
    # The i-th forward stands behind `ahead` forwards and then one backward each; the i-th backward likewise.
    index = np.arange(number)[None]
    forwards = np.where(index < ahead, index, 2 * index - ahead)
    backwards = np.where(index < number - ahead, 2 * index + 1 + ahead, index + number)
    stage, micros_ = (np.zeros((ranks, 2 * number), np.int64) for _ in range(2))
    is_forward = np.zeros((ranks, 2 * number), np.bool_)
    rows = np.broadcast_to(rank, forwards.shape)
    stage[rows, forwards] = chunk[index] * ranks + rank
    micros_[rows, forwards] = micro[index]
    is_forward[rows, forwards] = True
    stage[rows, backwards] = (pipe.chunks - 1 - chunk[index]) * ranks + rank
    micros_[rows, backwards] = micro[index]
    return stage, micros_, is_forward


def _rounds(pipe: Pipe, ranks: int, micros: int) -> tuple[Ints, Ints]:
    """Chunk and micro-batch of a rank's forwards in their order; backwards have the chunks in reverse."""
    if pipe.schedule != "interleaved":
        return np.zeros(micros, np.int64), np.arange(micros)
    groups = max(micros // ranks, 1)
    each, more = divmod(micros, groups)
    sizes = [each + (group < more) for group in range(groups)]
    starts = np.cumsum([0, *sizes[:-1]])
    chunk = np.concatenate([np.repeat(np.arange(pipe.chunks), size) for size in sizes])
    groups_ = [np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    micro = np.concatenate([np.tile(group, pipe.chunks) for group in groups_])
    return chunk, micro


def _linked(stage: Ints, micro: Ints, forward: NDArray[np.bool_], stages: int, micros: int) -> Order:
    """Who waits for what, where receives stand, and the waves."""
    ranks, actions = stage.shape
    flat = np.arange(ranks * actions).reshape(ranks, actions)
    where = np.empty((2, stages, micros), np.int64)  # of each forward and backward
    where[(~forward).astype(np.int64), stage, micro] = flat
    feeds = np.where(forward, stage - 1, stage + 1)  # the stage that an input, or an output's gradient, comes from
    there = (feeds >= 0) & (feeds < stages)
    needs = np.where(there, where[(~forward).astype(np.int64), np.clip(feeds, 0, stages - 1), micro], NONE)
    waves, made = _waves(needs, forward, ranks, actions)
    crosses = there & (feeds % ranks != stage % ranks)
    makes = (np.where(forward, 0, stages) + stage) * micros + micro
    key = made * (2 * stages * micros) + makes  # the order of all messages: see schedule/messages.py
    posted, before = _posted(stage, forward, needs, crosses, key, stages)
    # What a rank hands over to itself needs no message.
    return Order(stage, forward, np.where(crosses, needs, NONE), posted, before, waves)


def _waves(needs: Ints, forward: NDArray[np.bool_], ranks: int, actions: int) -> tuple[tuple[Ints, ...], Ints]:
    """The waves; and when each action ends where forward takes 2, backward 4, and messages nothing."""
    ends = np.full(ranks * actions + 1, NONE)
    took = np.where(forward, 2, 4)
    at = np.zeros(ranks, np.int64)
    clock = np.zeros(ranks, np.int64)
    every = np.arange(ranks)
    waves: list[Ints] = []
    while True:
        open_ = every[at[every] < actions]
        if not len(open_):
            return tuple(waves), ends[:-1].reshape(ranks, actions)
        need = needs[open_, at[open_]]
        came = np.where(need == NONE, 0, ends[need])
        ready = open_[came >= 0]
        assert len(ready), "an order in which ranks wait for ever"
        places = at[ready]
        clock[ready] = np.maximum(clock[ready], came[came >= 0]) + took[ready, places]
        wave = ready * actions + places
        ends[wave] = clock[ready]
        at[ready] += 1
        waves.append(wave)


def _posted(
    stage: Ints, forward: NDArray[np.bool_], needs: Ints, crosses: NDArray[np.bool_], key: Ints, stages: int
) -> tuple[Ints, Ints]:
    """After which action each receive is posted, and which action used the message before on its channel."""
    ranks, actions = stage.shape
    posted, before = np.full((ranks, actions), NONE), np.full((ranks, actions), NONE)
    sends = np.where(forward, stage + 1 < stages, stage > 0)  # and to another rank, if there are several
    flat_key = key.ravel()
    for rank in range(ranks):
        consumers = np.flatnonzero(crosses[rank])
        if not len(consumers):
            continue
        keys = flat_key[needs[rank, consumers]]
        by_key = np.argsort(keys)
        consumers, keys = consumers[by_key], keys[by_key]
        senders = np.flatnonzero(sends[rank])
        sent = key[rank, senders]  # ascending
        behind = np.searchsorted(sent, keys, side="right")  # sends of later messages
        limit = np.append(senders + 1, actions)[behind]
        latest = np.minimum(np.maximum(consumers - AHEAD, 0), limit)
        latest = np.minimum.accumulate(latest[::-1])[::-1]
        posted[rank, consumers] = np.where(latest > 0, rank * actions + latest - 1, NONE)
        for way in (True, False):
            of_way = consumers[forward[rank, consumers] == way]
            before[rank, of_way[1:]] = rank * actions + of_way[:-1]
    return posted, before
