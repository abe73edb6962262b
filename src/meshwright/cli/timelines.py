"""A timeline in the terminal: a line for each rank, from left to right, and a few lines of figures.

Each action begins with a letter, so that forward and backward differ without colour too, and the number of its
micro-batch. The shortest has a whole number of columns, so that all of its kind are equally wide. A timeline too long
for the line goes on below, and one that is far too long shows in each column what the rank does in the middle of it.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import ceil

from rich.table import Table
from rich.text import Text

from meshwright.schedule.actions import Action, Kind, Schedule
from meshwright.schedule.check import Checked
from meshwright.schedule.timeline import Timeline

LETTERS: dict[Kind, str] = {  # those of a schedule's file; a message is named after what it carries on
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
    "send_activations": "F",
    "send_gradients": "B",
    "reduce": "R",
    "step": "S",
}
COLOURS: dict[Kind, tuple[str, str]] = {  # of a rank's stages in turn
    "forward": ("black on cyan", "black on bright_cyan"),
    "backward": ("black on green", "black on bright_green"),
    "backward_input": ("black on green", "black on bright_green"),
    "backward_weight": ("black on yellow", "black on bright_yellow"),
    "step": ("black on white", "black on white"),
}
IDLE = "·"
PANELS = 4  # below one another, that a timeline may take
LISTED, LISTED_AT_ONCE = 16, 4  # numbers in a line, where there are more


def label(schedule: Schedule, rank: int, action: Action) -> str:
    """ "F3", or with several stages a rank "F3b": of its second."""
    chunk = ""
    if schedule.chunks > 1 and action.micro is not None:
        chunk = string.ascii_lowercase[schedule.of_rank(rank).index(action.stage) % 26]
    return f"{LETTERS[action.kind]}{'' if action.micro is None else action.micro}{chunk}"


def drawn(timeline: Timeline, width: int) -> Iterable[Text]:
    """The lines of a timeline, and what their letters mean, in `width` columns. None where nothing takes time."""
    if not timeline.length:
        return
    schedule = timeline.schedule
    names = [f"rank {rank} " for rank in range(schedule.pipeline_ranks)]
    margin = len(names[-1])
    columns = max(width - margin, 10)
    shortest = min(span.end - span.start for spans in timeline.ranks for span in spans if span.end > span.start)
    longest = len(label(schedule, 0, Action("forward", 0, schedule.micros - 1)))
    panels = [ceil(cell * timeline.length / shortest / columns) for cell in (longest + 1, longest)]
    if panels[1] <= PANELS:
        scale = (longest + (panels[0] == panels[1])) / shortest  # with a gap, where that costs no panel
        lines = [_cells(timeline, rank, scale) for rank in range(schedule.pipeline_ranks)]
    else:
        scale = columns / timeline.length
        lines = [_samples(timeline, rank, scale) for rank in range(schedule.pipeline_ranks)]
    for start in range(0, len(lines[0]), columns):
        if start:
            yield Text(f"from {start / scale:.4g} on", style="dim")
        for name, line in zip(names, lines, strict=True):
            yield Text.assemble(name.rjust(margin), line[start : start + columns], no_wrap=True, overflow="crop")
    yield Text(_legend(schedule, whole=panels[1] <= PANELS), style="dim")


def _cells(timeline: Timeline, rank: int, scale: float) -> Text:
    """All actions of a rank, one after another."""
    line = Text()
    for action, start, end in timeline.ranks[rank]:
        first, behind = round(start * scale), round(end * scale)
        if behind > first:
            line.append(IDLE * (first - len(line)))
            text = label(timeline.schedule, rank, action)[: behind - first]
            line.append(text.ljust(behind - first), _style(timeline.schedule, rank, action))
    return line.append(IDLE * (round(timeline.length * scale) - len(line)))


def _samples(timeline: Timeline, rank: int, scale: float) -> Text:
    """What a rank does in the middle of each column."""
    line = Text()
    spans = iter(timeline.ranks[rank])
    span = next(spans, None)
    for column in range(round(timeline.length * scale)):
        middle = (column + 0.5) / scale
        while span is not None and span.end <= middle:
            span = next(spans, None)
        if span is None or span.start > middle:
            line.append(IDLE)
        else:
            line.append(LETTERS[span.action.kind], _style(timeline.schedule, rank, span.action))
    return line


def _style(schedule: Schedule, rank: int, action: Action) -> str:
    return COLOURS[action.kind][schedule.of_rank(rank).index(action.stage) % 2]


def _legend(schedule: Schedule, *, whole: bool) -> str:
    words: dict[Kind, str] = {"forward": "forward", "backward": "backward"}
    words |= {"backward_input": "backward for the input", "backward_weight": "backward for the weights"}
    kinds = {action.kind for action in schedule.ranks[0]}
    said = [f"{LETTERS[kind]} {word}" for kind, word in words.items() if kind in kinds]
    said.append(f"{IDLE} waiting")
    if not whole:
        said.append("too narrow to show every action (--out draws them)")
    else:
        said.append("numbers are micro-batches")
        if schedule.chunks > 1:
            said.append("a, b … a rank's first, second … stage")
    return "; ".join(said)


# -- in figures -----------------------------------------------------------------------------------------------------


def summary(timeline: Timeline, checked: Checked, closed: tuple[str, Fraction] | None) -> Table:
    """What a schedule costs. closed: the bubble that its paper gives, in symbols and as a number."""
    schedule = timeline.schedule
    ranks, chunks, micros = schedule.pipeline_ranks, schedule.chunks, schedule.micros
    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    shape = f"{ranks} rank{'s' * (ranks != 1)}" + (f" of {chunks} stages" if chunks > 1 else "")
    rows.add_row(
        "schedule",
        f"{schedule.name}, {shape}, {micros} micro-batch{'es' * (micros != 1)}; proven: no rank waits for ever",
    )
    rows.add_row("length", f"{timeline.length:.6g}, of which a rank computes {_range(timeline.busy)}")
    bubble = f"{timeline.bubble:.1%} of all ranks' time is waiting"
    if closed is not None:
        bubble += f"; {closed[0]} = {float(closed[1]):.1%} where messages take no time"
    rows.add_row("bubble", bubble)
    rows.add_row("held", f"micro-batches at most: {_range(checked.held)} on stage{_numbers(len(checked.held))}")
    if chunks > 1:
        rank, most = max(enumerate(checked.together), key=lambda each: max(map(sum, each[1])))
        at_once = [" + ".join(map(str, counts)) for counts in most[:LISTED_AT_ONCE]]
        more = ", …" * (len(most) > LISTED_AT_ONCE)
        rows.add_row("at once", f"{', '.join(at_once)}{more} on the stages of rank {rank}, which holds most")
    posted = [max(each) for each in zip(*checked.posted, strict=True)]
    if any(posted):
        rows.add_row(
            "buffers", f"at most {posted[0]} of activations and {posted[1]} of gradients wait to be used on a rank"
        )
    return rows


def _range(numbers: Sequence[float]) -> str:
    """All of a few numbers, or one where they are the same; of many the least and the greatest."""
    if len(set(numbers)) == 1:
        return f"{numbers[0]:.6g}"
    if len(numbers) <= LISTED:
        return ", ".join(f"{number:.6g}" for number in numbers)
    return f"{min(numbers):.6g} to {max(numbers):.6g}"


def _numbers(count: int) -> str:
    return " 0" if count == 1 else f"s 0 to {count - 1}"
