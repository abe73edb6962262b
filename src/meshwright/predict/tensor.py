"""What the tensor ranks of one data coordinate send each other in a step: see the table in parallel/tensor.py.

Each collective has one payload, the hidden states [B, T, D] of its micro-batch, but for those of the loss and the sums
after backward. So the rows of a micro-batch are counts, and an all-reduce is worth an all-gather and a reduce-scatter.
In a pipeline a rank has those of its stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.predict.micros import tokens_computed
from meshwright.predict.params import whole
from meshwright.predict.rows import row
from meshwright.predict.stages import stages_on
from meshwright.predict.states import DTYPE_BYTES, gradient_bytes, partial_sums
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import LOSS_ROWS, RunSpec
from meshwright.spec.stages import Stage
from meshwright.spec.traffic import Operation, Phase, TrafficRow

Count = tuple[Phase, Operation, str, int]
"""So many collectives of a kind, in a phase, for a reason."""


def tensor_traffic(run: RunSpec, layout: Layout, rank: int) -> Iterator[TrafficRow | None]:
    """The rows of `rank`; none where tp=1."""
    if layout.tp == 1:
        return
    stages = stages_on(run, layout, rank)
    counts = list(_counts(run, layout, stages))
    with_head = any(stage.last for stage in stages)
    for micro, tokens in enumerate(tokens_computed(run, layout, rank)):
        if tokens:
            hidden = tokens * run.model.hidden * DTYPE_BYTES[run.precision]
            for phase, operation, reason, count in counts:
                yield row(operation, "tp", layout.tp, f"tp.{reason}", phase, [hidden] * count, micro)
            if with_head:
                yield row("all_reduce", "tp", layout.tp, "tp.loss", "forward", _loss(run, tokens), micro)
    sums = [partial_sums(run, layout, rank, stage) for stage in stages]
    for axis in dict.fromkeys(axis for of_stage in sums for axis in of_stage):
        ranks = layout.tp if axis == "tp" else layout.tp // run.model.num_kv_heads
        payloads = [of_stage[axis] * gradient_bytes(run) for of_stage in sums if axis in of_stage]
        yield row("all_reduce", axis, ranks, "tp.partial", "step", payloads)


def _counts(run: RunSpec, layout: Layout, stages: Sequence[Stage]) -> Iterator[Count]:
    layers = sum(len(stage.blocks) for stage in stages)
    first, last = (sum(getattr(stage, end) for stage in stages) for end in ("first", "last"))
    again = reissued(run.model, layout, stages)
    if not layout.sp:
        yield "forward", "all_reduce", "embed", first
        for half in ("attn", "mlp"):
            yield "forward", "all_reduce", half, layers
            yield "recompute", "all_reduce", half, again[half]
            yield "backward", "all_reduce", half, layers
        yield "backward", "all_reduce", "head", last
        return
    yield "forward", "reduce_scatter", "embed", first
    yield "backward", "all_gather", "embed", first
    for half in ("attn", "mlp"):
        yield "forward", "all_gather", half, layers
        yield "forward", "reduce_scatter", half, layers
        yield "recompute", "all_gather", half, layers if again["attn"] else 0
        yield "recompute", "reduce_scatter", half, again[half]
        yield "backward", "all_gather", half, 2 * layers  # the gradient, and the saved input
        yield "backward", "reduce_scatter", half, layers
    yield "forward", "all_gather", "head", last
    # The chunked loss has made the gradients in forward, and needs its input no more.
    yield "backward", "all_gather", "head", last if run.loss == "full" else 0
    yield "backward", "reduce_scatter", "head", last


def reissued(spec: ModelSpec, layout: Layout, stages: Sequence[Stage] | None = None) -> dict[str, int]:
    """How many sums of each half block are made again by recompute, of all blocks or of those of `stages`.

    None where what products put out is kept, the sums with them. Else all but the last of each region, behind whose
    product nothing is saved, unless dropout saves its mask there.
    """
    if layout.recompute == "none" or "linear" in layout.kept_operators:
        return {"attn": 0, "mlp": 0}
    blocks = [len(stage.blocks) for stage in stages or [whole(spec)]]
    regions = sum(-(-number // layout.region(number)) for number in blocks)
    return {"attn": sum(blocks), "mlp": sum(blocks) - (0 if spec.resid_dropout else regions)}


def _loss(run: RunSpec, tokens: int) -> list[int]:
    """Payloads: for each chunk of tokens their largest logits, then their sums of exponentials and targets' logits."""
    wide = max(DTYPE_BYTES[run.precision], 4)
    chunk = tokens if run.loss == "full" else LOSS_ROWS
    rows = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    return [size for n in rows for size in (n * wide, 2 * n * wide)]
