"""`meshwright verify`: the proof that a layout computes what one device computes, as a table and an exit code."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING

import click

from meshwright.cli.common import check_ranks, console, read, resolved, run_options, say
from meshwright.comm.place import launched
from meshwright.spec.errors import UserError
from meshwright.spec.exits import ANSWER_NO, OK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from meshwright.spec.run import RunSpec
    from meshwright.verify.compare import Comparison
    from meshwright.verify.report import Check, Report

SHOWN = 10
MEASURES = (
    "difference: ‖a − b‖ / ‖b‖, a the ranks' and b the reference's tensor; ratio: ‖a‖ / ‖b‖, 2 where all is doubled; "
    "cosine: of the angle between them, 1 where only the scale differs"
)


@click.command("verify")
@run_options
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, metavar="K", help="Steps compared.")
@click.option(
    "--precision",
    type=click.Choice(["float64", "fp32", "bf16", "fp16"]),
    help="What is computed in, whatever the run's own; float64, the default, tells a mistake from rounding.",
)
@click.option("--as-is", is_flag=True, help="The run's own model and batch size, not small ones of the same family.")
@click.option("--json", "as_json", is_flag=True, help="Print all that was compared, for a program.")
def command(
    words: tuple[str, ...], ranks: int | None, quiet: bool, verbose: bool, debug: bool,
    steps: int, precision: str | None, as_is: bool, as_json: bool,
) -> int:  # fmt: skip
    """Prove that a layout computes what one device computes, and costs what was predicted.

    Starts the layout's ranks and one plain model, takes K steps of each, and compares loss, gradients, parameters and
    Adam moments tensor by tensor, worst first; then what was moved and held with the prediction. The run's data is not
    read: tokens are random, and of their targets some are left out, unequally, which real text would hardly do. With
    -v every tensor is shown, with -q only the verdict.

    \b
    meshwright verify                             the demo's layout
    meshwright verify run.yaml layout.dp=4        one field replaced
    meshwright verify model=gpt2 --as-is --steps 1
    meshwright verify run.yaml --json | jq .findings

    \b
    Exit codes:
      0  equal, and as predicted
      1  failed while running
      2  wrong input
      3  a difference was found; it is named
      130, 143  interrupted, terminated
    """
    run, compared = _run(words, precision)
    run = resolved(run, ranks)
    if launched():
        raise UserError("verify starts its own ranks; call it without torchrun")
    check_ranks(run.layout.world, "a smaller layout of the same axes proves as much")
    what = "the run's own model" if as_is else f"a small {run.model.family} model"
    ranked = f"{run.layout.world} rank{'s' * (run.layout.world > 1)}"
    told = f"comparing {steps} step{'s' * (steps > 1)} of {what} on {ranked} with one device, {compared}"
    from meshwright.verify.run import Unfinished, verify

    def begins() -> None:
        if not quiet:
            say(told)

    try:
        report = verify(run, steps=steps, precision=run.precision, as_is=as_is, debug=debug, begins=begins)
    except Unfinished as end:
        say(f"meshwright: {end}")
        return end.code
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        out = console(sys.stdout)
        for part in [] if quiet else tables(report, SHOWN if not verbose else None):
            out.print(part)
        out.print(verdict(report), soft_wrap=True)
    return OK if report.passed else ANSWER_NO


def _run(words: tuple[str, ...], precision: str | None) -> tuple[RunSpec, str]:
    """The run in the precision that is compared, and what is compared of its own dtypes, in words."""
    written = read(words)
    if precision is not None:
        # The dtypes beside it may go with this precision and not with the one that the run names or has by default.
        with contextlib.suppress(UserError):
            run = written.run(precision=precision)
            return run, f"in {_dtypes(run)}, on random tokens"
    own = written.run()
    wanted = precision or "float64"
    left_out = own.dtypes().keys() - own.dtypes(wanted).keys()
    run = written.run(precision=wanted, **dict.fromkeys(left_out, "auto"))
    words_ = f"in {_dtypes(run)}, on random tokens"
    if left_out or (own.precision != wanted and own.precision != "fp32"):
        words_ += f"; the run's own precision={_dtypes(own)} is not compared, --precision {own.precision} does"
    return run, words_


def _dtypes(run: RunSpec) -> str:
    """ "bf16", "bf16 with grad_dtype=bf16 and reduce_dtype=bf16"."""
    beside = " and ".join(f"{name}={dtype}" for name, dtype in run.dtypes().items())
    return f"{run.precision} with {beside}" if beside else run.precision


def verdict(report: Report) -> str:
    """What was found, in a few lines."""
    from meshwright.verify.report import ACTIVATION_BOUND

    steps = f"{report.steps} step{'s' * (report.steps > 1)}"
    compared = f"{len(report.tensors)} tensors over {steps}, worst difference {report.worst:.1e}"
    if report.passed:
        rounded = any(c.expected != c.found for c in report.activations)
        near = f", activations within {ACTIVATION_BOUND:.0%}" if rounded else ""
        if not report.activations:
            near = "; what compiled blocks keep is not predicted"
        return f"equal: {compared} ({_most(report)}); traffic and memory as predicted{near}"
    return "\n".join([f"different: {compared} ({_most(report)})", *(f"  {line}" for line in report.findings)])


def _most(report: Report) -> str:
    """The bounds, in words."""
    wider = any(c.bound > report.bound for c in report.tensors)
    return f"at most {report.bound:.0e}" + ", or twice what one device in this precision is off by" * wider


def tables(report: Report, most: int | None) -> Iterable[RenderableType]:
    """The comparison: the `most` worst tensors (None: all), then the figures."""
    from rich.text import Text

    from meshwright.cli.tables import titled

    shown = report.tensors[:most]
    hidden = len(report.tensors) - len(shown)
    yield titled(f"Tensors, worst first{f' ({hidden} better ones not shown; -v)' * bool(hidden)}", _tensors(shown))
    yield Text(MEASURES, style="dim")
    for title, checks, exact in (
        ("Scalars", report.scalars, False),
        ("Traffic of a step", report.traffic, True),
        ("Memory held", [*report.states, *report.activations], True),
    ):
        if checks:
            yield titled(title, _checks(checks, exact))
    yield ""


def _tensors(comparisons: Sequence[Comparison]) -> Table:
    from meshwright.cli.tables import table

    rows = table("kind", "tensor", "", "difference", "ratio", "cosine", "step", "rank", figures=5)
    for c in comparisons:
        rows.add_row(
            c.kind, c.name, _mark(c.passed, c.since), f"{c.difference:.1e}", f"{c.ratio:.12g}", f"{c.cosine:.12g}",
            f"{c.step}", f"{c.rank}", style=None if c.passed else "red",
        )  # fmt: skip
    return rows


def _checks(checks: Sequence[Check], exact: bool) -> Table:
    from meshwright.cli.tables import table

    rows = table("what", "", "expected", "found", "rank", figures=3)
    for c in checks:
        figures = [f"{value:,.0f}" if exact else f"{value:.12g}" for value in (c.expected, c.found)]
        rows.add_row(c.what, _mark(c.passed), *figures, f"{c.rank}", style=None if c.passed else "red")
    return rows


def _mark(passed: bool, since: int | None = None) -> str:
    return "" if passed else "DIFFERS" if since is None else f"DIFFERS from step {since}"
