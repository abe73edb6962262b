"""From a checkpoint of any layout to a Hugging Face folder, in one process.

A run of one tensor at a time is put together from the boxes that ranks have written, rounded to the folder's dtype and
written; nothing else is held. The folder is made aside and put in place by one rename.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from meshwright.convert import names
from meshwright.convert.config import config, copy_tokenizer, find_tokenizer, write_json
from meshwright.convert.contents import find, naming_an_older
from meshwright.convert.hub import INDEX, SINGLE
from meshwright.model.build import DTYPES
from meshwright.spec.boxes import boxes_of_run
from meshwright.spec.errors import RunError, UserError
from meshwright.spec.model import ModelSpec
from meshwright.train import checkpoint, folders, manifestfile, tensorfile
from meshwright.train.manifest import Manifest
from meshwright.train.parts import Part
from meshwright.train.storage import Reader
from meshwright.train.tensorfile import BLOCK, Stream

RUN = BLOCK
"""Elements of a tensor that are in memory at once; of any dtype they are whole blocks."""
Advance = Callable[[int, int], None]
_LEFT = re.compile(r"\.saving-(\d+)-(.*)")


@dataclass(frozen=True)
class Exported:
    """files: of weights. bytes: of these. tokenizer: the file that was copied, None without one."""

    where: Path
    source: Path
    step: int
    dtype: str
    files: int
    parameters: int
    bytes: int
    tokenizer: Path | None


def export(
    path: Path,
    out: Path,
    *,
    dtype: str | None = None,
    shard_size: int = 5 * 10**9,
    tokenizer: str | None = None,
    advance: Advance = lambda done, total: None,
) -> Exported:
    """Write the weights of the checkpoint at `path` (see contents.find) as a Hugging Face folder `out`.

    dtype: fp32, bf16, fp16 or float64, by default the run's. shard_size: most bytes of tensors in a file, unless one
    tensor has more. tokenizer: a tokenizer.json, or "none"; by default the run's. advance: told bytes written, and of
    all. Raises UserError where `out` is there or the model has no counterpart; RunError for a damaged checkpoint, a
    number that the dtype cannot hold, and where writing fails.
    """
    if out.exists() or out.is_symlink():
        raise UserError(f"{out}: is there already, and is not overwritten; name a folder that is not")
    where = find(path)
    with naming_an_older(path, where):
        found = checkpoint.manifest_of(where)
        manifestfile.check_meta(found.meta)
    spec = _spec(where, found)
    precision = dtype or str(found.meta["run"]["precision"])
    named = str(found.meta["run"]["data"]["tokenizer"]) if tokenizer is None else tokenizer
    beside = None if named == "none" else find_tokenizer(named)
    about = config(spec, precision, beside)
    shapes = names.parameters(spec)
    _check_names(where, shapes, found)
    stored = _Stored(where, found, path)
    streams = list(_streams(stored, shapes, DTYPES[precision], advance))
    shards = _shards(streams, shard_size)
    _in_one_rename(out, lambda folder: _fill(folder, shards, about, beside))
    total = sum(stream.nbytes for stream in streams)
    number = sum(map(math.prod, shapes.values()))
    return Exported(out, where, int(found.meta["step"]), precision, len(shards), number, total, beside)


def _spec(where: Path, found: Manifest) -> ModelSpec:
    try:
        return ModelSpec.model_validate(found.meta["run"]["model"])
    except ValidationError:
        raise RunError(f"{where} is of a model that this release does not know") from None


def _check_names(where: Path, shapes: Mapping[str, tuple[int, ...]], found: Manifest) -> None:
    stored = {
        name.removeprefix("model/"): entry.shape for name, entry in found.tensors.items() if name.startswith("model/")
    }
    differ = sorted(name for name in stored.keys() | shapes.keys() if stored.get(name) != shapes.get(name))
    if differ:
        first = differ[0]
        raise RunError(f"{where}: {first} is {stored.get(first, 'missing')}, needed {shapes.get(first, 'not at all')}")


def _streams(
    stored: _Stored, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, advance: Advance
) -> Iterator[Stream]:
    """The parameters in the model's order, each read when it is written."""
    total, done = sum(map(math.prod, shapes.values())) * dtype.itemsize, 0

    def runs(name: str) -> Iterator[Tensor]:
        nonlocal done
        length = math.prod(shapes[name])
        place = torch.empty(min(RUN, length), dtype=dtype)
        for start in range(0, length, RUN):
            found = stored.run(f"model/{name}", start, min(start + RUN, length))
            run = place[: found.numel()].copy_(found)
            if not all(map(torch.isfinite, torch.aminmax(run))):
                raise RunError(f"{name} has numbers that {str(dtype).removeprefix('torch.')} cannot hold")
            yield run
            done += run.nbytes
            advance(done, total)

    for name, shape in shapes.items():
        yield Stream(name, dtype, shape, lambda name=name: runs(name))  # type: ignore[misc]


class _Stored:
    """Any run of any tensor of the checkpoint in `where`, which was asked for as `path`."""

    def __init__(self, where: Path, found: Manifest, path: Path) -> None:
        self._where, self._found, self._path = where, found, path
        self._reader = Reader(where, found)
        self._places: dict[torch.dtype, Tensor] = {}

    def run(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) in C order, at most RUN, where the former were of that dtype. Raises RunError naming
        a file that is missing or damaged."""
        entry = self._found.tensors[name]
        if entry.dtype not in self._places:
            self._places[entry.dtype] = torch.empty(RUN, dtype=entry.dtype)
        flat, done, parts = self._places[entry.dtype][: stop - start], 0, []
        for box in boxes_of_run(entry.shape, start, stop):
            parts.append(Part(name, entry.shape, box, flat[done : done + box.numel].view(box.sizes)))
            done += box.numel
        with naming_an_older(self._path, self._where):
            self._reader.read(parts)
        return flat


def _shards(streams: Sequence[Stream], most: int) -> list[list[Stream]]:
    """The streams in order, as many in a file as have at most `most` bytes together; one at least."""
    shards: list[list[Stream]] = [[]]
    filled = 0
    for stream in streams:
        if shards[-1] and filled + stream.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(stream)
        filled += stream.nbytes
    return shards


def _fill(folder: Path, shards: Sequence[Sequence[Stream]], about: Mapping[str, Any], tokenizer: Path | None) -> None:
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensorfile.write_streams(folder / file, shard, metadata={"format": "pt"})  # which transformers asks for
        places |= {stream.name: file for stream in shard}
    if len(shards) > 1:
        total = sum(stream.nbytes for shard in shards for stream in shard)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    write_json(folder / "config.json", about)
    if tokenizer is not None:
        copy_tokenizer(tokenizer, folder)


def _in_one_rename(out: Path, fill: Callable[[Path], None]) -> None:
    """Have `fill` fill a folder aside, and make that `out`."""
    aside = folders.aside(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(out)
        aside.mkdir()
        fill(aside)
        folders.flush(aside)
        aside.rename(out)
    except OSError as error:
        raise RunError(f"{out} could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    try:
        folders.flush(out.parent)
    except OSError as error:
        why = error.strerror or error
        raise RunError(
            f"{out} is in place and whole, but {out.parent} could not be flushed, so that a loss of power may undo it: "
            f"{why}"
        ) from error


def _clear_leftovers(out: Path) -> None:
    """Remove what former exports to `out` have left that were killed."""
    for entry in out.parent.iterdir():
        left = _LEFT.fullmatch(entry.name)
        if left and left[2] == out.name and not folders.lives(int(left[1])):
            shutil.rmtree(entry, ignore_errors=True)
