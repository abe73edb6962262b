"""A schedule as a file: JSON, with the actions of each rank on a line of its own.

    {
      "format": "meshwright schedule 1",
      "name": "1f1b",
      "stages": [0, 1],
      "micro_batches": 1,
      "ranks": [
        "0RECV_B0 0F0 0SEND_F0 0B0 0REDUCE_GRAD 0STEP",
        "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1STEP"
      ]
    }

`stages` is the rank of each stage. An action is its stage, what it is, and its micro-batch, in the words that
`torch.distributed.pipelining` prints and reads: F and B are forward and backward, I and W backward for the input and
for the weights. Only the step has no word there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.schedule.actions import ONCE, Action, Kind, Schedule
from meshwright.schedule.check import check
from meshwright.schedule.errors import ScheduleError
from meshwright.spec.words import join, show

FORMAT = "meshwright schedule 1"
KEYS = ("format", "name", "stages", "micro_batches", "ranks")
WORDS: dict[Kind, str] = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
    "send_activations": "SEND_F",
    "recv_activations": "RECV_F",
    "send_gradients": "SEND_B",
    "recv_gradients": "RECV_B",
    "reduce": "REDUCE_GRAD",
    "step": "STEP",
}
KINDS = {word: kind for kind, word in WORDS.items()}
ACTION = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{0,9})")


def written(action: Action) -> str:
    """ "1F3": the forward of micro-batch 3 on stage 1."""
    return f"{action.stage}{WORDS[action.kind]}{'' if action.micro is None else action.micro}"


def write(schedule: Schedule, path: Path) -> None:
    """Write a schedule, over what is there. Raises ScheduleError where that cannot be done."""
    head = {"format": FORMAT, "name": schedule.name, "stages": schedule.stages, "micro_batches": schedule.micros}
    lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}," for key, value in head.items()]
    ranks = ",\n".join(f'    "{" ".join(map(written, actions))}"' for actions in schedule.ranks)
    try:
        path.write_text("\n".join(["{", *lines, '  "ranks": [', ranks, "  ]", "}", ""]), encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"{path}: cannot be written ({error.strerror}); name a file in a folder that is") from None


def read(path: Path) -> Schedule:
    """The schedule in a file, proven by `check`. Raises ScheduleError, with what is wrong and where."""
    try:
        return _read(path)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None


def _read(path: Path) -> Schedule:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ScheduleError(f"cannot be read ({error.strerror}); name a schedule's file") from None
    except UnicodeDecodeError:
        raise ScheduleError("not UTF-8 text; name a schedule's file") from None
    except json.JSONDecodeError as error:
        raise ScheduleError(f"line {error.lineno}: not valid JSON: {error.msg}") from None
    except (RecursionError, ValueError):
        raise ScheduleError("not a schedule: brackets too deep, or a number too long") from None
    schedule = _schedule(content)
    check(schedule)
    return schedule


def _schedule(content: Any) -> Schedule:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = f"its format is {show(content['format'])}" if isinstance(content, dict) and "format" in content else ""
        raise ScheduleError(f'not a schedule{": " * bool(found)}{found}; it has "format": {show(FORMAT)} at its top')
    for key in KEYS:
        if key not in content:
            raise ScheduleError(f"{key} is missing; a schedule has {join(KEYS, 'and')}")
    for key in content:
        if key not in KEYS:
            raise ScheduleError(f"{key}: no such field; a schedule has {join(KEYS, 'and')}")
    name, micros = content["name"], content["micro_batches"]
    if not isinstance(name, str) or not name.isprintable():
        raise ScheduleError(f"name: {show(name)} is not text on one line")
    stages = _whole_numbers(content)
    ranks = content["ranks"]
    if not isinstance(ranks, list) or not all(isinstance(line, str) for line in ranks):
        raise ScheduleError("ranks: not a list of texts; write the actions of each rank into one, with spaces between")
    lists = tuple(tuple(actions(rank, line)) for rank, line in enumerate(ranks))
    number = sum(map(len, lists))
    if not isinstance(micros, int) or isinstance(micros, bool) or not 1 <= micros <= number:
        raise ScheduleError(f"micro_batches: {show(micros)} for {number} actions; use 1 or more, each with its actions")
    return Schedule(name, stages, micros, lists)


def _whole_numbers(content: Mapping[str, Any]) -> tuple[int, ...]:
    stages = content["stages"]
    if not isinstance(stages, list) or not all(isinstance(rank, int) for rank in stages):
        raise ScheduleError(f"stages: {show(stages)} is not a list of ranks, one for each stage; write [0, 1]")
    return tuple(int(rank) for rank in stages)


def actions(rank: int, line: str) -> Sequence[Action]:
    """The actions of a rank, written with spaces between. Raises ScheduleError."""
    found = []
    for position, text in enumerate(line.split()):
        parts = ACTION.fullmatch(text)
        kind = KINDS.get(parts[2]) if parts else None
        if parts is None or kind is None or (kind in ONCE) == bool(parts[3]):
            raise ScheduleError(f"rank {rank}, action {position}: {show(text)} is no action; {_right(kind)}")
        found.append(Action(kind, int(parts[1]), int(parts[3]) if parts[3] else None))
    return found


def _right(kind: Kind | None) -> str:
    """How an action would be written."""
    if kind is None:
        return f"write a stage, one of {join(tuple(KINDS))}, and a micro-batch: 1F0"
    if kind in ONCE:
        return f"it is of no micro-batch: 1{WORDS[kind]}"
    return f"it is of a micro-batch: 1{WORDS[kind]}0"
