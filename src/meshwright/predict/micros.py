"""The micro-batches that a rank computes, by their sizes."""

from __future__ import annotations

from meshwright.predict.states import DTYPE_BYTES, shards
from meshwright.predict.storages import Sizes
from meshwright.spec.batch import micro_batches
from meshwright.spec.context import grain
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec
from meshwright.spec.stages import Stage

Micro = tuple[int, int]
"""So many sequences of a length."""


def sequences_computed(run: RunSpec, layout: Layout, rank: int) -> list[Micro]:
    """How many sequences of which length each micro-batch has that `rank` computes, or a part of; none of no length
    where it leaves one out."""
    place = layout.coordinates(rank)["dp"]
    parts = micro_batches(run.batch.sequences, layout.data_ranks, place, run.batch.micro)
    # At ZeRO 3 all ranks run every micro-batch, for the others' gathers: with one token, or one of each part.
    nothing = (1, grain(layout)) if layout.zero == 3 and shards(layout) > 1 else (0, 0)
    return [(len(part), run.data.seq_len) if part else nothing for part in parts]


def tokens_computed(run: RunSpec, layout: Layout, rank: int) -> list[int]:
    """The tokens of each micro-batch that `rank` computes with its tensor ranks, 0 where it leaves one out."""
    return [batch * length // layout.cp for batch, length in sequences_computed(run, layout, rank)]


def hidden_bytes(run: RunSpec, layout: Layout, micro: Micro) -> int:
    """Of the hidden states of a micro-batch, as this rank has them between two blocks, and as stages hand them on."""
    batch, length = micro
    tokens = batch * length // layout.cp // (layout.tp if layout.sp else 1)
    return tokens * run.model.hidden * DTYPE_BYTES[run.precision]


def sizes(run: RunSpec, micro: Micro, cpu: bool, stage: Stage | None = None) -> Sizes:
    """What `activations.saved` asks of a micro-batch of this run, on the CPU or an accelerator."""
    batch, length = micro
    return {
        "batch": batch,
        "seq": length,
        "dtype_bytes": DTYPE_BYTES[run.precision],
        "attention": run.attention,
        "loss": run.loss,
        "dropout": run.dropout,
        "device": "cpu" if cpu else "cuda",
        # What is computed for the others' gathers alone is one document.
        "packed": run.data.packing == "documents" and length == run.data.seq_len,
        "stage": stage,
    }
