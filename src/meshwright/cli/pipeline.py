"""A pipeline as a table for people: what each of its ranks has, computes and holds."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from meshwright.cli.printing import flops, size, table, titled
from meshwright.predict.pipeline import Pipeline, PipelineRank
from meshwright.spec.layout import Layout
from meshwright.spec.stages import Stage


def schedule_words(layout: Layout) -> str:
    """ "1f1b", "interleaved with 2 stages a rank, split by layers"."""
    words = layout.pp_schedule
    words += f" with {layout.pp_chunks} stages a rank" if layout.pp_chunks > 1 else ""
    split = layout.pp_split
    if split == Layout.model_fields["pp_split"].default:
        return words
    return words + (f", split {' '.join(map(str, split))}" if isinstance(split, tuple) else f", split by {split}")


def pipeline_words(pipeline: Pipeline) -> str:
    """ "8 micro-batches on 4 stages, up to 4 in flight on a rank; ranks wait for 27.3% of the time"."""
    stages = sum(len(rank.stages) for rank in pipeline.ranks)
    most = max(sum(rank.in_flight) for rank in pipeline.ranks)
    micros = f"{pipeline.micro_batches} micro-batch{'es' * (pipeline.micro_batches != 1)}"
    even = "" if pipeline.even_bubble is None else f" ({pipeline.even_bubble:.1%} if stages were even)"
    return f"{micros} on {stages} stages, up to {most} in flight on a rank; ranks wait {pipeline.bubble:.1%}{even}"


def pipeline_table(pipeline: Pipeline) -> Group:
    """A line for each place in the pipeline."""
    columns = ("rank", "blocks", "parameters", "FLOPs", "in flight", "activations", "states", "all it holds")
    rows = table(*columns, figures=6)
    fullest = max(rank.total for rank in pipeline.ranks)
    for rank in pipeline.ranks:
        rows.add_row(
            f"{rank.rank}",
            _blocks(rank),
            f"{rank.parameters:,}",
            flops(rank.flops),
            " + ".join(map(str, rank.in_flight)),
            size(rank.activations),
            size(rank.states),
            size(rank.total),
            style="bold" if rank.total == fullest else "",
        )
    notes = (
        "in flight: micro-batches whose activations a rank keeps at once, on each of its stages",
        f"bubble: ranks wait {pipeline.bubble:.1%} of the time, by the FLOPs of their stages alone",
    )
    return Group(
        titled(f"Pipeline, {pipeline.schedule} with {pipeline.micro_batches} micro-batches", rows),
        *(Text(note, style="dim") for note in notes),
    )


def _blocks(rank: PipelineRank) -> str:
    """ "embedding, 0 to 3; 8 to 11"."""
    return "; ".join(map(_of_stage, rank.stages))


def _of_stage(stage: Stage) -> str:
    last = stage.stop - 1
    run = f"{stage.start} to {last}" if stage.start < last else f"{last}"
    return f"{'embedding, ' * stage.first}{run}{', head' * stage.last}"
