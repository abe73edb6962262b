"""A prediction as tables for people. Sizes are decimal: 1 MB is 10⁶ bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.predict.report import Prediction
from meshwright.spec.layout import AXES, Layout
from meshwright.spec.load import describe
from meshwright.spec.run import RunSpec
from meshwright.spec.traffic import TrafficRow


def size(number: float) -> str:
    """Bytes in words: 999 B, 1.23 MB."""
    return _scaled(number, "B")


def flops(number: float) -> str:
    """FLOPs in words: 1.23 TFLOPs."""
    return _scaled(number, "FLOPs")


def _scaled(number: float, unit: str) -> str:
    value = float(number)
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if not prefix else f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} E{unit}"


def titled(title: str, body: Table) -> Group:
    """A table below an empty line and its title."""
    return Group("", Text(title, style="bold"), body)


def table(*columns: str, figures: int = 0) -> Table:
    """An empty table whose last `figures` columns stand on the right."""
    made = Table(header_style="", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        figure = index >= len(columns) - figures
        made.add_column(column, justify="right" if figure else "left", no_wrap=figure, overflow="fold")
    return made


def layout_words(layout: Layout) -> str:
    """The axes that have more than one rank, outermost first, and the ZeRO stage where there is one."""
    axes = [f"{axis}={layout.size(axis)}" for axis in reversed(layout.order) if layout.size(axis) > 1]
    assert set(layout.order) == set(AXES)
    return (" × ".join(axes) or "dp=1") + (f", zero={layout.zero}" if layout.zero else "")


def summary(run: RunSpec, foretold: Prediction) -> Table:
    """A few lines: what will run, and what it will cost."""
    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    m, layout = run.model, foretold.layout
    rows.add_row("model", f"{m.family}, {m.layers} layers of {m.hidden}, {foretold.parameters.total:,} parameters")
    ranks = f"{layout.world} rank{'s' * (layout.world != 1)}"
    rows.add_row("layout", f"{layout_words(layout)}: {ranks}, {run.precision}")
    rows.add_row(
        "step",
        f"{run.batch.sequences} sequences of {run.data.seq_len}: {foretold.tokens_per_step:,} tokens in "
        f"{foretold.micro_batches} micro-batch{'es' * (foretold.micro_batches != 1)} a rank, "
        f"{flops(foretold.flops.executed_per_step.total)}",
    )
    on_device = foretold.memory.categories | (foretold.memory.host if foretold.memory.device == "cpu" else {})
    parts = sorted(on_device.items(), key=lambda item: -item[1])[:4]
    largest = ", ".join(f"{name} {size(value)}" for name, value in parts)
    rest = foretold.memory.total - sum(value for _, value in parts)
    largest += f", others {size(rest)}" if rest else ""
    if foretold.memory.device != "cpu":
        largest += "".join(
            f"; on the host {name} {size(value)}" for name, value in foretold.memory.host.items() if value
        )
    rows.add_row("memory", f"{size(foretold.memory.total)} a rank: {largest}")
    counts: Counter[tuple[str, str, str]] = Counter()
    for row in foretold.traffic:
        counts[row.key.operation, row.key.axis, row.key.reason] += row.count
    moved = ", ".join(f"{number} {operation} over {axis} ({why})" for (operation, axis, why), number in counts.items())
    rows.add_row("traffic", f"{size(foretold.wire_per_step)} sent a step by a rank: {moved}" if moved else "none")
    if foretold.idle_ranks:
        rows.add_row("idle", _idle(foretold, run))
    return rows


def prediction(run: RunSpec, foretold: Prediction, *, every_unit: bool = False) -> Iterable[RenderableType]:
    """All of a prediction. Repeated blocks share a line unless `every_unit`."""
    yield summary(run, foretold)
    yield titled("Parameters", _parameters(foretold, every_unit))
    at_once = foretold.memory.sequences
    where = "the CPU" if foretold.memory.device == "cpu" else "an accelerator"
    yield titled(
        f"Memory of a rank on {where} when it holds most ({foretold.memory.moment}), "
        f"{at_once} sequence{'s' * (at_once != 1)} at once",
        _memory(foretold),
    )
    yield titled("Traffic of a step", _traffic(foretold.traffic, foretold.wire_per_step))
    yield titled("Computation of a step, all ranks", _flops(foretold))


def _idle(foretold: Prediction, run: RunSpec) -> str:
    ranks = foretold.idle_ranks
    return (
        f"data ranks {ranks[0]} to {ranks[-1]} have no sequence of the batch's {run.batch.sequences}; "
        f"batch.sequences={foretold.layout.data_ranks} or more gives each one"
    )


def _parameters(foretold: Prediction, every_unit: bool) -> Table:
    rows = table("unit", "parameters", figures=1)
    groups: list[tuple[str, str, int]] = []  # first name, last name, parameters of each
    for name, number in foretold.parameters.units.items():
        stem = re.sub(r"\d+$", "", name)
        if groups and not every_unit and stem == re.sub(r"\d+$", "", groups[-1][1]) and number == groups[-1][2]:
            groups[-1] = (groups[-1][0], name, number)
        else:
            groups.append((name, name, number))
    for first, last, number in groups:
        rows.add_row(first if first == last else f"{first} to {last}, each", f"{number:,}")
    rows.add_row("all", f"{foretold.parameters.total:,}", style="bold")
    return rows


def _memory(foretold: Prediction) -> Table:
    memory = foretold.memory
    rows = table("category", "bytes", "", figures=2)
    for name, number in memory.categories.items():
        rows.add_row(name, f"{number:,}", size(number))
    host = [(f"{name}, on the host", f"{number:,}", size(number)) for name, number in memory.host.items()]
    total = ("all", f"{memory.total:,}", size(memory.total))
    if memory.device == "cpu":  # the host's memory is the device's
        for row in host:
            rows.add_row(*row)
        rows.add_row(*total, style="bold")
        return rows
    rows.add_row(*total, style="bold")
    for row in host:
        rows.add_row(*row)
    return rows


def _traffic(traffic: Iterable[TrafficRow], total: float) -> Table:
    rows = table("collective", "axis", "reason", "phase", "count", "payload", "a rank sends", figures=3)
    for row in traffic:
        key = row.key
        phase = key.phase if key.micro is None else f"{key.phase}, micro-batch {key.micro}"
        rows.add_row(key.operation, key.axis, key.reason, phase, f"{row.count}", size(row.payload), size(row.wire))
    rows.add_row("all", "", "", "", "", "", size(total), style="bold")
    return rows


def _flops(foretold: Prediction) -> Table:
    rows = table("", "FLOPs", "", figures=2)
    executed = foretold.flops.executed_per_step
    for name, number in (
        ("forward", executed.forward),
        ("backward", executed.backward),
        ("model (causal attention counts half)", foretold.flops.model_per_step),
    ):
        rows.add_row(name, f"{number:,.0f}", flops(number))
    return rows


def fields() -> Table:
    """Every field of a run file with its default and description."""
    rows = table("field", "default", "takes", "what it is")
    for column in rows.columns[:2]:
        column.no_wrap = True  # what can be searched for and copied; the other two break between words
    for row in describe():
        rows.add_row(row.name, row.default, row.takes, row.description)
    return rows
