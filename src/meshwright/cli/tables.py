"""A prediction as tables for people. Sizes are decimal: 1 MB is 10⁶ bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.cli.pipeline import pipeline_table, pipeline_words, schedule_words
from meshwright.cli.printing import flops, size, table, titled
from meshwright.predict.modes import Fit, Mode
from meshwright.predict.report import Prediction
from meshwright.predict.states import shards
from meshwright.spec.layout import AXES, Layout
from meshwright.spec.load import describe
from meshwright.spec.run import RunSpec
from meshwright.spec.traffic import TrafficRow

MOST_ROWS = 24  # of traffic that a table shows; where there would be more, micro-batches share theirs
FAR = 4  # times the sequence length: a model that takes so much longer ones is mostly meant for them


def layout_words(layout: Layout) -> str:
    """The axes that have more than one rank, outermost first; the schedule, ZeRO stage and recompute where there is
    one; and what was asked for beside them."""
    axes = [f"{axis}={layout.size(axis)}" for axis in reversed(layout.order) if layout.size(axis) > 1]
    assert set(layout.order) == set(AXES)
    parts = [" × ".join(axes) or "dp=1"]
    parts += ["sp"] if layout.sp else []
    parts += [schedule_words(layout)] if layout.pp > 1 else []
    parts += [f"{_method(layout)} in {layout.cp_order} parts"] if layout.cp > 1 else []
    parts += [f"zero={layout.zero}"] if layout.zero else []
    asked = {name: getattr(layout, name) for name in ("zero_shard", "zero_gather", "zero_ahead")}
    asked |= {"zero_join": layout.zero_join} if layout.zero < 2 else {}
    parts += [f"{name}={value}" for name, value in asked.items() if value != Layout.model_fields[name].default]
    parts += [f"recompute {recompute_words(layout)}"] if layout.recompute != "none" else []
    parts += [f"offload={layout.offload}"] if layout.offload != "none" else []
    return ", ".join(parts)


def _method(layout: Layout) -> str:
    """ "ring", "usp of 2": how attention goes over the context ranks."""
    return f"usp of {layout.cp_ulysses}" if layout.cp_method == "usp" else layout.cp_method


def recompute_words(layout: Layout) -> str:
    """ "none", "full", "full every sqrt", "selective keep linear attention"."""
    if layout.recompute == "full":
        return "full" if layout.recompute_every == 1 else f"full every {layout.recompute_every}"
    if layout.recompute == "selective":
        return f"selective keep {' '.join(layout.recompute_keep)}"
    return layout.recompute


def summary(run: RunSpec, foretold: Prediction, fit: Fit | None = None) -> Table:
    """A few lines: what will run, and what it will cost; and whether it fits, where a capacity is given."""
    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    m, layout = run.model, foretold.layout
    rows.add_row("model", f"{m.family}, {m.layers} layers of {m.hidden}, {foretold.parameters.total:,} parameters")
    ranks = f"{layout.world} rank{'s' * (layout.world != 1)}"
    dtypes = ", ".join([run.precision, *(f"{name}={dtype}" for name, dtype in run.dtypes().items())])
    rows.add_row("layout", f"{layout_words(layout)}: {ranks}, {dtypes}")
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
    whose = "a rank" if layout.pp == 1 else f"on rank {foretold.memory.rank}, which holds most"
    rows.add_row("memory", f"{size(foretold.memory.total)} {whose}: {largest}")
    if fit is not None:
        rows.add_row("fits", _fits(fit, foretold.memory.total))
    counts: Counter[tuple[str, str, str]] = Counter()
    for row in foretold.traffic:
        strategy, _, _ = row.key.reason.partition(".")
        many = strategy in ("tp", "cp") or row.key.operation in ("send", "recv")
        reason = f"{strategy}.*" if many else row.key.reason
        counts[row.key.operation, row.key.axis, reason] += row.count
    moved = ", ".join(f"{number} {operation} over {axis} ({why})" for (operation, axis, why), number in counts.items())
    sender = "a rank" if layout.pp == 1 else "rank 0"
    rows.add_row("traffic", f"{size(foretold.wire_per_step)} sent a step by {sender}: {moved}" if moved else "none")
    if foretold.pipeline is not None:
        rows.add_row("pipeline", pipeline_words(foretold.pipeline))
    if foretold.idle_ranks:
        rows.add_row("idle", _idle(foretold, run))
    for note in _notes(run, layout):
        rows.add_row("note", note)
    return rows


def _notes(run: RunSpec, layout: Layout) -> Iterable[str]:
    """What was perhaps not meant, and what the figures do not know."""
    seq, most = run.data.seq_len, run.model.max_seq
    if "model" in run.model_fields_set and "seq_len" not in run.data.model_fields_set and most >= FAR * seq:
        yield f"data.seq_len={seq} is the default, for the demo; this model takes sequences of up to {most:,}"
    if layout.zero and shards(layout) == 1:
        why = "there is 1 data rank" if layout.state_ranks == 1 else "zero_shard=1 leaves each data rank by itself"
        yield f"layout.zero={layout.zero} shards nothing: {why}"
    if run.data.packing == "documents":
        most = "FLOPs are" if layout.cp == 1 else "FLOPs, also those executed, are"
        yield f"data.packing=documents: model {most} those of sequences of one document each, the most they can be"
    if run.compile != "none":
        yield f"compile={run.compile}: the compiler chooses what a block keeps; activations are those of plain blocks"


def prediction(
    run: RunSpec, foretold: Prediction, fit: Fit | None = None, *, every_unit: bool = False
) -> Iterable[RenderableType]:
    """All of a prediction. Repeated blocks, and micro-batches where they are many, share a line unless `every_unit`."""
    yield summary(run, foretold, fit)
    yield titled("Parameters", _parameters(foretold, every_unit))
    if foretold.pipeline is not None:
        yield pipeline_table(foretold.pipeline)
    layout, at_once = foretold.layout, foretold.memory.sequences
    where = "the CPU" if foretold.memory.device == "cpu" else "an accelerator"
    whose = "a rank" if layout.pp == 1 else f"rank {foretold.memory.rank}"
    yield titled(
        f"Memory of {whose} on {where} when it holds most ({foretold.memory.moment}), "
        f"{at_once} sequence{'s' * (at_once != 1)} at once",
        _memory(foretold),
    )
    # Without tensor, context and pipeline ranks all send the same.
    of = "" if layout.tp == layout.cp == layout.pp == 1 else " on rank 0"
    yield titled(f"Traffic of a step{of}", _traffic(foretold.traffic, foretold.wire_per_step, every_micro=every_unit))
    yield titled("Computation of a step, all ranks", _flops(foretold))


def recompute_modes(run: RunSpec, compared: Sequence[Mode]) -> Group:
    """The ways to recompute side by side, with what fits where a capacity was given."""
    capacity = compared[0].fit.capacity if compared[0].fit is not None else None
    columns = ["recompute", "activations kept", "peak", "states", "computed again"]
    columns += ["fits", "batch.micro up to"] if capacity is not None else []
    rows = table(*columns, figures=len(columns) - 1)
    for mode in compared:
        words = recompute_words(mode.layout)
        words += f" = {mode.every}" if mode.layout.recompute_every == "sqrt" else ""
        cells = [size(mode.kept), size(mode.peak), size(mode.states), f"{mode.recompute_share:.1%}"]
        if mode.fit is not None:
            cells += ["yes" if mode.fit.fits else "no", f"{mode.fit.largest_micro or 'none'}"]
        rows.add_row(words + (" (this run)" if mode.this_run else ""), *cells)
    title = f"Recompute, on the rank that holds most, batch.micro={run.batch.micro}"
    notes = ["computed again: part of forward and backward, where the whole forward would be 33.3%"]
    if capacity is not None:
        title += f", of {size(capacity)}"
        notes.append("batch.micro up to: what fits, with batch.sequences as large as that needs")
    return Group(titled(title, rows), *(Text(note, style="dim") for note in notes))


def _fits(fit: Fit, held: int) -> str:
    what = "yes" if fit.fits else "no"
    spare = size(abs(fit.capacity - held))
    what += f": {spare} to spare of {size(fit.capacity)}" if fit.fits else f": {spare} more than {size(fit.capacity)}"
    most = f"batch.micro up to {fit.largest_micro}" if fit.largest_micro else "no batch.micro does"
    return f"{what}; {most}"


def _idle(foretold: Prediction, run: RunSpec) -> str:
    ranks = foretold.idle_ranks
    return (
        f"data ranks {ranks[0]} to {ranks[-1]} have no sequence of the batch's {run.batch.sequences}; "
        f"batch.sequences={foretold.layout.data_ranks} or more gives each one"
    )


def _parameters(foretold: Prediction, every_unit: bool) -> Table:
    tp = foretold.layout.tp
    rows = table("unit", "parameters", *(["a rank holds"] if tp > 1 else []), figures=1 + (tp > 1))
    local = foretold.parameters.local
    groups: list[tuple[str, str, int]] = []  # first name, last name, parameters of each
    for name, number in foretold.parameters.units.items():
        stem = re.sub(r"\d+", "", name)
        if groups and not every_unit and stem == re.sub(r"\d+", "", groups[-1][1]) and number == groups[-1][2]:
            groups[-1] = (groups[-1][0], name, number)
        else:
            groups.append((name, name, number))
    for first, last, number in groups:
        held = [f"{local[first]:,}"] if tp > 1 else []
        rows.add_row(first if first == last else f"{first} to {last}, each", f"{number:,}", *held)
    held = [f"{sum(local.values()):,}" if foretold.pipeline is None else ""] if tp > 1 else []
    rows.add_row("all", f"{foretold.parameters.total:,}", *held, style="bold")
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


def _traffic(traffic: Sequence[TrafficRow], total: float, *, every_micro: bool = False) -> Table:
    rows = table("collective", "axis", "reason", "phase", "count", "payload", "a rank sends", figures=3)
    share = len(traffic) > MOST_ROWS and not every_micro
    alike: dict[tuple[object, ...], list[TrafficRow]] = {}
    for row in traffic:
        key = row.key
        kind = (key.operation, key.axis, key.reason, key.phase)
        alike.setdefault(kind if share else (kind, key.micro), []).append(row)
    for members in alike.values():
        key = members[0].key
        phase = f"{key.phase}{_micros([row.key.micro for row in members])}"
        count, payload, wire = (sum(getattr(row, of) for row in members) for of in ("count", "payload", "wire"))
        rows.add_row(key.operation, key.axis, key.reason, phase, f"{count}", size(payload), size(wire))
    rows.add_row("all", "", "", "", "", "", size(total), style="bold")
    return rows


def _micros(micros: Sequence[int | None]) -> str:
    """ ", micro-batch 3", ", micro-batches 0 to 7"; nothing for what happens once a step."""
    first, last = micros[0], micros[-1]
    if first is None:
        return ""
    return f", micro-batch {first}" if first == last else f", micro-batches {first} to {last}"


def _flops(foretold: Prediction) -> Table:
    rows = table("", "FLOPs", "", figures=2)
    executed = foretold.flops.executed_per_step
    computed_again = f"computed again in backward ({executed.recompute_share:.1%} more)"
    for name, number in (
        ("forward", executed.forward),
        ("backward", executed.backward),
        *([(computed_again, executed.recompute)] if foretold.layout.recompute != "none" else []),
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
