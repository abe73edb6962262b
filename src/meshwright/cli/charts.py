"""A timeline as a picture, SVG or PNG, drawn by matplotlib, which the extra `draw` installs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.cli.timelines import label
from meshwright.schedule.actions import Kind
from meshwright.schedule.timeline import Span, Timeline
from meshwright.spec.errors import UserError

try:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
except ImportError as error:
    raise UserError(
        f"--out: a picture needs matplotlib ({error}); pip install 'meshwright[draw]', or name a trace, .json"
    ) from None

COLOURS: dict[Kind, tuple[str, str]] = {  # of a rank's stages in turn: light and dark enough to differ in grey too
    "forward": ("#a6cee3", "#c9e2ef"),
    "backward": ("#33a02c", "#66bb60"),
    "backward_input": ("#33a02c", "#66bb60"),
    "backward_weight": ("#ff7f00", "#ffa64d"),
    "step": ("#999999", "#999999"),
}
NUMBERED = 3000  # actions that get their label; more could not be read, and would take minutes
WIDTH, HEIGHT = 16.0, 0.35  # inches: of the picture, and of a rank


def draw(timeline: Timeline, path: Path) -> None:
    """Draw a timeline into a file, whose name says how. Raises UserError where it cannot be written."""
    ranks = timeline.schedule.pipeline_ranks
    figure = Figure(figsize=(WIDTH, 1.5 + HEIGHT * ranks), layout="constrained")
    axes = figure.add_subplot()
    numbered = sum(map(len, timeline.ranks)) <= NUMBERED
    for rank in range(ranks):
        for colour, spans in _by_colour(timeline, rank).items():
            bars = [(span.start, span.end - span.start) for span in spans]
            axes.broken_barh(bars, (rank - 0.45, 0.9), facecolors=colour, edgecolors="white", linewidth=0.5)
            for start, length, text in _labels(timeline, rank, spans) if numbered else ():
                axes.text(start + length / 2, rank, text, ha="center", va="center", fontsize=7, clip_on=True)
    name, micros = timeline.schedule.name, timeline.schedule.micros
    title = f"{name}: {ranks} ranks, {micros} micro-batches, bubble {timeline.bubble:.1%}"
    axes.set(title=title, xlabel="time", xlim=(0, timeline.length or 1), ylim=(ranks - 0.5, -0.5))
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_facecolor("#f0f0f0")  # of waiting
    figure.legend(handles=_legend(timeline), loc="outside lower left", ncols=5)
    metadata = {"Date": None} if path.suffix == ".svg" else {}  # the same timeline is the same file
    try:
        figure.savefig(path, dpi=150, metadata=metadata)
    except OSError as error:
        raise UserError(
            f"--out {path}: cannot be written ({error.strerror}); name a file in a folder that is"
        ) from None


def _by_colour(timeline: Timeline, rank: int) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    stages = timeline.schedule.of_rank(rank)
    for span in timeline.ranks[rank]:
        if span.end > span.start:
            found.setdefault(COLOURS[span.action.kind][stages.index(span.action.stage) % 2], []).append(span)
    return found


def _labels(timeline: Timeline, rank: int, spans: list[Span]) -> Iterator[tuple[float, float, str]]:
    """Where to write what: labels that fit."""
    for action, start, end in spans:
        text = label(timeline.schedule, rank, action)
        if (end - start) / timeline.length * (WIDTH - 1.5) > 0.075 * len(text):  # inches
            yield start, end - start, text


def _legend(timeline: Timeline) -> list[Patch]:
    kinds = dict.fromkeys(span.action.kind for span in timeline.ranks[0] if span.end > span.start)
    patches = [Patch(color=COLOURS[kind][0], label=kind.replace("_", ", ")) for kind in kinds]
    return [*patches, Patch(color="#f0f0f0", label="waiting")]
