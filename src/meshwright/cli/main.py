"""The command line's entry. A command's module is imported when it is used, so that everything else starts at once."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence
from typing import Any

import click

import meshwright
from meshwright.cli.errors import EXIT_CODES, guarded, guarded_rank
from meshwright.comm.place import rank_number
from meshwright.train.streams import finish, reopen

COMMANDS = {
    "train": "Train a model, on several ranks.",
    "predict": "Tell what a run will hold, move and compute; starts nothing.",
    "plan": "Tell which layout of a model over a cluster is fastest, whether it fits, and why.",
    "verify": "Prove that a layout computes what one device computes.",
    "checkpoint": "Look into checkpoints, check, export and import them.",
    "costs": "Measure what the parts of a model take here, to balance a pipeline by.",
    "schedule": "Draw who does what, and when, in a pipeline.",
    "probe": "Measure this machine into a cluster file.",
}


class Commands(click.Group):
    """Subcommands by name; each is the `command` of the module of the same name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"meshwright.cli.{name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"no command {args[0]!r}; there are {', '.join(COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES,
)
@click.version_option(meshwright.__version__, prog_name="meshwright", message="%(prog)s %(version)s")
def commands() -> None:
    """Trains transformer language models across many devices; plans, proves and explains how.

    \b
    meshwright train                      train the demo model on two ranks
    meshwright train run.yaml steps=500   a run file, and a field of it replaced
    meshwright predict run.yaml --json    what that will cost, for a program
    meshwright verify run.yaml            proof that its layout is right
    meshwright checkpoint export runs/demo exported
    meshwright COMMAND --help             more, with examples

    Results go to stdout, everything else to stderr. NO_COLOR is respected.
    """


def run(argv: Sequence[str]) -> int:
    """Run one command line; returns its exit code."""

    def command() -> Any:
        with commands.make_context("meshwright", list(argv)) as context:
            return commands.invoke(context)

    guard = guarded_rank if rank_number() is not None else guarded
    return guard(command, debug="--debug" in argv)


def main() -> None:
    """The console script `meshwright`."""
    reopen()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × must not end a run
    code = run(sys.argv[1:])
    finish()
    sys.exit(code)
