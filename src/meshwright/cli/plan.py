"""`meshwright plan`: which layout, will it fit, how long, and why. No torch, no processes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.common import console, read, say
from meshwright.spec.errors import UserError
from meshwright.spec.exits import ANSWER_NO, INTERRUPTED, OK
from meshwright.spec.quantities import COUNT, whole

if TYPE_CHECKING:
    from meshwright.predict.plan.answer import Choice, Plan
    from meshwright.predict.plan.search import Progress
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.run import RunSpec

TRAINERS = ("megatron", "torchtitan", "deepspeed", "nanotron")
LONGEST = 8192  # tokens of a sequence where nobody says; many models take far more than they are trained on
WAIT = 1.0  # seconds before progress is shown


@click.command("plan")
@click.argument("words", nargs=-1, metavar="[RUN.yaml] [key=value]...")
@click.option("--model", metavar="NAME|FILE", help="A preset, or a config.json; else the run file's.")
@click.option("--cluster", required=True, metavar="8x8xh100|FILE", help="Nodes × devices × kind, or a cluster file.")
@click.option("--seq", metavar="N", help="Tokens of a sequence; else the run file's, or the model's longest to 8Ki.")
@click.option("--batch", metavar="N", help="Sequences of a step.")
@click.option("--batch-tokens", metavar="N", help="Tokens of a step instead: 4M, 4Mi.")
@click.option("--tokens", metavar="N", help="Tokens to train on in all, to tell the days: 15T.")
@click.option("--top", default="10", show_default=True, metavar="N", help="Layouts to show.")
@click.option("--with", "given", metavar="FIELDS", help="Only layouts that have these: tp=8,zero=1.")
@click.option("--explain", metavar="FIELDS", help="All of the best layout that has these, and why it is not first.")
@click.option(
    "--emit", metavar="FILE.yaml|TRAINER", help=f"Write the winner as a run file, or for {', '.join(TRAINERS)}."
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures for a program.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def command(
    words: tuple[str, ...],
    model: str | None,
    cluster: str,
    seq: str | None,
    batch: str | None,
    batch_tokens: str | None,
    tokens: str | None,
    top: str,
    given: str | None,
    explain: str | None,
    emit: str | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> int:
    """Tell which layout of a model over a cluster's devices is fastest, whether it fits, how long it takes, and why.

    All layouts are tried; those that fit are ordered by the simulated time of a step. Sizes are read as people write
    them: 4M is 4·10⁶, 4Mi is 4·2²⁰. Ctrl-C ends a long search with the best so far.

    \b
    meshwright plan run.yaml --cluster 8xa100 --with pp=1
    meshwright plan --model llama3-70b --cluster 8x8xh100 --seq 8192 --batch-tokens 4M
    meshwright plan --model my/config.json --cluster cluster.yaml --batch 1536 --tokens 15T --top 20 --json
    meshwright plan --model llama2-7b --cluster 8xa100 --batch 64 --explain tp=8
    meshwright plan --model llama2-7b --cluster 8xa100 --batch 64 --emit run.yaml

    Exit codes: 0 done, 2 wrong input, 3 nothing fits, 130 interrupted.
    """
    from meshwright.spec.clusterfile import load_cluster

    on = load_cluster(cluster)
    run = _run(words, on, model, seq, batch, batch_tokens)
    wanted = None if tokens is None else whole(tokens, COUNT)
    only, asked = _fields(given, "--with", run, on), _fields(explain, "--explain", run, on)
    writes = _writer(emit)
    from meshwright.predict.plan.answer import plan

    with _progress(quiet or as_json) as progress:
        found = plan(run, on, top=_count(top), only=only, progress=progress)
        explained = _explained(run, on, only | asked, progress) if explain is not None else None
    if as_json:
        data = found.to_dict(wanted)
        if explained is not None:
            data["explained"] = explained.to_dict(wanted)
        click.echo(json.dumps(data, indent=2))
    elif writes is None or emit in ("", None) or emit.endswith((".yaml", ".yml")):
        _show(found, explained, wanted)
    if writes is not None and (found.choices or explained is not None):
        writes(found, explained)
    return _code(found)


def _code(found: Plan) -> int:
    if found.result.cut_short:
        return INTERRUPTED
    return OK if found.choices else ANSWER_NO


# -- what is asked ----------------------------------------------------------------------------------------------------


def _run(
    words: tuple[str, ...], on: Cluster, model: str | None, seq: str | None, batch: str | None, batch_tokens: str | None
) -> RunSpec:
    """The run that is planned; its layout and micro-batches are what is looked for."""
    for word in words:
        if word.startswith(("layout.", "layout=", "batch.micro=")):
            name = word.removeprefix("layout.").removeprefix("batch.")
            raise UserError(f"command line: {word}: the layout is what is looked for; to hold a field, --with {name}")
    if batch is not None and batch_tokens is not None:
        raise UserError("command line: --batch and --batch-tokens are two words for one thing; give one")
    options = [f"model={model}"] if model is not None else []
    options += [f"data.seq_len={whole(seq, COUNT)}"] if seq is not None else []
    options += [f"batch.sequences={whole(batch, COUNT)}"] if batch is not None else []
    written = read((*words, *options))
    run = written.run()
    changed: dict[str, Any] = {}
    if "precision" not in run.model_fields_set and on.device.kind == "gpu":
        changed["precision"] = "bf16"
    data, sequences = run.data, run.batch.sequences
    if "seq_len" not in data.model_fields_set:
        data = data.model_copy(update={"seq_len": min(run.model.max_seq, LONGEST)})
    if batch_tokens is not None:
        sequences = _sequences(batch_tokens, data.seq_len)
    elif "sequences" not in run.batch.model_fields_set:
        raise UserError("command line: how large is a step? --batch 512 (sequences), or --batch-tokens 4M")
    from meshwright.spec.layout import Layout

    changed |= {"data": data, "layout": Layout(dp=1)}
    changed["batch"] = run.batch.model_copy(update={"sequences": sequences, "micro": 1})
    return run.model_copy(update=changed)


def _sequences(text: str, seq: int) -> int:
    """The whole number of sequences that is nearest to so many tokens."""
    tokens = whole(text, COUNT)
    found = round(tokens / seq)
    if not found:
        raise UserError(
            f"command line: --batch-tokens {text}: less than half a sequence of {seq} tokens; use {seq} or more"
        )
    return found


def _count(text: str) -> int:
    return min(whole(text, COUNT), 1000)


def _fields(text: str | None, option: str, run: RunSpec, on: Cluster) -> dict[str, Any]:
    """Fields that a layout must have: tp=8,zero=1."""
    if text is None:
        return {}
    from meshwright.predict.plan.asked import fields

    return fields(text, option, run, on)


def _explained(run: RunSpec, on: Cluster, only: dict[str, Any], progress: Progress | None) -> Choice | None:
    """The best layout that has these fields, whether it fits or not."""
    from meshwright.predict.plan.answer import best_with

    return best_with(run, on, only, progress)


# -- what is shown ----------------------------------------------------------------------------------------------------


def _show(found: Plan, explained: Choice | None, tokens: int | None) -> None:
    from meshwright.cli.plans import explanation, nothing_fits, plans

    out = console()
    if found.choices:
        for part in plans(found, tokens):
            out.print(part)
    else:
        for part in nothing_fits(found, tokens):
            out.print(part)
    if explained is not None:
        for part in explanation(explained, found):
            out.print(part)
    if found.result.cut_short:
        say("meshwright: interrupted; the best so far, and there may be better ones")


def _writer(emit: str | None) -> Any:
    """What writes the winner, or the explained layout."""
    if emit is None:
        return None
    if emit.endswith((".yaml", ".yml")):
        return lambda found, explained: _to_file(Path(emit), found, explained)
    if emit not in TRAINERS:
        raise UserError(f"command line: --emit {emit}: name a file that ends in .yaml, or {', '.join(TRAINERS)}")
    from meshwright.convert.trainers import TRAINERS as WRITERS

    return lambda found, explained: click.echo(WRITERS[emit](_chosen(found, explained)), nl=False)


def _chosen(found: Plan, explained: Choice | None) -> RunSpec:
    from meshwright.predict.plan.space import run_of

    if explained is not None:
        return run_of(found.run, explained.layout, explained.micro)
    return found.chosen


def _to_file(path: Path, found: Plan, explained: Choice | None) -> None:
    from meshwright.spec.load import dump_run

    try:
        path.write_text(dump_run(_chosen(found, explained)))
    except OSError as error:
        raise UserError(f"command line: --emit {path}: cannot be written: {error.strerror}") from None
    say(f"meshwright: {path} has it as a run: meshwright train {path}")


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
    """A line on a terminal's stderr, once a search has taken a while."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    begun = told = time.monotonic()

    def show(part: float, layouts: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - begun > WAIT and now - told > 0.1:
            told = now
            click.echo(f"\r{part:4.0%} searched, {layouts:,} layouts; Ctrl-C for the best so far", err=True, nl=False)

    yield show
    if told > begun:
        click.echo("\r" + " " * 72 + "\r", err=True, nl=False)
