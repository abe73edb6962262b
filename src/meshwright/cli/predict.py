"""`meshwright predict`: what a run will hold, move and compute. No torch, no processes."""

from __future__ import annotations

import json

import click

from meshwright.cli.common import console, load, run_options


@click.command("predict")
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print the figures for a program.")
def command(words: tuple[str, ...], ranks: int | None, quiet: bool, verbose: bool, debug: bool, as_json: bool) -> None:
    """Tell what a run will hold, move and compute. Starts no processes.

    Parameters by unit, memory of a rank by category, traffic of a step by collective and reason, and FLOPs. With -v
    every block has its line, and so has every tensor kept for backward; with -q there are only the totals.

    \b
    meshwright predict                                     the demo's defaults
    meshwright predict run.yaml layout.dp=8                one field replaced
    meshwright predict model=llama3-8b data.seq_len=8192 --ranks 64
    meshwright predict run.yaml --json | jq .memory.total

    Exit codes: 0 done, 2 wrong input.
    """
    run = load(words, ranks)
    from meshwright.predict.report import predict

    foretold = predict(run)
    if as_json:
        click.echo(json.dumps(foretold.to_dict(), indent=2))
        return
    from meshwright.cli.tables import prediction, summary

    out = console()
    parts = [summary(run, foretold)] if quiet else prediction(run, foretold, every_unit=verbose)
    for part in parts:
        out.print(part)
    if verbose:
        from meshwright.cli.saved import kept
        from meshwright.cli.tables import titled
        from meshwright.predict.peak import saved

        memory = foretold.memory
        rows = saved(run, memory.sequences, cpu=memory.device == "cpu")
        out.print(titled("Kept for backward of a micro-batch, by tensor", kept(rows)))
