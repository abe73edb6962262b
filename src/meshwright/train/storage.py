"""Checkpoints as storage of torch.distributed.checkpoint: boxes in safetensors files, and a manifest of all of them.

    checkpoints/step-00000050/rank-00000.safetensors    what rank 0 has written, a key a box
    checkpoints/step-00000050/manifest.json             see manifest.py
    checkpoints/latest                                  "step-00000050"

torch's protocol deals out who writes what; `Writer` does it, and `Reader` reads what was written. Every rank writes one
file of its own into a folder aside and flushes it. When all have, the coordinator writes the manifest, puts the folder
in place by one rename, moves the pointer, and removes what is too old only when the disk has both. Nothing is pickled.
torch's own safetensors writer is not used, because it keys tensors by name and keeps one of several boxes that a rank
has of a tensor.

The reader gives any program that uses torch.distributed.checkpoint any part of any tensor:

    torch.distributed.checkpoint.load(state, storage_reader=Reader(folder))
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

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
from meshwright.train.parts import Part

SLAB = 1 << 26
"""Bytes of a stored box that are read at once, where they cannot be read straight to where they belong."""


class NotFinite(RunError):
    """Tensors that nobody could go on from are not saved; the former checkpoints are untouched."""


class Writer(StorageWriter):
    """Writes the checkpoint of `step` below `folder`; see folders.py for what becomes of older ones.

    meta: JSON that goes into the manifest. advance: called again and again while this rank writes. Each rank makes
    one; the coordinator's places and prunes. Raises OSError where the file system refuses (folders.InPlaceError where
    that was after the checkpoint was in place), NotFinite where a tensor is not finite; then call `give_up`, or the
    next save clears away what was written.
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
        pickled = next((item.index.fqn for item in items if item.type is WriteItemType.BYTE_IO), None)
        if pickled is not None:
            raise RunError(f"{pickled} is no tensor; only tensors are saved, because the rest would be pickled")
        # A tensor without elements is whole without boxes; and torch plans empty ones for ranks that have no rows.
        items = [item for item in items if _box(item).numel]
        if not items:
            return []
        odd = next((item for item in items if _dtype(item) not in tensorfile.DTYPES), None)
        if odd is not None:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in tensorfile.DTYPES)
            raise RunError(f"{odd.index.fqn} is of dtype {_dtype(odd)}; what is saved is {kinds}")
        if not aside.is_dir():
            raise FileNotFoundError(f"{aside} is not seen by rank {self._rank}: all machines must share the folder")
        keys = {_key(item): item for item in items}
        tensors = [(key, planner.resolve_data(item)) for key, item in keys.items()]
        file = f"rank-{self._rank:05d}.safetensors"
        size, stored = tensorfile.write(aside / file, tensors, self.advance, _check_finite)
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
        folders.put_in_place(self._aside, self.folder, self.step, self._aside / manifest.NAME)
        folders.prune(self.folder, self.step, self.keep, self.keep_every)

    def give_up(self) -> None:
        """Remove what a failed save has written; for the coordinator, after all ranks have left it."""
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Elements `within` a stored box, by their place in it, and the tensor of these sizes that they go to.

    dtype: as stored. done: called when they are there.
    """

    stored: StoredBox
    dtype: torch.dtype
    within: Box
    target: Tensor
    done: Callable[[], None] | None = None


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

    def read(self, parts: Iterable[Part]) -> None:
        """Fill `parts` out of whatever boxes they were written in: what `read_data` does, without torch's plans.

        Raises RunError, also for a tensor that is not there or of another shape; then none has been filled, but for
        damage, which is found while they are.
        """
        self._read([wanted for part in parts for wanted in self._wanted(part)])

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: list[_Wanted] = []
        for item in plan.items:
            assert item.type is LoadItemType.TENSOR
            within = Box(tuple(item.storage_offsets), tuple(item.lengths))
            target = planner.resolve_tensor(item).detach()
            done = functools.partial(planner.commit_tensor, item, target)
            wanted.append(_Wanted(self._stored(item), self._dtype(item.storage_index.fqn), within, target, done))
        self._read(wanted)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _wanted(self, part: Part) -> Iterator[_Wanted]:
        entry = self.manifest.tensors.get(part.name)
        if entry is None:
            raise RunError(f"the checkpoint lacks {part.name}")
        if entry.shape != part.shape:
            raise RunError(f"the checkpoint's {part.name} is {entry.shape}, needed {part.shape}")
        box, target = part.box, part.tensor.detach()
        assert target.shape == box.sizes, (part.name, target.shape, box)
        # In the layout that saved, what is held is what was stored.
        same = next((stored for stored in entry.boxes if stored.box == box), None)
        if same is not None:
            yield _Wanted(same, entry.dtype, Box((0,) * len(box.sizes), box.sizes), target)
            return
        for stored in entry.boxes:
            if (shared := stored.box.overlap(box)) is not None:
                yield _Wanted(stored, entry.dtype, shared.seen_from(stored.box), _cut(target, shared.seen_from(box)))

    def _stored(self, item: ReadItem) -> StoredBox:
        index = item.storage_index
        boxes = self.manifest.tensors[index.fqn].boxes
        if index.index is not None:
            return boxes[index.index]
        return next(b for b in boxes if b.box.offsets == tuple(index.offset or ()))

    def _dtype(self, name: str) -> torch.dtype:
        return self.manifest.tensors[name].dtype

    def _read(self, wanted: Iterable[_Wanted]) -> None:
        by_file: dict[str, list[_Wanted]] = {}
        for one in wanted:
            by_file.setdefault(one.stored.file, []).append(one)
        for file, items in by_file.items():
            # All is laid out before anything is read: between blocks that pass through it, little stays in the cache.
            steps = [step for one in sorted(items, key=_place) for step in self._steps(one)]
            try:
                with open(self.folder / file, "rb", buffering=0) as stream:
                    for step in steps:
                        step(stream)
            except OSError as error:
                why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
                raise RunError(f"{self.folder / file} {why}") from error
            except tensorfile.Damaged as error:
                raise RunError(f"{self.folder / file} is damaged: {error}") from error

    def _steps(self, wanted: _Wanted) -> Iterator[Callable[[BinaryIO], None]]:
        """What reads it from its file into its tensor, to be called with the file in turn."""
        stored, target, item = wanted.stored, wanted.target, wanted.dtype.itemsize
        first, span = 0, stored.box.numel
        nbytes = span * item
        if wanted.within.sizes != stored.box.sizes:
            first, span = _run(wanted.within, _strides(stored.box.sizes))
        if span == wanted.within.numel and target.is_contiguous() and target.dtype == wanted.dtype:
            yield from self._reader.read(stored.stored, nbytes, first * item, tensorfile.as_bytes(target))
        else:
            yield lambda stream: self._by_slabs(stream, wanted, nbytes)
        if wanted.done is not None:
            yield lambda stream: wanted.done()

    def _by_slabs(self, stream: BinaryIO, wanted: _Wanted, nbytes: int) -> None:
        """The same by pieces, where it lies otherwise in the file than in memory."""
        item, strides = wanted.dtype.itemsize, _strides(wanted.stored.box.sizes)
        for box in _slabs(wanted.within, strides, max(SLAB // item, 1)):
            first, span = _run(box, strides)
            elements = torch.empty(span, dtype=wanted.dtype)
            for step in self._reader.read(wanted.stored.stored, nbytes, first * item, tensorfile.as_bytes(elements)):
                step(stream)
            into = _cut(wanted.target, box.seen_from(wanted.within))
            into.copy_(elements.as_strided(into.shape, strides))


def _place(wanted: _Wanted) -> int:
    return wanted.stored.stored.start


def _cut(tensor: Tensor, box: Box) -> Tensor:
    """The elements of `box`, a view."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def _run(part: Box, strides: tuple[int, ...]) -> tuple[int, int]:
    """The first element of `part` of a box with `strides`, and how many there are from it to the last."""
    first = sum(o * s for o, s in zip(part.offsets, strides, strict=True))
    return first, 1 + sum((n - 1) * s for n, s in zip(part.sizes, strides, strict=True))


def _slabs(part: Box, strides: tuple[int, ...], most: int) -> Iterator[Box]:
    """`part` in boxes that span at most `most` elements of the box that it is of."""
    _, span = _run(part, strides)
    # The first dimension with more than one element is cut; where a single one of it is too much, the next.
    dim = next((d for d, size in enumerate(part.sizes) if size > 1), None)
    if span <= most or dim is None:
        yield part
        return
    together = max(1, 1 + (most - 1 - (span - 1 - (part.sizes[dim] - 1) * strides[dim])) // strides[dim])
    for start in range(0, part.sizes[dim], together):
        offsets, sizes = list(part.offsets), list(part.sizes)
        offsets[dim] += start
        sizes[dim] = min(together, part.sizes[dim] - start)
        yield from _slabs(Box(tuple(offsets), tuple(sizes)), strides, most)


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _key(item: WriteItem) -> str:
    return f"{item.index.fqn}@{','.join(map(str, _box(item).offsets))}"


def _nbytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return _box(item).numel * _dtype(item).itemsize


def _check_finite(key: str, block: Tensor) -> None:
    """Raise NotFinite where an element of `block` is not."""
    # A sum is infinite or NaN if any element is, takes half the time of the extremes, and no memory; that of large
    # numbers may overflow, so the extremes, which NaN spoils both, have the last word.
    if not block.is_floating_point() or torch.isfinite(block.sum()):
        return
    if not all(map(torch.isfinite, torch.aminmax(block))):
        raise NotFinite(f"{key.rpartition('@')[0]} is not finite")
