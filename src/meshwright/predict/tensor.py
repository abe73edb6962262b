"""What the tensor ranks of one data coordinate send each other in a step: see the table in parallel/tensor.py.

Each collective has one payload, the hidden states [B, T, D] of its micro-batch, but for those of the loss and the sums
after backward. So the rows of a micro-batch are counts, and an all-reduce is worth an all-gather and a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.predict.rows import row
from meshwright.predict.states import DTYPE_BYTES, gradient_bytes, partial_sums, shards
from meshwright.spec.batch import micro_batches
from meshwright.spec.context import grain
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import LOSS_ROWS, RunSpec
from meshwright.spec.traffic import Operation, Phase, TrafficRow

Count = tuple[Phase, Operation, str, int]
"""So many collectives of a kind, in a phase, for a reason."""


def tensor_traffic(run: RunSpec, layout: Layout, rank: int) -> Iterator[TrafficRow | None]:
    """The rows of `rank`; none where tp=1."""
    if layout.tp == 1:
        return
    counts = list(_counts(run, layout))
    for micro, tokens in enumerate(tokens_computed(run, layout, rank)):
        if tokens:
            hidden = tokens * run.model.hidden * DTYPE_BYTES[run.precision]
            for phase, operation, reason, count in counts:
                yield row(operation, "tp", layout.tp, f"tp.{reason}", phase, [hidden] * count, micro)
            yield row("all_reduce", "tp", layout.tp, "tp.loss", "forward", _loss(run, tokens), micro)
    for axis, elements in partial_sums(run, layout, rank).items():
        ranks = layout.tp if axis == "tp" else layout.tp // run.model.num_kv_heads
        yield row("all_reduce", axis, ranks, "tp.partial", "step", [elements * gradient_bytes(run)])


def tokens_computed(run: RunSpec, layout: Layout, rank: int) -> list[int]:
    """The tokens of each micro-batch that `rank` computes with its tensor ranks, 0 where it leaves one out."""
    return [batch * length // layout.cp for batch, length in sequences_computed(run, layout, rank)]


def sequences_computed(run: RunSpec, layout: Layout, rank: int) -> list[tuple[int, int]]:
    """How many sequences of which length each micro-batch has that `rank` computes, or a part of; none of no length
    where it leaves one out."""
    place = layout.coordinates(rank)["dp"]
    parts = micro_batches(run.batch.sequences, layout.data_ranks, place, run.batch.micro)
    # At ZeRO 3 all ranks run every micro-batch, for the others' gathers: with one token, or one of each part.
    nothing = (1, grain(layout)) if layout.zero == 3 and shards(layout) > 1 else (0, 0)
    return [(len(part), run.data.seq_len) if part else nothing for part in parts]


def _counts(run: RunSpec, layout: Layout) -> Iterator[Count]:
    layers = run.model.layers
    again = reissued(run.model, layout)
    if not layout.sp:
        yield "forward", "all_reduce", "embed", 1
        for half in ("attn", "mlp"):
            yield "forward", "all_reduce", half, layers
            yield "recompute", "all_reduce", half, again[half]
            yield "backward", "all_reduce", half, layers
        yield "backward", "all_reduce", "head", 1
        return
    yield "forward", "reduce_scatter", "embed", 1
    yield "backward", "all_gather", "embed", 1
    for half in ("attn", "mlp"):
        yield "forward", "all_gather", half, layers
        yield "forward", "reduce_scatter", half, layers
        yield "recompute", "all_gather", half, layers if again["attn"] else 0
        yield "recompute", "reduce_scatter", half, again[half]
        yield "backward", "all_gather", half, 2 * layers  # the gradient, and the saved input
        yield "backward", "reduce_scatter", half, layers
    yield "forward", "all_gather", "head", 1
    # The chunked loss has made the gradients in forward, and needs its input no more.
    yield "backward", "all_gather", "head", 1 if run.loss == "full" else 0
    yield "backward", "reduce_scatter", "head", 1


def reissued(spec: ModelSpec, layout: Layout) -> dict[str, int]:
    """How many sums of each half block are made again by recompute.

    None where what products put out is kept, the sums with them. Else all but the last of each region, behind whose
    product nothing is saved, unless dropout saves its mask there.
    """
    if layout.recompute == "none" or "linear" in layout.kept_operators:
        return {"attn": 0, "mlp": 0}
    regions = -(-spec.layers // layout.region(spec.layers))
    return {"attn": spec.layers, "mlp": spec.layers - (0 if spec.resid_dropout else regions)}


def _loss(run: RunSpec, tokens: int) -> list[int]:
    """Payloads: for each chunk of tokens their largest logits, then their sums of exponentials and targets' logits."""
    wide = max(DTYPE_BYTES[run.precision], 4)
    chunk = tokens if run.loss == "full" else LOSS_ROWS
    rows = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    return [size for n in rows for size in (n * wide, 2 * n * wide)]
