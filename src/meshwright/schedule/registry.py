"""The schedules that have a name."""

from __future__ import annotations

import difflib
from fractions import Fraction
from typing import Literal, get_args

from meshwright.schedule import gpipe, interleaved, naive, one_forward_one_backward
from meshwright.schedule.actions import Schedule
from meshwright.schedule.messages import communicating
from meshwright.spec.errors import UserError
from meshwright.spec.words import join

Name = Literal["naive", "gpipe", "1f1b", "interleaved"]
NAMES: tuple[Name, ...] = get_args(Name)
MOST = 4_000_000  # forwards and backwards: with messages about 1 GB of lists


def make(name: str, ranks: int, micros: int, chunks: int = 1) -> Schedule:
    """The schedule of that name for so many pipeline ranks, micro-batches, and stages a rank: stage s on rank s mod p.

    Raises UserError for what the schedule cannot be made for.
    """
    check_sizes(name, ranks, micros, chunks)
    stages = [stage % ranks for stage in range(ranks * chunks)]
    match find(name):
        case "naive":
            order = naive.order(ranks, micros)
        case "gpipe":
            order = gpipe.order(ranks, micros)
        case "1f1b":
            order = one_forward_one_backward.order(ranks, micros)
        case "interleaved":
            order = interleaved.order(ranks, micros, chunks)
    return communicating(name, stages, micros, order)


def bubble(name: str, ranks: int, micros: int, chunks: int = 1) -> Fraction:
    """The part of the time in which ranks wait, in closed form: where all stages take equally long, whatever the ratio
    of forward and backward is, and messages take no time. Raises UserError as `make` does."""
    check_sizes(name, ranks, micros, chunks)
    match find(name):
        case "naive":
            return naive.bubble(ranks)
        case "gpipe":
            return gpipe.bubble(ranks, micros)
        case "1f1b":
            return one_forward_one_backward.bubble(ranks, micros)
        case "interleaved":
            return interleaved.bubble(ranks, micros, chunks)


def formula(name: str, ranks: int, micros: int, chunks: int = 1) -> str:
    """What `bubble` computes, in symbols: p ranks, m micro-batches, v chunks. Raises UserError as `make` does."""
    check_sizes(name, ranks, micros, chunks)
    match find(name):
        case "naive":
            return "(p − 1)/p"
        case "gpipe" | "1f1b":
            return "(p − 1)/(m + p − 1)"
        case "interleaved":
            return "(p − 1)/(v·m + p − 1)" if micros >= ranks else "1 − v·m/(v·p + m − 1)"


def find(name: str) -> Name:
    """`name`, if there is such a schedule; else raises UserError with what was probably meant."""
    for known in NAMES:
        if name == known:
            return known
    near = difflib.get_close_matches(name.lower(), NAMES, n=1)
    raise UserError(
        f"schedule {name}: no such schedule; " + (f"did you mean {near[0]}?" if near else f"use {join(NAMES)}")
    )


def check_sizes(name: str, ranks: int, micros: int, chunks: int = 1) -> None:
    """Raise UserError, with what would be right, where there is no such schedule."""
    find(name)
    if ranks < 1:
        raise UserError(f"schedule {name}: {ranks} pipeline ranks; use 1 or more")
    if micros < 1:
        raise UserError(f"schedule {name}: {micros} micro-batches; use 1 or more")
    if name == "interleaved":
        if ranks < 2:
            raise UserError("schedule interleaved: 1 pipeline rank has nothing to interleave; use 2 or more, or 1f1b")
        if chunks < 2:
            raise UserError(f"schedule interleaved: {chunks} chunk{'s' * (chunks != 1)} a rank; use 2 or more, or 1f1b")
    elif chunks != 1:
        raise UserError(f"schedule {name}: {chunks} chunks a rank; use 1, or interleaved for 2 or more")
    actions = 2 * ranks * chunks * micros
    if actions > MOST:
        right = f"{max(MOST // (2 * ranks * chunks), 1):,} micro-batches"
        raise UserError(
            f"schedule {name}: {actions:,} forwards and backwards are too many to list; use {right} or fewer"
        )
