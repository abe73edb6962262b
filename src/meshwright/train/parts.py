"""What one rank saves and loads of a run's tensors, and torch.distributed.checkpoint's planners for that.

A rank's shard is a run of a unit's flat buffer. What it holds of a parameter is a run of that, which is a few boxes of
the rank's part, and these are boxes of the whole. Ranks that hold the same shard (all of them at ZeRO 0, replicas with
hybrid sharding) each save a part of it, and load all of it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from meshwright.parallel.flat import Piece
from meshwright.spec.boxes import Box
from meshwright.spec.errors import RunError


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


class LoadParts(LoadPlanner):
    """Plans to read a rank's parts, in whatever boxes they were written."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts: dict[str, list[Part]] = {}
        for part in parts:
            self._parts.setdefault(part.name, []).append(part)
        self._stored: Mapping[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, parts in self._parts.items():
            stored = self._stored.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise RunError(f"the checkpoint lacks {name}")
            chunks = [ChunkStorageMetadata(torch.Size(p.box.offsets), torch.Size(p.box.sizes)) for p in parts]
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("only tensors are stored")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.index is not None
        tensor = self._parts[index.fqn][index.index].tensor
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            if length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, offset, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It was read where it belongs."""
