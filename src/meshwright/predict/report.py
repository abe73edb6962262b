"""Everything foretold about one run, as plain data: what `meshwright predict` prints and a run shows at its start."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.predict.flops import Flops, model_flops
from meshwright.predict.memory import Device, Memory, memory
from meshwright.predict.params import count, embedding_count, units
from meshwright.predict.pipeline import Pipeline, pipeline, stage_flops
from meshwright.predict.stages import stages_of
from meshwright.predict.traffic import total_wire, traffic
from meshwright.spec.batch import micro_steps
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec
from meshwright.spec.traffic import TrafficRow


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters; a tied weight counts once. `embedding` is what is only looked up, `units` are joined.

    local: of each unit what a tensor rank holds where ZeRO cuts nothing, what fills up its parts included. A pipeline's
    stages have units of their own; a tied table, which both ends hold, stands once.
    """

    total: int
    embedding: int
    units: dict[str, int]
    local: dict[str, int]


@dataclass(frozen=True)
class StepFlops:
    """FLOPs: `model` is what utilisation counts (see predict.flops), `executed` what the devices compute, together."""

    model_per_token: float
    model_per_step: float
    executed_per_step: Flops


@dataclass(frozen=True)
class Prediction:
    """What a run will hold, move and compute. Sizes in bytes.

    `memory` is that of the rank that holds most (the first of them, where several do); `idle_ranks` are the data ranks
    that have no sequence of the batch and hold no activations. `traffic` is that of rank 0; `pipeline` is there with
    pipeline ranks.
    """

    layout: Layout
    parameters: Parameters
    tokens_per_step: int
    micro_batches: int
    memory: Memory
    idle_ranks: tuple[int, ...]
    traffic: tuple[TrafficRow, ...]
    wire_per_step: float  # bytes one rank sends
    flops: StepFlops
    pipeline: Pipeline | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same in dicts, lists, strings and numbers, for JSON; totals beside their parts."""
        result = asdict(self)
        result["layout"] = self.layout.model_dump(mode="json")
        result["ranks"] = self.layout.world
        result["memory"] |= {"states": self.memory.states, "total": self.memory.total}
        result["idle_ranks"] = list(self.idle_ranks)
        result["traffic"] = [
            {**asdict(row.key), "count": row.count, "payload": row.payload, "wire": row.wire} for row in self.traffic
        ]
        executed = self.flops.executed_per_step
        result["flops"]["executed_per_step"] |= {"total": executed.total, "recompute_share": executed.recompute_share}
        return result


def predict(run: RunSpec, ranks: int | None = None, device: Device | None = None) -> Prediction:
    """Foretell `run` on `ranks` ranks, or on as many as its layout needs; `device` as for `memory`.

    Raises UserError where the layout does not multiply to `ranks`.
    """
    layout = run.layout.resolve(ranks)
    sequences, seq = run.batch.sequences, run.data.seq_len
    data_ranks = layout.data_ranks
    rows = traffic(run, layout)  # of rank 0, which has the largest part of the batch, and so sends most
    per_token = model_flops(run.model, seq=seq)
    tokens = sequences * seq
    held_together = {
        name: unit
        for stage in stages_of(run.model, layout, seq)
        for name, unit in units(run.model, layout.join, layout, stage).items()
    }
    held = {place: _fullest(run, layout, place, device) for place in range(layout.pp)}
    return Prediction(
        layout=layout,
        parameters=Parameters(
            count(run.model),
            embedding_count(run.model),
            {name: sum(t.numel for t in unit.tensors) for name, unit in held_together.items()},
            {name: unit.numel for name, unit in held_together.items()},
        ),
        tokens_per_step=tokens,
        micro_batches=micro_steps(sequences, data_ranks, run.batch.micro),
        memory=max(held.values(), key=lambda m: m.total),
        idle_ranks=tuple(range(min(sequences, data_ranks), data_ranks)),  # those behind have the smaller parts
        traffic=rows,
        wire_per_step=total_wire(rows),
        flops=StepFlops(per_token, per_token * tokens, executed(run, layout, device)),
        pipeline=pipeline(run, layout, held),
    )


def _fullest(run: RunSpec, layout: Layout, place: int, device: Device | None) -> Memory:
    """Of the ranks at `place` in the pipeline the one that holds most, the first of them where several do."""
    kinds = _kinds(run.batch.sequences, layout.data_ranks)
    return max(
        (memory(run, layout, layout.rank_at({"dp": kind, "pp": place}), device) for kind in kinds),
        key=lambda m: m.total,
    )


def executed(run: RunSpec, layout: Layout, device: Device | None = None) -> Flops:
    """FLOPs that all devices compute in a step; `device` as for `memory`."""
    cpu = (device or run.device) == "cpu"
    stages = stages_of(run.model, layout, run.data.seq_len)
    return sum((stage_flops(run, layout, stage, cpu=cpu) for stage in stages), Flops(0, 0))


def _kinds(sequences: int, ranks: int) -> list[int]:
    """One data rank for each size of part that occurs, the lowest: those with parts of one size hold the same.

    Of tensor ranks the first holds most: it writes what all have.
    """
    larger = sequences % ranks
    return [0, larger] if larger else [0]
