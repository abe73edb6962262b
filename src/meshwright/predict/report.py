"""Everything foretold about one run, as plain data: what `meshwright predict` prints and a run shows at its start."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from meshwright.predict.flops import Flops, counted, model_flops
from meshwright.predict.memory import Device, Memory, memory
from meshwright.predict.params import count, embedding_count, units
from meshwright.predict.peak import written_out
from meshwright.predict.traffic import total_wire, traffic
from meshwright.spec.batch import micro_steps
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec
from meshwright.spec.traffic import TrafficRow


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters; a tied weight counts once. `embedding` is what is only looked up, `units` are joined.

    local: of each unit what a tensor rank holds where ZeRO cuts nothing, what fills up its parts included.
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
    that have no sequence of the batch and hold no activations. `traffic` is that of rank 0.
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
    held_together = units(run.model, layout.join, layout)
    ranks_with = (layout.rank_at({"dp": place}) for place in _kinds(sequences, data_ranks))
    held = [memory(run, layout, rank, device) for rank in ranks_with]
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
        memory=max(held, key=lambda m: m.total),
        idle_ranks=tuple(range(min(sequences, data_ranks), data_ranks)),  # those behind have the smaller parts
        traffic=rows,
        wire_per_step=total_wire(rows),
        flops=StepFlops(per_token, per_token * tokens, executed(run, layout, device)),
    )


def executed(run: RunSpec, layout: Layout, device: Device | None = None) -> Flops:
    """FLOPs that all devices compute in a step; `device` as for `memory`."""
    sequences, seq = run.batch.sequences, run.data.seq_len
    attention: Literal["sdpa", "explicit"] = "sdpa"
    if written_out(run, cpu=(device or run.device) == "cpu"):
        attention = "explicit"
    each = (
        counted(run.model, batch=sequences, seq=seq, attention=attention, loss=run.loss, layout=layout, place=place)
        for place in range(layout.cp)
    )
    return sum(each, Flops(0, 0)).times(layout.tp)


def _kinds(sequences: int, ranks: int) -> list[int]:
    """One data rank for each size of part that occurs, the lowest: those with parts of one size hold the same.

    Of tensor ranks the first holds most: it writes what all have.
    """
    larger = sequences % ranks
    return [0, larger] if larger else [0]
