"""What one rank saves and loads of a run's tensors, and torch.distributed.checkpoint's planner for saving it.

A rank's shard is a run of a unit's flat buffer. What it holds of a parameter is a run of that, which is a few boxes of
the rank's part, and these are boxes of the whole. Ranks that hold the same shard (all of them at ZeRO 0, replicas with
hybrid sharding) each save a part of it, and load all of it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from meshwright.parallel.flat import Piece
from meshwright.spec.boxes import Box


@dataclass(frozen=True)
class Part:
    """One box of a tensor: its place in the whole, and the elements themselves, in the box's shape; a view."""

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Part:
        """All of a tensor."""
        shape = tuple(tensor.shape)
        return cls(name, shape, Box((0,) * len(shape), shape), tensor)


def parts_of(kind: str, piece: Piece, shard: Tensor) -> Iterator[Part]:
    """The boxes that `piece` is in the whole tensor, as parts of `shard`, which is laid out as the rank's shard."""
    name = f"{kind}/{piece.placement.name}"
    for box, elements in piece.boxes(piece.of(shard)):
        yield Part(name, piece.placement.shape, box, elements)


def clipped(pieces: Iterable[Piece], start: int, stop: int) -> Iterator[Piece]:
    """The pieces, or parts of them, that lie in elements [start, stop) of the shard."""
    for piece in pieces:
        low, high = max(piece.offset, start), min(piece.offset + piece.stop - piece.start, stop)
        if low < high:
            moved = low - piece.offset
            yield replace(piece, start=piece.start + moved, stop=piece.start + moved + high - low, offset=low)


class SaveParts(SavePlanner):
    """Plans to write the parts that each rank has; together they must make whole tensors."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = {(part.name, part.box.offsets): part for part in parts}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """The parts are all there is to know."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(part) for part in self._parts.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._parts[write_item.index.fqn, tuple(write_item.index.offset or ())].tensor


def _write_item(part: Part) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(part.box.offsets), torch.Size(part.box.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=part.tensor.dtype), torch.Size(part.shape))
    return WriteItem(MetadataIndex(part.name, part.box.offsets), WriteItemType.SHARD, tensor_data=data)
