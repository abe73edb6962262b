"""`meshwright train`: checks what can be checked, then starts the ranks; or is one of them."""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshwright.cli.common import check_ranks, console, read, resolved, run_options, say, split
from meshwright.cli.planned import planned
from meshwright.comm.place import launched, place
from meshwright.spec.errors import UserError
from meshwright.spec.exits import ANSWER_NO
from meshwright.train.lock import locked
from meshwright.train.signals import StopFlag, die_with_parent, ended_by_signals

if TYPE_CHECKING:
    from meshwright.spec.run import RunSpec
    from meshwright.train.nodes import Nodes


@click.command("train")
@run_options
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    help="Start the ranks again from the last checkpoint when one dies, N times.",
)
@click.option("--nnodes", metavar="MIN[:MAX]", help="One of several nodes; --ranks are then those of this node.")
@click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Where the nodes meet: one of them, and a free port there.")
@click.option("--rdzv-id", metavar="NAME", default="meshwright", help="Tells runs apart that meet at one endpoint.")
@click.option("--local-addr", metavar="ADDRESS", help="By which the other nodes reach this one; else its name.")
@click.option("--show", is_flag=True, help="Print the whole run, every default resolved, as YAML; start nothing.")
@click.option("--fields", is_flag=True, help="List every field of a run file; start nothing.")
def command(
    words: tuple[str, ...],
    ranks: int | None,
    quiet: bool,
    verbose: bool,
    debug: bool,
    max_restarts: int,
    nnodes: str | None,
    rdzv_endpoint: str | None,
    rdzv_id: str,
    local_addr: str | None,
    show: bool,
    fields: bool,
) -> int | None:
    """Train a model on several ranks of this machine, or join torchrun's.

    Without a run file and key=value fields, trains the demo: a small model on the source text of Python's standard
    library, on two ranks. The same command goes on from the newest checkpoint of a run that was interrupted. -q shows
    no progress, -v the whole prediction first.

    \b
    meshwright train                                        the demo
    meshwright train run.yaml                               a run file
    meshwright train run.yaml layout.dp=4 optimizer.lr=3e-4 fields replaced
    meshwright train model=gpt2-tiny model.layers=6 data.path=book.txt out=runs/book
    meshwright train run.yaml layout=auto                   in the layout that is planned to be fastest here
    meshwright train run.yaml --show                        the resolved run, as YAML
    meshwright train run.yaml --max-restarts 3              a rank that dies is started again, with all others
    meshwright train run.yaml --ranks 8 --nnodes 1:4 --rdzv-endpoint node0:29400     the same on each of 1 to 4 nodes
    torchrun --nproc-per-node 4 -m meshwright train run.yaml

    \b
    Exit codes:
      0    trained to the last step
      1    failed while running; the report names rank and step
      2    wrong input; nothing was started
      3    layout=auto: no layout fits
      130  interrupted, 143 terminated: the step was finished and saved first
    """
    if fields:
        from meshwright.cli.tables import fields as table

        console().print(table())
        return None
    # From here on a rank that is asked to stop remembers it, through the seconds that torch takes to be imported. It
    # does so until its end: there is no later moment at which it had better die of it.
    stop = StopFlag().install() if launched() and not show else None
    if nnodes is not None and not (show or launched()):
        with ended_by_signals():
            meeting = (nnodes, rdzv_endpoint, rdzv_id, local_addr)
            return _launch_node(words, ranks, meeting, Options(quiet, verbose, debug, max_restarts))
    written = read(words)
    run = planned(written, _ranks(ranks), quiet) if written.plans else resolved(written.run(), _ranks(ranks))
    if run is None:
        return ANSWER_NO
    if show:
        from meshwright.spec.load import dump_run

        click.echo(dump_run(run), nl=False)
        return None
    if stop is not None:
        return _be_rank(run, stop, quiet, verbose)
    with ended_by_signals():
        return _launch(run, Options(quiet, verbose, debug, max_restarts))


def _ranks(asked: int | None) -> int | None:
    """The number of ranks: torchrun's or srun's if it started this process, else what was asked for."""
    if not launched():
        return asked
    world = place().world
    if asked not in (None, world):
        raise UserError(f"command line: --ranks {asked}: {world} were started; leave --ranks out")
    return world


def _be_rank(run: RunSpec, stop: StopFlag, quiet: bool, verbose: bool) -> int:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # torchrun's agent would leave its ranks running when it is killed
    from meshwright.train.loop import run_rank
    from meshwright.train.report import LAUNCHED

    if place().rank != 0 or os.environ.get(LAUNCHED):
        return run_rank(run, stop, quiet=quiet)
    with locked(Path(run.out)):  # under torchrun nobody has done this yet
        _tell(run, quiet, verbose)
        return run_rank(run, stop, quiet=quiet)


@dataclass(frozen=True)
class Options:
    """Of a command that starts ranks."""

    quiet: bool
    verbose: bool
    debug: bool
    max_restarts: int


def _launch(run: RunSpec, options: Options) -> int:
    check_ranks(run.layout.world, "or torchrun on more machines; `meshwright predict` needs none")
    check_devices(run.device, run.layout.world)
    folder = Path(run.out)
    check_writable(folder)
    with locked(folder):
        return _launch_in(folder, run, run, run.layout.world, options)


def _launch_node(
    words: tuple[str, ...], ranks: int | None, meeting: tuple[str, str | None, str, str | None], options: Options
) -> int:
    """One node of several. Its ranks settle dp=auto by how many there are of all nodes: it may change at a restart."""
    from meshwright.spec.load import load_run
    from meshwright.train.nodes import Nodes

    nodes = Nodes.of(*meeting)
    if ranks is None:
        raise UserError("command line: --nnodes needs --ranks N: the number of ranks on this node")
    asked = load_run(*split(words))
    if nodes.elastic and asked.layout.dp != "auto":
        raise UserError(
            f"layout: dp={asked.layout.dp} cannot change with the number of nodes; use layout.dp=auto, or --nnodes N"
        )
    for count in range(nodes.least, nodes.most + 1):
        run = asked.model_copy(update={"layout": asked.layout.resolve(ranks * count)})
    check_ranks(ranks, "on each node")
    check_devices(run.device, ranks)
    folder = Path(run.out)
    check_writable(folder)
    # Folders may be shared by all nodes, or not. The node that all others need to meet holds it for all.
    holds = locked(folder, f"the run {nodes.name} at {nodes.endpoint}") if nodes.hosted_here else nullcontext()
    with holds:
        return _launch_in(folder, run, asked, ranks, options, nodes)


def _launch_in(
    folder: Path, run: RunSpec, for_ranks: RunSpec, ranks: int, options: Options, nodes: Nodes | None = None
) -> int:
    """Check, prepare and tell `run`; then start `ranks` ranks, which read `for_ranks`."""
    from meshwright.train.folders import check_resume
    from meshwright.train.text import prepare

    if nodes is None:  # a node that comes back may find that the run has left that step behind; the ranks look
        check_resume(run)
    if not options.quiet:  # a large text takes a while
        say(f"reading {run.data.path}")
    prepare(run.data, run.model.vocab, folder / "data", say=say)
    _tell(run, options.quiet, options.verbose)
    from meshwright.spec.load import dump_run
    from meshwright.train.launch import launch

    # The ranks get the resolved run: it may have come from a pipe, or be edited while they start.
    with tempfile.TemporaryDirectory(prefix="meshwright-run-") as name:
        file = Path(name) / "run.yaml"
        file.write_text(dump_run(for_ranks), encoding="utf-8")
        flags = [flag for flag, on in (("--quiet", options.quiet), ("--debug", options.debug)) if on]
        return launch(
            ["train", str(file), *flags],
            ranks=ranks,
            folder=folder,
            quiet=options.quiet,
            debug=options.debug,
            max_restarts=options.max_restarts,
            nodes=nodes,
        )


def check_devices(device: str, ranks: int) -> None:
    """Raise UserError unless this machine has the devices that `ranks` ranks would take."""
    if device != "cpu":  # the only one that needs no looking, and no torch
        from meshwright.comm.runtime import pick_device

        pick_device(device, local_rank=ranks - 1)


def check_writable(folder: Path) -> None:
    """Raise UserError unless `folder` is one that can be written to, or can be made. Makes nothing."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise UserError(f"out: {folder} cannot be a folder, {there} is a file; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"out: {folder} cannot be written, {there} does not allow it; name a folder that can")


def _tell(run: RunSpec, quiet: bool, verbose: bool) -> None:
    """What will run and what it will cost, on stderr."""
    if quiet:
        return
    from meshwright.cli.tables import prediction, summary
    from meshwright.comm.runtime import pick_device
    from meshwright.predict.report import predict

    foretold = predict(run, device="cpu" if pick_device(run.device, 0).type == "cpu" else "cuda")
    say(*(prediction(run, foretold) if verbose else [summary(run, foretold)]))
