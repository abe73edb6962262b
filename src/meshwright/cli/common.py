"""What the commands share: the run file and its overrides, and where tables go."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from meshwright.spec.errors import UserError
from meshwright.spec.quantities import BYTES

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from meshwright.spec.load import Written
    from meshwright.spec.run import RunSpec

PIPED_WIDTH = 120
RANKS_PER_CORE = 32  # more than this many on one machine is a slip, not a plan


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments and options by which every command takes a run."""
    for decorate in (
        click.option("--debug", is_flag=True, help="Show tracebacks."),
        click.option("-v", "--verbose", is_flag=True, callback=_one_of_two, help="Show more."),
        click.option("-q", "--quiet", is_flag=True, callback=_one_of_two, help="Show less."),
        click.option("--ranks", type=click.IntRange(min=1), metavar="N", help="Number of ranks; else the layout's."),
        click.argument("words", nargs=-1, metavar="[RUN.yaml] [key=value]..."),
    ):
        function = decorate(function)
    return function


def _one_of_two(context: click.Context, option: click.Parameter, on: bool) -> bool:
    if on and (context.params.get("quiet") or context.params.get("verbose")):
        raise click.UsageError("-q and -v exclude each other")
    return on


def split(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The run file, if one is named, and the overrides. Folders may have "=" in their names, fields no "/"."""
    files = [word for word in words if "=" not in word or "/" in word.partition("=")[0] or Path(word).is_file()]
    overrides = [word for word in words if word not in files]
    if len(files) > 1:
        raise UserError(
            f"command line: {' '.join(files)}: more than one run file; give one, and key=value for the rest"
        )
    if not files:
        return None, overrides
    path = Path(files[0])
    if not path.exists():
        raise UserError(_missing(path))
    return path, overrides


def _missing(path: Path) -> str:
    """Says that there is no such run file, and what may have been meant."""
    from meshwright.spec.load import describe

    name = str(path)
    if name in (row.name for row in describe()):
        return f"command line: {name}: no value; write {name}=…"
    folder = path.parent
    there = [p.name for p in folder.iterdir() if p.suffix in (".yaml", ".yml")] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, there, n=1)
    hint = f"did you mean {folder / near[0]}?" if near else "name a YAML file, or none for the demo's defaults"
    return f"command line: {name}: no such run file; {hint}"


def load(words: Sequence[str], ranks: int | None) -> RunSpec:
    """The run that the command line asks for, its layout resolved for `ranks`. Raises UserError."""
    return resolved(read(words).run(), ranks)


def read(words: Sequence[str]) -> Written:
    """What the command line asks for, before it is checked as a whole. Raises UserError."""
    from meshwright.spec.load import Written

    return Written.read(*split(words))


def resolved(run: RunSpec, ranks: int | None) -> RunSpec:
    """`run` with its layout resolved for `ranks`. Raises UserError."""
    return run.model_copy(update={"layout": run.layout.resolve(ranks)})


def in_bytes(text: str) -> int:
    """A size on the command line in bytes: 80GB (10⁹ bytes each), 24.5 GiB (2³⁰ each)."""
    stated = text.strip().endswith("B")  # a bare number is most likely a slip
    try:
        size = int(BYTES(text)) if stated else 0
    except UserError:
        size = 0
    if size < 1:
        parts = re.match(r"\d+(\.\d+)?", text.strip())
        number = parts[0] if parts and float(parts[0]) else "80"
        raise click.BadParameter(f"{text!r} is no size; write {number}GB (10⁹ bytes each) or {number}GiB (2³⁰ each)")
    return size


def check_ranks(ranks: int, instead: str) -> None:
    """Raise UserError, with what would do `instead` of fewer, where this machine cannot reasonably hold `ranks`."""
    cores = len(os.sched_getaffinity(0))
    if ranks > RANKS_PER_CORE * cores:
        raise UserError(
            f"layout: {ranks} ranks are too many for this machine's {cores} cores; use at most "
            f"{RANKS_PER_CORE * cores}, {instead}"
        )


def say(*parts: RenderableType) -> None:
    """Lines and tables on stderr. Where that takes nothing, they are left out: results do not go there."""
    with contextlib.suppress(OSError):
        for part in parts:
            if isinstance(part, str):
                click.echo(part, err=True)
            else:
                console(sys.stderr).print(part)


def console(stream: TextIO | None = None) -> Console:
    """For tables on `stream`, by default stdout. Where it is no terminal, wide enough that no column is cut."""
    from rich.console import Console

    class Unguarded(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # where exit codes are made is `errors`

    stream = stream or sys.stdout
    return Unguarded(
        file=stream, width=None if stream.isatty() else PIPED_WIDTH, highlight=False, markup=False, emoji=False
    )
