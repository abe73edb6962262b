"""What a run's pipeline comes to, a line for each of its ranks, so that one sees where it is uneven; and its bubble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.predict.activations import total
from meshwright.predict.flight import Flight, kept_at_once
from meshwright.predict.flops import Flops, counted
from meshwright.predict.memory import Memory
from meshwright.predict.params import unit_counts
from meshwright.predict.peak import written_out
from meshwright.predict.stages import schedule_of, stages_of, stages_on
from meshwright.predict.traffic import total_wire, traffic
from meshwright.schedule import bubble
from meshwright.schedule.timeline import Timeline, simulate
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec
from meshwright.spec.stages import Stage


@dataclass(frozen=True)
class PipelineRank:
    """One place in the pipeline, as the rank there that holds most has it. Sizes in bytes.

    rank: its number in the world. parameters: what it holds of them where ZeRO cuts nothing. flops: of a step, of all
    ranks at this place. in_flight: micro-batches on each of its stages when they keep most, and activations: what they
    keep then. states, total: see Memory. wire: bytes it sends in a step.
    """

    rank: int
    stages: tuple[Stage, ...]
    parameters: int
    flops: int
    in_flight: tuple[int, ...]
    activations: int
    states: int
    total: int
    wire: float


@dataclass(frozen=True)
class Pipeline:
    """bubble: the part of their time in which ranks wait, if computing takes as its FLOPs and messages take no time.
    even_bubble: the same in closed form, for stages that all take equally long; None for a schedule file."""

    schedule: str
    micro_batches: int
    bubble: float
    even_bubble: float | None
    ranks: tuple[PipelineRank, ...]


def pipeline(run: RunSpec, layout: Layout, held: Mapping[int, Memory]) -> Pipeline | None:
    """For a resolved `layout`; held: by the place in the pipeline, the memory of the rank there that holds most. None
    where pp=1."""
    if layout.pp == 1:
        return None
    schedule = schedule_of(run, layout)
    cpu = held[0].device == "cpu"
    work, timeline = by_flops(run, layout, cpu=cpu)
    named = not layout.schedule_file
    even = bubble(layout.pp_schedule, layout.pp, schedule.micros, layout.pp_chunks) if named else None
    ranks = tuple(_line(run, layout, held[place], work) for place in range(layout.pp))
    return Pipeline(schedule.name, schedule.micros, timeline.bubble, None if even is None else float(even), ranks)


def by_flops(run: RunSpec, layout: Layout, *, cpu: bool) -> tuple[list[Flops], Timeline]:
    """The FLOPs of a step on each stage, and the step's times if computing takes as those and messages take none."""
    work = [stage_flops(run, layout, stage, cpu=cpu) for stage in stages_of(run.model, layout, run.data.seq_len)]
    timeline = simulate(
        schedule_of(run, layout),
        forward=[each.forward for each in work],
        backward=[each.backward + each.recompute for each in work],
    )
    return work, timeline


def _line(run: RunSpec, layout: Layout, memory: Memory, work: list[Flops]) -> PipelineRank:
    rank, cpu = memory.rank, memory.device == "cpu"
    stages = stages_on(run, layout, rank)
    flying = Counter(stage for stage, _ in Flight(run, layout, rank, cpu=cpu).fullest)
    return PipelineRank(
        rank=rank,
        stages=stages,
        parameters=sum(
            size for stage in stages for size in unit_counts(run.model, layout.join, layout, stage).values()
        ),
        flops=sum(work[stage.index].total for stage in stages),
        in_flight=tuple(flying[stage.index] for stage in stages),
        activations=total(kept_at_once(run, layout, rank, cpu=cpu)),
        states=memory.states,
        total=memory.total,
        wire=total_wire(traffic(run, layout, rank)),
    )


def stage_flops(run: RunSpec, layout: Layout, stage: Stage, *, cpu: bool) -> Flops:
    """FLOPs of a step on all ranks that have `stage`."""
    each = (
        counted(
            run.model,
            batch=run.batch.sequences,
            seq=run.data.seq_len,
            attention="explicit" if written_out(run, cpu=cpu) else "sdpa",
            loss=run.loss,
            layout=layout,
            place=place,
            stage=stage,
        )
        for place in range(layout.cp)
    )
    return sum(each, Flops(0, 0)).times(layout.tp)
