"""`meshwright probe`: measures this machine into a cluster file."""

from __future__ import annotations

import os
from pathlib import Path

import click

from meshwright.cli.common import check_ranks, say
from meshwright.comm.place import launched
from meshwright.spec.errors import UserError


@click.command("probe")
@click.option("--ranks", type=click.IntRange(min=1), metavar="N", help="Ranks at most; else one a device, or a core.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("-o", "--out", default="cluster.yaml", show_default=True, metavar="FILE", help="What to write; - prints.")
@click.option("--quick", is_flag=True, help="Few and small measurements: seconds, to see what is measured.")
@click.option("-q", "--quiet", is_flag=True, help="Show less.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def command(ranks: int | None, device: str, out: str, quick: bool, quiet: bool, debug: bool) -> None:
    """Measure this machine into a cluster file, which plan and train take.

    Matrix products by shape, attention, what moves memory, what each operator costs however small; then, on 2, 4, …
    ranks, each collective by size and group, and how ranks that share cores or memory slow each other down. Takes one
    to two minutes, in which nothing else should run: what competes is measured too.

    \b
    meshwright probe                                 into cluster.yaml
    meshwright probe --ranks 4 -o four.yaml          up to four ranks at once
    meshwright plan --model gpt2 --cluster cluster.yaml
    meshwright train run.yaml cluster=cluster.yaml layout=auto

    Exit codes: 0 done, 1 a rank failed, 2 wrong input.
    """
    if launched():
        raise UserError("probe starts its own ranks; call it without torchrun")
    if ranks is not None:
        check_ranks(ranks, "and plan for more with a cluster file of your own")
    if out != "-":
        _check_writable(Path(out))
    from meshwright.spec.clusterfile import dump_cluster
    from meshwright.train.probe import probe
    from meshwright.train.probing import Effort

    effort = Effort(seconds=0.01, rounds=2, small=True) if quick else Effort()
    found = probe(ranks, device=device, effort=effort, say=(lambda text: None) if quiet else say)
    text = dump_cluster(found)
    if out == "-":
        click.echo(text, nl=False)
        return
    Path(out).write_text(text, encoding="utf-8")
    if not quiet:
        say(f"wrote {out}: {found.devices} × {found.device.name}")


def _check_writable(path: Path) -> None:
    """Raise UserError before anything is measured."""
    folder = path.absolute().parent
    if path.is_dir():
        raise UserError(f"command line: --out {path}: is a folder; name a file in it")
    if not folder.is_dir():
        raise UserError(f"command line: --out {path}: there is no folder {folder}; make it, or name another file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"command line: --out {path}: cannot be written; name another file")
