"""What autograd keeps for backward of one micro-batch: see predict/storages.py for the tensors.

With recompute (parallel/recompute.py) a region of blocks keeps less: its input, what all blocks are given beside it
and nothing else holds, and the outputs of operators to be kept; of these not what comes behind the last tensor that
autograd saves, because recompute stops there. So a storage says which operator made it, and outputs that autograd
does not save are described too. A pipeline stage cuts its own blocks into regions. What is alive in backward follows in
predict/alive.py, what several micro-batches in flight keep at once in predict/flight.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from meshwright.predict.storages import Parts, Saved, Sizes, Storage, storages
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec

__all__ = ["Parts", "Saved", "Sizes", "Storage", "kept", "outputs", "saved", "storages", "total"]


def saved(spec: ModelSpec, layout: Layout | None = None, **sizes: Unpack[Sizes]) -> list[Saved]:
    """Storages kept between forward and backward, with the recompute and ranks of `layout`; see `storages`.

    What a region keeps stands under its last block, where forward puts it by.
    """
    parts = storages(spec, layout, **sizes)
    regions = (row for region in kept(parts, layout or Layout()) for row in region)
    return [Saved(row.where, row.what, row.bytes) for row in (*parts.before, *regions, *parts.after, *parts.loss)]


def kept(parts: Parts, layout: Layout) -> list[list[Saved]]:
    """What each region keeps, in the order of forward; without recompute each block is one, and keeps all it saves."""
    if layout.recompute == "none":
        return [[row for row in block if row.saved] for block in parts.blocks]
    every = layout.region(len(parts.blocks))
    found = []
    for start in range(0, len(parts.blocks), every):
        blocks = parts.blocks[start : start + every]
        rows = [row for block in blocks for row in block]
        stay = [*rows[:1], *(row for row in rows if row.shared), *outputs(rows, layout)]
        found.append([Saved(_module(blocks[-1]), row.what, row.bytes) for row in stay])
    return found


def outputs(rows: Sequence[Storage], layout: Layout) -> list[Storage]:
    """The outputs of kept operators in a region of these `rows`."""
    stop = max((place for place, row in enumerate(rows) if row.saved), default=-1)
    return [row for row in rows[: stop + 1] if row.by in layout.kept_operators]


def _module(block: Sequence[Storage]) -> str:
    """The name of a block in the model, from its first storage: "model.layers.3"."""
    return block[0].where.rpartition(".")[0] if block else ""


def total(storages: Sequence[Saved]) -> int:
    """Bytes of all of them."""
    return sum(s.bytes for s in storages)
