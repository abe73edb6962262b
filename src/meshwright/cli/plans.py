"""A plan as tables for people. Sizes are decimal: 1 GB is 10⁹ bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.cli.printing import size, table, titled
from meshwright.cli.tables import layout_words
from meshwright.predict.adapters import adapter
from meshwright.predict.params import count
from meshwright.predict.plan.answer import GROUPS, Choice, Plan
from meshwright.predict.plan.explain import Line, memory_lines, time_lines, why_not
from meshwright.predict.plan.scale import fewest_devices
from meshwright.predict.rules import states as states_by_rule
from meshwright.predict.rules import training_time

BAR = 16  # characters that a device's whole memory has
RATE = 0.4  # part of the peak that the rule for days takes for granted


def plans(found: Plan, tokens: int | None) -> Iterable[RenderableType]:
    """What was asked, the best layouts with their times and their memory, and what else there is to know."""
    yield _asked(found, tokens)
    yield titled("Time of a step", _times(found.choices, tokens))
    yield titled(f"Memory of the fullest rank, of {size(found.choices[0].capacity)}", _memories(found.choices))
    yield titled("Beside it", _beside(found, tokens))


def nothing_fits(found: Plan, tokens: int | None) -> Iterable[RenderableType]:
    """What comes closest, what is over and by how much, and what would make it fit."""
    yield _asked(found, tokens)
    if found.nearest is None:
        yield Text("\nThere is no layout: no number of ranks on each axis goes with this model, batch and cluster.")
        return
    nearest = found.nearest
    over = nearest.needed - nearest.capacity
    fullest = max(nearest.held, key=lambda name: nearest.held[name])
    words = f"\nNothing fits. {layout_words(nearest.layout)}, micro-batches of {nearest.micro} come closest: "
    words += f"{size(over)} more than {size(nearest.capacity)}, most of it {fullest} ({size(nearest.held[fullest])})."
    yield Text(words)
    yield titled("Memory of its fullest rank", _memories([nearest]))
    if found.changes:
        rows = table("what would fit", "how")
        for change in found.changes:
            rows.add_row(change.words, change.option)
        yield titled("The smallest change first", rows)
    yield titled("Beside it", _beside(found, tokens))


def explanation(choice: Choice, found: Plan) -> Iterable[RenderableType]:
    """Every line of one layout's cost, beside the first's."""
    first = found.choices[0] if found.choices else choice
    yield Text(f"\n{layout_words(choice.layout)}, micro-batches of {choice.micro}", style="bold")
    if found.choices:
        yield Text(f"beside the first, {layout_words(first.layout)}, micro-batches of {first.micro}:")
    yield Text(why_not(choice, first))
    yield titled("Seconds of a step, on the pipeline rank that computes longest", _lines(time_lines(choice, first), _s))
    yield titled(f"Memory of the fullest rank ({choice.memory.moment})", _lines(memory_lines(choice, first), size))


def _asked(found: Plan, tokens: int | None) -> Table:
    run, cluster, result = found.run, found.cluster, found.result
    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    rows.add_row("model", f"{run.model.family}, {count(run.model):,} parameters, {run.precision}")
    rows.add_row(
        "cluster", f"{cluster.devices:,} × {cluster.device.name}, {cluster.nodes:,} nodes of {cluster.per_node}"
    )
    step = run.batch.sequences * run.data.seq_len
    rows.add_row("step", f"{run.batch.sequences:,} sequences of {run.data.seq_len:,} tokens: {step:,} tokens")
    if tokens is not None:
        rows.add_row("training", f"{tokens:,} tokens: {-(-tokens // step):,} steps")
    searched = f"{result.layouts:,} layouts, of which {result.fitting:,} fit; {result.simulated:,} simulated"
    rows.add_row("searched", searched + (", then interrupted" if result.cut_short else ""))
    return rows


def _times(choices: Sequence[Choice], tokens: int | None) -> Table:
    columns = ["", "layout", "micro", "step", "±", "tokens/s", "MFU", "bubble", "exposed"]
    columns += ["days"] if tokens is not None else []
    rows = table(*columns, figures=len(columns) - 2)
    for number, choice in enumerate(choices, 1):
        time = choice.time
        cells = [
            f"{choice.micro} × {choice.micro_batches}", _s(time.seconds), f"{time.high / time.seconds - 1:.0%}",
            f"{time.tokens_per_second:,.0f}", f"{time.utilisation:.1%}", f"{abs(time.bubble):.1%}",
            f"{abs(time.exposed) / time.seconds:.1%}",
        ]  # fmt: skip
        cells += [f"{choice.days(tokens):,.1f}"] if tokens is not None else []
        rows.add_row(f"{number}", layout_words(choice.layout), *cells)
    return rows


def _memories(choices: Sequence[Choice]) -> Table:
    names = [*GROUPS, *(["checkpoint copy"] if choices[0].memory.device == "cpu" else [])]
    rows = table("", "", *names, "allowance", "total", figures=len(names) + 2)
    for number, choice in enumerate(choices, 1):
        cells = [size(choice.held.get(name, 0)) for name in names]
        allowed = size(choice.needed - choice.memory.total)
        rows.add_row(f"{number}", _bar(choice), *cells, allowed, size(choice.needed))
    return rows


def _bar(choice: Choice) -> Text:
    """What is needed as a part of the device's memory."""
    part = choice.needed / choice.capacity
    full = min(round(part * BAR), BAR)
    return Text("█" * full + "░" * (BAR - full) + f" {part:4.0%}", style="" if part <= 1 else "red")


def _beside(found: Plan, tokens: int | None) -> Group:
    """Whether so many devices are needed at all, what adapters would take, and what rules of thumb say."""
    run, cluster = found.run, found.cluster
    rows = table("", "")
    fewest = fewest_devices(run, cluster)
    if fewest == 1:
        rows.add_row("full training", "one device is enough: no distribution is needed, only faster")
    elif fewest is not None:
        rows.add_row("full training", f"{fewest:,} such devices hold it, and no fewer")
    for name, bits in (("LoRA", 16), ("QLoRA", 4)):
        one = adapter(run, bits)  # type: ignore[arg-type]
        words = f"about {size(one.total)} on one device: {size(one.base)} of frozen weights in {bits} bits, "
        rows.add_row(
            name, words + f"{size(one.states)} for adapters of rank {one.rank}, {size(one.activations)} beside"
        )
    parameters = count(run.model)
    rows.add_row("rule", f"16 bytes a parameter: {size(states_by_rule(parameters))} of states in all")
    if tokens is not None:
        rate = RATE * cluster.device.flops[run.precision]
        days = training_time(parameters, tokens, devices=cluster.devices, rate=rate) / 86400
        rows.add_row("rule", f"6 FLOPs a parameter and token, at {RATE:.0%} of the peak: {days:,.1f} days")
    note = "exact: the tables above. rule: from rounded inputs. Adapters: near, not exact"
    return Group(rows, Text(note, style="dim"))


def _lines(lines: Sequence[Line], shown: object) -> Table:
    assert callable(shown)
    rows = table("", "what", "this", "the first", "more", figures=3)
    for line in lines:
        what = "" if line.what == line.name else line.what
        sign = "+" if line.more > 0 else ""
        rows.add_row(line.name, what, shown(line.this), shown(line.first), sign + shown(line.more))
    this, first = sum(line.this for line in lines), sum(line.first for line in lines)
    sign = "+" if this > first else ""
    rows.add_row("all", "", shown(this), shown(first), sign + shown(this - first), style="bold")
    return rows


def _s(seconds: float) -> str:
    """Seconds with three digits: 1.23 s, 45.6 ms."""
    if abs(seconds) >= 1 or not seconds:
        return f"{seconds:.3g} s" if abs(seconds) < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) >= 1e-3 else f"{seconds * 1e6:.3g} µs"
