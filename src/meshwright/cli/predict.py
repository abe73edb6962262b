"""`meshwright predict`: what a run will hold, move and compute. No torch, no processes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from meshwright.cli.common import console, in_bytes, load, run_options

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command("predict")
@run_options
@click.option("--recompute", is_flag=True, help="Compare the ways to compute activations again, and nothing else.")
@click.option("--capacity", type=in_bytes, metavar="SIZE", help="Tell what fits a device of SIZE: 80GB, 24GiB.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures for a program.")
def command(
    words: tuple[str, ...],
    ranks: int | None,
    quiet: bool,
    verbose: bool,
    debug: bool,
    recompute: bool,
    capacity: int | None,
    as_json: bool,
) -> None:
    """Tell what a run will hold, move and compute. Starts no processes.

    Parameters by unit, memory of a rank by category, traffic of a step by collective and reason, and FLOPs. With -v
    every block has its line, and so has every tensor kept for backward; with -q there are only the totals. With
    --recompute the ways to compute activations again stand side by side.

    \b
    meshwright predict                                     the demo's defaults
    meshwright predict run.yaml layout.dp=8                one field replaced
    meshwright predict model=llama3-8b data.seq_len=8192 --ranks 64
    meshwright predict run.yaml --json | jq .memory.total
    meshwright predict run.yaml --recompute --capacity 80GB   which way fits, and with what batch.micro

    Exit codes: 0 done, 2 wrong input.
    """
    run = load(words, ranks)
    from meshwright.predict.modes import fit, modes
    from meshwright.predict.report import predict

    foretold = predict(run)
    compared = modes(run, foretold.layout, capacity=capacity) if recompute else None
    fits = None if capacity is None else fit(run, foretold.layout, capacity)
    if as_json:
        data = foretold.to_dict()
        if fits is not None:
            data["capacity"] = asdict(fits)
        if compared is not None:
            data["recompute"] = [mode.to_dict() for mode in compared]
        click.echo(json.dumps(data, indent=2))
        return
    from meshwright.cli.tables import prediction, recompute_modes, summary

    out = console()
    parts: Iterable[RenderableType]
    if compared is not None:
        parts = [summary(run, foretold, fits), recompute_modes(run, compared)]
    else:
        parts = [summary(run, foretold, fits)] if quiet else prediction(run, foretold, fits, every_unit=verbose)
    for part in parts:
        out.print(part)
    if verbose:
        from meshwright.cli.saved import kept
        from meshwright.cli.tables import titled
        from meshwright.predict.peak import saved

        memory = foretold.memory
        rows = saved(run, foretold.layout, memory.sequences, cpu=memory.device == "cpu")
        out.print(titled("Kept for backward of a micro-batch, by tensor", kept(rows)))
