"""`meshwright costs`: what the parts of a model take on this machine, for a pipeline's stages to be balanced by."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.common import load, run_options, say


@click.command("costs")
@run_options
@click.option("-o", "--out", type=Path, default=Path("costs.json"), show_default=True, help="The file to write.")
def command(words: tuple[str, ...], ranks: int | None, quiet: bool, verbose: bool, debug: bool, out: Path) -> None:
    """Measure what the embedding, a block and the head of a run's model take here, and write it to a file.

    A pipeline whose layout.pp_split names the file has stages that take as equal a time as can be; by default they are
    balanced by FLOPs. One device computes one micro-batch of one block, so this takes seconds and little memory.

    \b
    meshwright costs run.yaml -o costs.json
    meshwright train run.yaml layout.pp=4 layout.pp_split=costs.json
    meshwright predict run.yaml layout.pp=4 layout.pp_split=costs.json      which blocks each stage gets

    Exit codes: 0 done, 2 wrong input.
    """
    run = load(words, ranks)
    from meshwright.comm.runtime import pick_device
    from meshwright.spec.costs import write
    from meshwright.train.costs import measure

    found = measure(run, pick_device(run.device, 0))
    write(found, out)
    assert isinstance(found.block, float)
    ms = {"embedding": found.embedding, "a block": found.block, "head and loss": found.head}
    click.echo(", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in ms.items()))
    if not quiet:
        say(f"measured: {found.of}", f"written to {out}; use it as layout.pp_split={out}")
