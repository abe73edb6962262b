"""`meshwright schedule`: who does what, and when, in a pipeline. No torch, no processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.common import console, say
from meshwright.spec.errors import UserError

if TYPE_CHECKING:
    from meshwright.schedule import Checked, Schedule
    from meshwright.schedule.timeline import Timeline


@click.command("schedule")
@click.argument("name", metavar="NAME|FILE")
@click.option("--stages", type=int, metavar="P", help="Pipeline ranks, each with one stage, or with --chunks of them.")
@click.option("--micro-batches", "micros", type=int, metavar="M", help="Micro-batches of a step.")
@click.option("--chunks", type=int, metavar="V", help="interleaved: stages of each rank.")
@click.option("--forward", type=float, default=1, show_default=True, help="Time that a stage's forward takes.")
@click.option("--backward", type=float, default=2, show_default=True, help="Time that its backward takes.")
@click.option("--send", type=float, default=0, show_default=True, help="Time that a message takes, beside computing.")
@click.option("--out", type=Path, metavar="FILE", help="Draw into FILE.svg or .png; .json is a trace for Perfetto.")
@click.option("--save", type=Path, metavar="FILE", help="Write the schedule itself: FILE may then be named, or run.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures for a program.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def command(
    name: str,
    stages: int | None,
    micros: int | None,
    chunks: int | None,
    forward: float,
    backward: float,
    send: float,
    out: Path | None,
    save: Path | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Draw who does what, and when, in a pipeline; prove that no rank waits for ever, and tell what each stage holds.

    NAME is naive, gpipe, 1f1b or interleaved; FILE is one that --save has written, or you have. Times are in any unit;
    in a trace one unit is 1 ms. With --chunks V a stage has 1/V of a rank's layers: compare --forward 0.5 --backward 1
    of two chunks with the defaults of one.

    \b
    meshwright schedule 1f1b --stages 4 --micro-batches 8
    meshwright schedule interleaved --stages 4 --micro-batches 8 --chunks 2 --forward 0.5 --backward 1 --send 0.1
    meshwright schedule gpipe --stages 4 --micro-batches 8 --out gpipe.svg
    meshwright schedule 1f1b --stages 4 --micro-batches 8 --save mine.json
    meshwright schedule mine.json --out trace.json          then open it in https://ui.perfetto.dev

    Exit codes: 0 done, 2 wrong input.
    """
    if out is not None and out == save:
        raise UserError(f"command line: --out and --save: both would write {out}; name two files")
    draw = _drawing(out) if out is not None else None
    schedule, closed = _schedule(name, stages, micros, chunks)
    from meshwright.schedule import check
    from meshwright.schedule.files import write
    from meshwright.schedule.timeline import simulate

    checked = check(schedule)
    timeline = simulate(schedule, forward=forward, backward=backward, send=send)
    if save is not None:
        write(schedule, save)
        say(f"saved {save}")
    if out is not None and draw is not None:
        draw(timeline, out)
        say(f"drawn {out}")
    if as_json:
        click.echo(json.dumps(_figures(timeline, checked, closed), indent=2))
        return
    from meshwright.cli.timelines import drawn, summary

    terminal = console()
    for part in (*drawn(timeline, terminal.width), "", summary(timeline, checked, closed)):
        terminal.print(part)


def _schedule(
    name: str, ranks: int | None, micros: int | None, chunks: int | None
) -> tuple[Schedule, tuple[str, Fraction] | None]:
    """The schedule that the command line names, and the bubble that its paper gives, in symbols and as a number."""
    from meshwright.schedule import NAMES, bubble, find, formula, make
    from meshwright.schedule.files import read

    if name not in NAMES and (Path(name).exists() or Path(name).suffix or "/" in name):
        given = {"--stages": ranks, "--micro-batches": micros, "--chunks": chunks}
        if extra := [option for option, value in given.items() if value is not None]:
            raise UserError(f"command line: {', '.join(extra)}: {name} says that itself; leave it out")
        return read(Path(name)), None
    find(name)
    if ranks is None or micros is None:
        missing = [option for option, value in (("--stages", ranks), ("--micro-batches", micros)) if value is None]
        raise UserError(f"command line: {' and '.join(missing)} missing; write {name} --stages 4 --micro-batches 8")
    sizes = (name, ranks, micros, 1 if chunks is None else chunks)
    return make(*sizes), (formula(*sizes), bubble(*sizes))


def _drawing(out: Path) -> Callable[[Timeline, Path], None]:
    """What draws into such a file. Raises UserError, before anything is computed, where nothing does."""
    if out.suffix == ".json":
        from meshwright.cli.traces import write_trace

        return write_trace
    if out.suffix in (".svg", ".png"):
        from meshwright.cli.charts import draw

        return draw
    raise UserError(f"--out {out}: name a picture, .svg or .png, or a trace, .json")


def _figures(timeline: Timeline, checked: Checked, closed: tuple[str, Fraction] | None) -> dict[str, Any]:
    """All figures, for a program."""
    schedule = timeline.schedule
    return {
        "name": schedule.name,
        "ranks": schedule.pipeline_ranks,
        "stages": schedule.stages,
        "micro_batches": schedule.micros,
        "length": timeline.length,
        "busy": timeline.busy,
        "bubble": timeline.bubble,
        "closed_form": None if closed is None else float(closed[1]),
        "held": checked.held,
        "held_at_once": checked.together,
        "posted": [posted._asdict() for posted in checked.posted],
    }
