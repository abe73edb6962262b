"""Checkpoints as storage of torch.distributed.checkpoint: boxes in safetensors files, and a manifest of all of them.

    checkpoints/step-00000050/rank-00000.safetensors    what rank 0 has written, a key a box
    checkpoints/step-00000050/manifest.json             see manifest.py
    checkpoints/latest                                  "step-00000050"

torch's planner deals out who writes and reads what; `Writer` and `Reader` do it. Every rank writes one file of its own
into a folder aside and flushes it. When all have, the coordinator writes the manifest, puts the folder in place by one
rename, moves the pointer, and only then removes what is too old. Nothing is pickled. torch's own safetensors writer is
not used, because it keys tensors by name and keeps one of several boxes that a rank has of a tensor.

The reader gives any program that uses torch.distributed.checkpoint any part of any tensor:

    torch.distributed.checkpoint.load(state, storage_reader=Reader(folder))
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.spec.boxes import Box
from meshwright.spec.errors import RunError
from meshwright.train import folders, manifest, tensorfile
from meshwright.train.manifest import Entry, Manifest, StoredBox

SLAB = 1 << 26
"""Bytes of a stored box that are spread over a tensor at once, where the part that is wanted is no run of the box."""


class NotFinite(RunError):
    """Tensors that nobody could go on from are not saved; the former checkpoints are untouched."""


class Writer(StorageWriter):
    """Writes the checkpoint of `step` below `folder`; see folders.py for what becomes of older ones.

    meta: JSON that goes into the manifest. advance: called again and again while this rank writes. Each rank makes
    one; the coordinator's places and prunes. Raises OSError where the file system refuses, and removes what was
    written; NotFinite where a tensor is not finite.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        meta: Mapping[str, Any],
        *,
        keep: int,
        keep_every: int = 0,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.step, self.meta = folder, step, dict(meta)
        self.keep, self.keep_every, self.advance = keep, keep_every, advance
        self._rank = 0
        self._aside: Path | None = None  # on the coordinator

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is left of a former save."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = int(kwargs.get("rank", 0))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The folder aside, which all ranks write to."""
        self.folder.mkdir(parents=True, exist_ok=True)
        folders.clear_leftovers(self.folder)
        self._aside = folders.aside(folders.place(self.folder, self.step))
        self._aside.mkdir()
        return [SavePlan(plan.items, storage_data=str(self._aside), planner_data=plan.planner_data) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write(Path(plan.storage_data), plan.items, planner))
        return future

    def _write(self, aside: Path, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        if not items:
            return []
        pickled = next((item.index.fqn for item in items if item.type is WriteItemType.BYTE_IO), None)
        if pickled is not None:
            raise RunError(f"{pickled} is no tensor; only tensors are saved, because the rest would be pickled")
        if not aside.is_dir():
            raise FileNotFoundError(f"{aside} is not seen by rank {self._rank}: all machines must share the folder")
        keys = {_key(item): item for item in items}
        tensors = [(key, planner.resolve_data(item)) for key, item in keys.items()]
        for key, tensor in tensors:
            _check_finite(key, tensor)
            self.advance()
        file = f"rank-{self._rank:05d}.safetensors"
        size, stored = tensorfile.write(aside / file, tensors, self.advance)
        return [
            WriteResult(item.index, _nbytes(item), StoredBox(_box(item), file, key, stored[key]).plain() | {"of": size})
            for key, item in keys.items()
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """All files are on the disk: make them a checkpoint."""
        assert self._aside is not None
        files: dict[str, int] = {}
        boxes: dict[str, list[StoredBox]] = {}
        for result in (result for of_rank in results for result in of_rank):
            files[result.storage_data["file"]] = result.storage_data["of"]
            boxes.setdefault(result.index.fqn, []).append(StoredBox.of(result.storage_data))
        tensors = {
            name: Entry(about.properties.dtype, tuple(about.size), tuple(boxes.get(name, ())))
            for name, about in metadata.state_dict_metadata.items()
            if isinstance(about, TensorStorageMetadata)
        }
        whole = Manifest(self.meta, files, tensors)
        whole.check_cover()
        for file, size in files.items():
            if (self._aside / file).stat().st_size != size:
                raise OSError(f"{self._aside / file} is not as long as what was written")
        whole.write(self._aside / manifest.NAME)
        folders.put_in_place(self._aside, self.folder, self.step)
        folders.point_to(self.folder, self.step)
        folders.prune(self.folder, self.step, self.keep, self.keep_every)

    def give_up(self) -> None:
        """Remove what a failed save has written; for the coordinator, after all ranks have left it."""
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)


class Reader(StorageReader):
    """Reads the checkpoint in `folder`, as `manifest` (by default its own) tells. Raises RunError naming a file that
    is missing or damaged. Takes a few MB of memory beside what it reads into."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder) if manifest is None else manifest
        self._reader = tensorfile.Reader()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Each load reads anew."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / manifest.NAME).exists()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=entry.dtype),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size(b.box.offsets), torch.Size(b.box.sizes)) for b in entry.boxes],
                )
                for name, entry in self.manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The manifest is all there is to know."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[ReadItem, StoredBox]]] = {}
        for item in plan.items:
            assert item.type is LoadItemType.TENSOR
            stored = self._stored(item)
            by_file.setdefault(stored.file, []).append((item, stored))
        for file, items in by_file.items():
            try:
                with open(self.folder / file, "rb", buffering=0) as stream:
                    for item, stored in sorted(items, key=lambda pair: pair[1].stored.start):
                        target = planner.resolve_tensor(item).detach()
                        dtype = self.manifest.tensors[item.storage_index.fqn].dtype
                        part = Box(tuple(item.storage_offsets), tuple(item.lengths))
                        self._read(stream, stored, dtype, part, target)
                        planner.commit_tensor(item, target)
            except OSError as error:
                why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
                raise RunError(f"{self.folder / file} {why}") from error
            except tensorfile.Damaged as error:
                raise RunError(f"{self.folder / file} is damaged: {error}") from error
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _stored(self, item: ReadItem) -> StoredBox:
        index = item.storage_index
        boxes = self.manifest.tensors[index.fqn].boxes
        if index.index is not None:
            return boxes[index.index]
        return next(b for b in boxes if b.box.offsets == tuple(index.offset or ()))

    def _read(self, stream: Any, stored: StoredBox, dtype: torch.dtype, part: Box, target: Tensor) -> None:
        """Elements `part` of the stored box (offsets within it) into `target`, of the part's sizes."""
        item, sizes = dtype.itemsize, stored.box.sizes
        nbytes = stored.box.numel * item
        for rows, first, count in _slabs(sizes, part, max(SLAB // item, 1)):
            into = target if rows is None else target[rows]
            if into.numel() == count and into.is_contiguous() and into.dtype == dtype:
                self._reader.read(stream, stored.stored, nbytes, first * item, _as_bytes(into))
                continue
            span = torch.empty(count, dtype=dtype)
            self._reader.read(stream, stored.stored, nbytes, first * item, _as_bytes(span))
            into.copy_(span.as_strided(into.shape, _strides(sizes)))


def _slabs(sizes: tuple[int, ...], part: Box, most: int) -> Any:
    """`part` of a C-order box of `sizes`, as (rows of the part or None for all, first element, elements from the first
    to the last) of runs of at most `most` elements, or of one row."""
    strides = _strides(sizes)
    first = sum(o * s for o, s in zip(part.offsets, strides, strict=True))
    span = 1 + sum((n - 1) * s for n, s in zip(part.sizes, strides, strict=True))
    if span <= most or not sizes or span == part.numel:
        yield None, first, span
        return
    row = 1 + sum((n - 1) * s for n, s in zip(part.sizes[1:], strides[1:], strict=True))
    together = max(1, (most - row) // strides[0] + 1)
    for start in range(0, part.sizes[0], together):
        rows = min(together, part.sizes[0] - start)
        yield slice(start, start + rows), first + start * strides[0], (rows - 1) * strides[0] + row


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _key(item: WriteItem) -> str:
    return f"{item.index.fqn}@{','.join(map(str, _box(item).offsets))}"


def _nbytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return _box(item).numel * item.tensor_data.properties.dtype.itemsize


def _check_finite(key: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and tensor.numel():
        # NaN spoils both; takes no memory.
        lowest, highest = torch.aminmax(tensor)
        if not (torch.isfinite(lowest) and torch.isfinite(highest)):
            raise NotFinite(f"{key.rpartition('@')[0]} is not finite")
