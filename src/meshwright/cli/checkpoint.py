"""`meshwright checkpoint`: what is in a checkpoint, whether it is whole, and to and from Hugging Face folders."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.common import console, say
from meshwright.spec.errors import UserError
from meshwright.spec.exits import ANSWER_NO, OK

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshwright.convert.checking import Verdict
    from meshwright.convert.contents import Contents

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_EVERY = 5.0  # seconds between lines of progress where there is no terminal

_PATH = click.argument("path", type=click.Path(path_type=Path))
_DEBUG = click.option("--debug", is_flag=True, help="Show tracebacks.")
_QUIET = click.option("-q", "--quiet", is_flag=True, help="Show no progress.")


@click.group("checkpoint")
def command() -> None:
    """Look into checkpoints, check them, and carry them from and to Hugging Face folders.

    PATH is a run's out folder or its checkpoints folder, which mean the newest checkpoint, or the folder of one.

    \b
    meshwright checkpoint inspect runs/demo                      what is in the newest
    meshwright checkpoint verify runs/demo                       whether every byte of it is as it was written
    meshwright checkpoint export runs/demo exported              for transformers and all that reads its folders
    meshwright checkpoint import Qwen3-0.6B runs/tuned           so that a run begins with these weights

    Exit codes: 0 done, 1 damaged or failed, 2 wrong input, 3 verify found damage.
    """


@command.command("inspect", short_help="What is in a checkpoint.")
@_PATH
@click.option("--json", "as_json", is_flag=True, help="Print everything for a program.")
@click.option("-v", "--verbose", is_flag=True, help="Give every tensor its line, and list the files.")
@_DEBUG
def inspect(path: Path, as_json: bool, verbose: bool, debug: bool) -> None:
    """Tell what is in the checkpoint at PATH: the run that wrote it, and its tensors with dtype, shape and boxes.

    Reads the manifest only. Tensors of repeated blocks share a line; -v shows them all.

    Exit codes: 0 done, 1 the manifest is missing or damaged, 2 no checkpoint there.
    """
    from meshwright.convert.contents import inspect

    found = inspect(path)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
        return
    out = console()
    for part in _tables(found, verbose):
        out.print(part)


@command.command("verify", short_help="Whether every byte of it is as it was written.")
@_PATH
@_QUIET
@_DEBUG
def verify(path: Path, quiet: bool, debug: bool) -> int:
    """Read the whole checkpoint at PATH and hold every block against its checksum.

    Also: that its tensors' boxes leave no gap and do not overlap, and that each file's header names what is in it.

    Exit codes: 0 whole, 3 damaged (what is damaged is listed), 2 no checkpoint there.
    """
    from meshwright.convert.checking import check

    with _progress("read", quiet) as advance:
        verdict = check(path, advance)
    click.echo(_sentence(verdict))
    return ANSWER_NO if verdict.findings else OK


@command.command("export", short_help="Its weights as a Hugging Face folder.")
@_PATH
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16", "float64"]), help="Of the weights; else the run's.")
@click.option("--shard-size", default="5GB", show_default=True, metavar="SIZE", help="Most bytes of tensors in a file.")
@click.option("--tokenizer", metavar="FILE", help="A tokenizer.json, or none; else the run's.")
@_QUIET
@_DEBUG
def export(
    path: Path, out: Path, dtype: str | None, shard_size: str, tokenizer: str | None, quiet: bool, debug: bool
) -> None:
    """Write the weights of the checkpoint at PATH as a Hugging Face folder OUT, whatever layout saved them.

    OUT gets safetensors files, config.json, and the tokenizer's files where the run has a tokenizer.json. It must not
    be there yet, and is there only when it is whole.

    \b
    meshwright checkpoint export runs/demo exported
    meshwright checkpoint export runs/big/checkpoints/step-00001000 exported --dtype bf16 --shard-size 2GB

    Exit codes: 0 done, 1 damaged or failed while writing, 2 wrong input.
    """
    most = _size(shard_size)
    from meshwright.cli.tables import size
    from meshwright.convert.exporting import export

    with _progress("wrote", quiet) as advance:
        done = export(path, out, dtype=dtype, shard_size=most, tokenizer=tokenizer, advance=advance)
    click.echo(
        f"step {done.step} of {done.source}: {done.parameters:,} parameters in {done.dtype}, {size(done.bytes)} in "
        f"{_count(done.files, 'file')}, {f'tokenizer {done.tokenizer}' if done.tokenizer else 'no tokenizer'}"
    )
    click.echo(f"exported {done.where}")


@command.command("import", short_help="A Hugging Face folder's weights as step 0 of a run.")
@click.argument("folder", metavar="HF_FOLDER", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("fields", nargs=-1, metavar="[key=value]...")
@_QUIET
@_DEBUG
def import_(folder: Path, out: Path, fields: tuple[str, ...], quiet: bool, debug: bool) -> None:
    """Make the weights in HF_FOLDER the checkpoint of step 0 of a run in OUT, which `meshwright train` goes on from.

    HF_FOLDER has config.json and model.safetensors, or model.safetensors.index.json and the files it names; pickled
    weights are refused. model.NAME=… replaces fields of the model, precision=… what the weights' dtype says.

    \b
    meshwright checkpoint import Qwen3-0.6B runs/tuned
    meshwright checkpoint import gpt2 runs/tuned model.attn_dropout=0

    Exit codes: 0 done, 1 failed while reading or writing, 2 wrong input.
    """
    from meshwright.convert.importing import import_folder

    with _progress("wrote", quiet) as advance:
        done = import_folder(folder, out, fields, advance)
    if done.passed_over:
        say(f"passed over {_count(len(done.passed_over), 'tensor')} that config.json implies, as {done.passed_over[0]}")
    click.echo(f"{done.parameters:,} parameters of {folder} are step 0 of {done.where.parent}; train them with")
    click.echo(f"  meshwright train {' '.join(map(shlex.quote, done.fields))} data.path=… optimizer.lr=…")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _size(text: str) -> int:
    """Bytes of "5GB", "500 MB", "2GiB". Raises UserError."""
    parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", text.strip())
    if not parts or parts[2].upper() not in _UNITS or not (number := int(float(parts[1]) * _UNITS[parts[2].upper()])):
        raise UserError(f"command line: --shard-size {text}: not a size; write, for example, 5GB or 512MiB")
    return number


@contextlib.contextmanager
def _progress(verb: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """What to call with bytes done and of all: on a terminal a live line, elsewhere a line every few seconds."""
    from meshwright.cli.tables import size

    live, told = sys.stderr.isatty(), time.monotonic()

    def advance(done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if quiet or now - told < (0.2 if live else _EVERY):
            return
        told = now
        with contextlib.suppress(OSError):
            line = f"{verb} {size(done)} of {size(total)}"
            click.echo(f"\r\x1b[K{line}" if live else line, err=True, nl=not live)

    try:
        yield advance
    finally:
        if live and not quiet:
            with contextlib.suppress(OSError):
                click.echo("\r\x1b[K", err=True, nl=False)


def _sentence(verdict: Verdict) -> str:
    from meshwright.cli.tables import size

    if verdict.findings:
        number = f"{len(verdict.findings)} finding{'s' * (len(verdict.findings) != 1)}"
        return "\n".join([f"damaged: {verdict.path}, {number}", *(f"  {line}" for line in verdict.findings)])
    read = f"{size(verdict.bytes)} in {_count(verdict.files, 'file')}"
    return f"whole: {verdict.path}, {_count(verdict.tensors, 'tensor')}, {read}, every checksum as written"


def _tables(found: Contents, verbose: bool) -> Iterable[RenderableType]:
    from rich.table import Table

    from meshwright.cli.tables import size, table, titled
    from meshwright.convert.contents import KINDS

    run, rows = found.run, Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    model = run["model"]
    rows.add_row("checkpoint", str(found.path))
    rows.add_row("step", f"{found.step:,} of {run['steps']:,}, {found.meta['updates']:,} updates{_tokens(found.meta)}")
    rows.add_row(
        "model", f"{model['family']}, {model['layers']} layers of {model['hidden']}, {found.parameters:,} parameters"
    )
    rows.add_row("run", _run_words(run))
    if "imported" in found.meta:
        rows.add_row("imported", f"from {found.meta['imported']}")
    held = ", ".join(f"{KINDS.get(kind, kind)} {size(number)}" for kind, number in found.of_kind.items())
    rows.add_row("tensors", f"{_count(len(found.tensors), 'tensor')}: {held}")
    rows.add_row("files", f"{_count(len(found.files), 'file')}, {size(sum(found.files.values()))}")
    yield rows
    tensors = table("tensor", "kinds", "dtype", "shape", "boxes", "files", "bytes", figures=4)
    for row in _tensor_rows(found, verbose):
        tensors.add_row(*row)
    yield titled("Tensors", tensors)
    if verbose:
        files = table("file", "bytes", figures=1)
        for name, number in found.files.items():
            files.add_row(name, f"{number:,}")
        yield titled("Files", files)


def _tokens(meta: dict[str, Any]) -> str:
    return f", {meta['tokens']:,} tokens" if "tokens" in meta else ""


def _run_words(run: dict[str, Any]) -> str:
    layout = run["layout"]
    axes = [f"{axis}={layout[axis]}" for axis in ("pp", "dp", "cp", "tp", "ep") if layout.get(axis, 1) != 1]
    zero = f", zero={layout['zero']}" if layout.get("zero") else ""
    return f"{' × '.join(axes) or 'dp=1'}{zero}, {run['precision']}, data {run['data']['path']}, out {run['out']}"


def _tensor_rows(found: Contents, verbose: bool) -> Iterator[tuple[str, ...]]:
    """A row for each public name; names that differ in a block's number, and nothing else, share one."""
    names: dict[str, dict[str, Any]] = {}
    for full, tensor in found.tensors.items():
        kind, _, name = full.partition("/")
        names.setdefault(name, {})[kind] = tensor
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, kinds in names.items():
        stem = name if verbose else re.sub(r"\.\d+\.", ".*.", name)
        like = tuple((kind, t.dtype, t.shape) for kind, t in kinds.items())
        groups.setdefault((stem, like), []).append(name)
    for (stem, like), members in groups.items():
        tensors = [tensor for name in members for tensor in names[name].values()]
        counts = [_range([getattr(t, what) for t in tensors]) for what in ("boxes", "files")]
        yield (
            stem if len(members) == 1 else f"{stem} ({len(members)})",
            ", ".join(kind for kind, _, _ in like),
            ", ".join(dict.fromkeys(dtype for _, dtype, _ in like)),
            " × ".join(map(str, like[0][2])) or "one",
            *counts,
            f"{sum(t.bytes for t in tensors):,}",
        )


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"
