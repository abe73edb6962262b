"""Schedules for tests, and an oracle that says of any whether it can be run, which shares no code with `check`."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

from meshwright.schedule.actions import Action, Schedule
from meshwright.schedule.files import actions
from meshwright.schedule.messages import communicating


def every(ranks: range, micros: range, chunks: range) -> Iterator[tuple[str, int, int, int]]:
    """Arguments of `make`."""
    for p in ranks:
        for m in micros:
            yield from (("naive", p, m, 1), ("gpipe", p, m, 1), ("1f1b", p, m, 1))
            if p > 1:
                yield from (("interleaved", p, m, v) for v in chunks)


def changed(schedule: Schedule, rank: int, to: list[Action]) -> Schedule:
    """The schedule with another list for one rank."""
    lists = list(schedule.ranks)
    lists[rank] = tuple(to)
    return replace(schedule, ranks=tuple(lists))


def listed(stages: list[int], micros: int, *lines: str) -> Schedule:
    """A schedule from its ranks' actions, as files have them."""
    return Schedule("listed", tuple(stages), micros, tuple(tuple(actions(r, line)) for r, line in enumerate(lines)))


def scrambled(seed: int) -> Schedule:
    """Stages anywhere, each rank computing whatever it can at random, backward whole or in parts; with messages."""
    rng = random.Random(seed)
    ranks, micros = rng.randint(1, 4), rng.randint(1, 4)
    stages = [*range(ranks), *(rng.randrange(ranks) for _ in range(rng.randint(0, 4)))]
    rng.shuffle(stages)
    last = len(stages) - 1
    order: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[tuple[str, int, int]] = set()
    left = {(kind, s, i) for s in range(last + 1) for i in range(micros) for kind in ("F", "I", "W")}
    needs = {"F": lambda s, i: [("F", s - 1, i)] if s else [], "W": lambda s, i: [("I", s, i)]}
    needs["I"] = lambda s, i: [("F", s, i)] + ([("I", s + 1, i)] if s < last else [])
    while left:
        kind, s, i = rng.choice(sorted(k for k in left if done.issuperset(needs[k[0]](*k[1:]))))
        if kind == "I" and rng.random() < 0.5:
            order[stages[s]].append(Action("backward", s, i))
            ran = {("I", s, i), ("W", s, i)}
        else:
            name = {"F": "forward", "I": "backward_input", "W": "backward_weight"}[kind]
            order[stages[s]].append(Action(name, s, i))
            ran = {(kind, s, i)}
        done |= ran
        left -= ran
    return communicating("scrambled", stages, micros, order)


def damaged(schedule: Schedule, rng: random.Random) -> Schedule:
    """The schedule with a few actions moved, dropped, doubled or of another micro-batch: mostly wrong, not always."""
    for _ in range(rng.randint(1, 2)):
        rank = rng.randrange(schedule.pipeline_ranks)
        todo = list(schedule.ranks[rank])
        place = rng.randrange(len(todo))
        taken = todo.pop(place)
        match rng.choice(["move"] * 8 + ["drop", "double", "other"]):
            case "move":
                todo.insert(max(place + rng.randint(-4, 4), 0), taken)
            case "double":
                todo[place:place] = [taken, taken]
            case "other":
                todo.insert(place, taken._replace(micro=rng.choice([None, -1, 0, 1, 2, 9])))
        schedule = changed(schedule, rank, todo)
    return schedule


def runs(schedule: Schedule) -> bool:
    """Whether all ranks come to their ends, one action at a time in turn, with everything done once."""
    stages, micros, last = schedule.stages, schedule.micros, len(schedule.stages) - 1
    done: Counter[tuple[str, int, int | None]] = Counter()
    posted: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
    sent: dict[tuple[int, int, str], int] = Counter()
    promised: set[tuple[str, int, int]] = set()  # receives that were posted
    arrived: set[tuple[str, int, int]] = set()
    at = [0] * len(schedule.ranks)

    def perform(rank: int, kind: str, s: int, i: int | None) -> bool | None:
        """True: done. False: must wait. None: can never be."""
        if not 0 <= s <= last or stages[s] != rank or (i is None) != (kind in ("reduce", "step")):
            return None
        if i is not None and not 0 <= i < micros:
            return None
        if kind == "forward":
            return source("activations", rank, s, s - 1, i, "forward")
        if kind in ("backward", "backward_input"):
            if done["forward", s, i] != 1:
                return None
            return source("gradients", rank, s, s + 1, i, "backward_input")
        if kind == "backward_weight":
            return True if done["backward_input", s, i] else None
        if kind in ("send_activations", "send_gradients"):
            to, made = (s + 1, "forward") if kind == "send_activations" else (s - 1, "backward_input")
            if not 0 <= to <= last or stages[to] == rank or done[made, s, i] != 1:
                return None
            channel = (rank, stages[to], kind.partition("_")[2])
            if len(posted[channel]) <= sent[channel]:
                return False
            if posted[channel][sent[channel]] != (to, i):
                return None  # the receive that meets this send is for another
            sent[channel] += 1
            arrived.add((channel[2], to, i))
            return True
        if kind in ("recv_activations", "recv_gradients"):
            of = s - 1 if kind == "recv_activations" else s + 1
            if not 0 <= of <= last or stages[of] == rank:
                return None
            posted[stages[of], rank, kind.partition("_")[2]].append((s, i))
            promised.add((kind.partition("_")[2], s, i))
            return True
        if kind == "reduce":
            return True if all(done["backward_weight", s, micro] for micro in range(micros)) else None
        ends = at[rank] + 1 == len(schedule.ranks[rank])
        return True if ends and s == stages.index(rank) else None

    def source(what: str, rank: int, s: int, of: int, i: int, made: str) -> bool | None:
        if not 0 <= of <= last:
            return True
        if stages[of] == rank:
            return True if done[made, of, i] else None
        return (what, s, i) in arrived if (what, s, i) in promised else None

    moved = True
    while moved:
        moved = False
        for rank, todo in enumerate(schedule.ranks):
            if at[rank] < len(todo):
                kind, s, i = todo[at[rank]]
                can = perform(rank, kind, s, i)
                if can is None:
                    return False
                if can:
                    parts = ("backward_input", "backward_weight") if kind == "backward" else (kind,)
                    for part in parts:
                        done[part, s, i] += 1
                    at[rank] += 1
                    moved = True
    steps = {("step", stages.index(rank), None) for rank in range(len(schedule.ranks))}
    wanted = {(k, s, i) for k in ("forward", "backward_input", "backward_weight") for s in range(last + 1)
              for i in range(micros)} | {("reduce", s, None) for s in range(last + 1)} | steps  # fmt: skip
    computed = Counter({key: n for key, n in done.items() if not key[0].startswith(("send", "recv"))})
    complete = all(at[rank] == len(todo) for rank, todo in enumerate(schedule.ranks))
    balanced = all(sent[channel] == len(posts) for channel, posts in posted.items())
    return complete and balanced and computed == Counter(wanted)
