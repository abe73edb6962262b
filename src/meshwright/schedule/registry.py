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


def make(name: str, ranks: int, micros: int, chunks: int = 1) -> Schedule:
    """The schedule of that name for so many pipeline ranks, micro-batches, and stages a rank: stage s on rank s mod p.

    Raises UserError for what the schedule cannot be made for.
    """
    check_sizes(name, ranks, micros, chunks)
    stages = [stage % ranks for stage in range(ranks * chunks)]
    match name:
        case "naive":
            order = naive.order(ranks, micros)
        case "gpipe":
            order = gpipe.order(ranks, micros)
        case "1f1b":
            order = one_forward_one_backward.order(ranks, micros)
        case _:
            order = interleaved.order(ranks, micros, chunks)
    return communicating(name, stages, micros, order)


def bubble(name: str, ranks: int, micros: int, chunks: int = 1) -> Fraction:
    """The part of the time in which ranks wait, in closed form: where all stages take equally long, whatever the ratio
    of forward and backward is, and messages take no time. Raises UserError as `make` does."""
    check_sizes(name, ranks, micros, chunks)
    match name:
        case "naive":
            return naive.bubble(ranks)
        case "gpipe":
            return gpipe.bubble(ranks, micros)
        case "1f1b":
            return one_forward_one_backward.bubble(ranks, micros)
        case _:
            return interleaved.bubble(ranks, micros, chunks)


def check_sizes(name: str, ranks: int, micros: int, chunks: int = 1) -> None:
    """Raise UserError, with what would be right, where there is no such schedule."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use {join(NAMES)}"
        raise UserError(f"schedule {name}: no such schedule; {hint}")
    if ranks < 1:
        raise UserError(f"schedule {name}: {ranks} pipeline ranks; use 1 or more")
    if micros < 1:
        raise UserError(f"schedule {name}: {micros} micro-batches; use 1 or more")
    if name == "interleaved":
        if ranks < 2:
            raise UserError(
                "schedule interleaved: on 1 pipeline rank there is nothing to interleave; use 2 or more, or 1f1b"
            )
        if chunks < 2:
            raise UserError(f"schedule interleaved: {chunks} chunk{'s' * (chunks != 1)} a rank; use 2 or more, or 1f1b")
    elif chunks != 1:
        raise UserError(f"schedule {name}: {chunks} chunks a rank; {name} has 1, interleaved has 2 or more")
