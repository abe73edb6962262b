"""The stages of a run's pipeline: which blocks each has by what they cost, and who does what when."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from meshwright.predict.flops import block_flops, head_flops
from meshwright.predict.params import TensorSpec, tensors
from meshwright.schedule import make
from meshwright.schedule.actions import Action, Schedule
from meshwright.schedule.files import read
from meshwright.spec import costs
from meshwright.spec.batch import micro_steps
from meshwright.spec.costs import Costs
from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import RunSpec
from meshwright.spec.stages import Stage, balanced, stages


@cache
def stages_of(spec: ModelSpec, layout: Layout, seq: int) -> tuple[Stage, ...]:
    """All stages of a model in training on sequences of `seq` tokens, from the embedding to the head."""
    if layout.pp == 1:
        return stages((spec.layers,))
    split = layout.pp_split
    if isinstance(split, tuple):
        return stages(split)
    each = _costs(spec, split, seq)
    try:
        blocks = each.blocks(spec.layers)
    except ValueError as error:
        raise UserError(f"layout.pp_split: {split}: {error}") from None
    return stages(balanced(blocks, layout.stages, before=each.embedding, after=each.head))


def _costs(spec: ModelSpec, by: str, seq: int) -> Costs:
    """What the embedding, each block and the head cost, in units of their own."""
    if by == "layers":
        return Costs(0.0, 1.0, 0.0)
    if by == "flops":
        return Costs(0.0, block_flops(spec, seq), head_flops(spec))
    if by != "parameters":
        return costs.read(Path(by))
    before = block = after = 0
    for tensor in tensors(spec):
        if tensor.block is None:
            before += tensor.numel if tensor.tied or tensor.lookup else 0
            after += 0 if tensor.lookup else tensor.numel  # a tied table is held by both ends
        else:
            block += tensor.numel
    return Costs(float(before), block / spec.layers, float(after))


def stages_on(run: RunSpec, layout: Layout, rank: int) -> tuple[Stage, ...]:
    """The stages that `rank`, its number in the world, has, in the order of forward."""
    every = stages_of(run.model, layout, run.data.seq_len)
    if layout.pp == 1:
        return every
    place = layout.coordinates(rank)["pp"]
    return tuple(every[stage] for stage, holder in enumerate(schedule_of(run, layout).stages) if holder == place)


def tensors_on(run: RunSpec, layout: Layout, rank: int) -> tuple[TensorSpec, ...]:
    """The parameters of `rank`'s stages; a tied table is on the first and on the last."""
    return tuple(tensor for stage in stages_on(run, layout, rank) for tensor in tensors(run.model, layout, stage))


def actions_of(run: RunSpec, layout: Layout, rank: int) -> tuple[Action, ...]:
    """What `rank` does in a step, one thing after another; the layout has pipeline ranks."""
    return schedule_of(run, layout).ranks[layout.coordinates(rank)["pp"]]


def schedule_of(run: RunSpec, layout: Layout) -> Schedule:
    """Who computes which micro-batch on which stage when. Raises UserError for what the schedule cannot take."""
    micros = micro_steps(run.batch.sequences, layout.data_ranks, run.batch.micro)
    if not layout.schedule_file:
        return _made(layout.pp_schedule, layout.pp, micros, layout.pp_chunks)
    schedule = _read(layout.pp_schedule)
    in_turn = tuple(stage % layout.pp for stage in range(layout.stages))
    ranks, wrong = schedule.pipeline_ranks, None
    if (ranks, len(schedule.stages)) != (layout.pp, layout.stages):
        chunks = len(schedule.stages) // ranks
        wrong = f"has {len(schedule.stages)} stages on {ranks} ranks; use pp={ranks} and pp_chunks={chunks}"
    elif schedule.stages != in_turn:
        wrong = (
            f"has its stages on ranks {', '.join(map(str, schedule.stages))}; only stages that are dealt out in turn "
            f"({', '.join(map(str, in_turn))}) are available yet"
        )
    elif schedule.micros != micros:
        wrong = (
            f"has {schedule.micros} micro-batches, and batch.sequences={run.batch.sequences} over dp={layout.dp} with "
            f"batch.micro={run.batch.micro} makes {micros}; "
            f"use batch.sequences={schedule.micros * layout.data_ranks * run.batch.micro}"
        )
    if wrong is not None:
        raise UserError(f"layout.pp_schedule: {layout.pp_schedule} {wrong}")
    return schedule


@cache
def _made(name: str, ranks: int, micros: int, chunks: int) -> Schedule:
    return make(name, ranks, micros, chunks)


@cache
def _read(path: str) -> Schedule:
    return read(Path(path))
