"""Whether a checkpoint is whole: every byte of it is read and held against the checksums. Imports no torch.

manifest      against its own checksum; the folder's name against the step in it
each tensor   its boxes cover it exactly
each file     its length; its header names the boxes that the manifest has there, so that other programs find them
each box      every block's checksum
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from meshwright.convert.contents import find
from meshwright.spec.boxes import Box, uncovered
from meshwright.spec.errors import RunError
from meshwright.train import manifestfile
from meshwright.train.checksum import checksum


@dataclass(frozen=True)
class Verdict:
    """findings: in words what is damaged, nothing where the checkpoint is whole. bytes: how many were read."""

    path: Path
    findings: tuple[str, ...]
    tensors: int
    files: int
    bytes: int


@dataclass(frozen=True)
class _Place:
    """A box in a file: whose it is, and its entry in the manifest."""

    tensor: str
    dtype: str
    plain: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.plain["sizes"]) * manifestfile.ITEMSIZES[self.dtype]

    def __str__(self) -> str:
        return f"{self.tensor}, the box at {self.plain['offsets']} of {self.plain['sizes']}"


def check(path: Path, advance: Callable[[int, int], None] = lambda done, total: None) -> Verdict:
    """Read the checkpoint at `path` (see `find`) and tell what is damaged.

    advance: told the bytes done, and those of all files. Raises UserError where there is no checkpoint.
    """
    where = find(path)
    try:
        plain = manifestfile.read(where)
    except RunError as error:
        return Verdict(where, (str(error),), 0, 0, 0)
    findings = [*_renamed(where, plain), *_gaps(plain)]
    by_file: dict[str, list[_Place]] = {name: [] for name in plain["files"]}
    for name, about in plain["tensors"].items():
        for box in about["boxes"]:
            by_file.setdefault(box["file"], []).append(_Place(name, about["dtype"], box))
    total, done = sum(plain["files"].values()), 0
    for file, places in by_file.items():
        for found in _damage(where / file, plain["files"].get(file), places, plain["block"]):
            if isinstance(found, str):
                findings.append(found)
            else:
                done += found
                advance(done, total)
    return Verdict(where, tuple(findings), len(plain["tensors"]), len(by_file), done)


def _renamed(where: Path, plain: Mapping[str, Any]) -> Iterator[str]:
    try:
        manifestfile.look(where, plain["meta"], {})  # of the files more is told below
    except RunError as error:
        yield str(error)


def _gaps(plain: Mapping[str, Any]) -> Iterator[str]:
    for name, about in plain["tensors"].items():
        wrong = uncovered(about["shape"], [Box(tuple(b["offsets"]), tuple(b["sizes"])) for b in about["boxes"]])
        if wrong is not None:
            yield f"{name} is not whole: {wrong}"


def _damage(path: Path, length: int | None, places: list[_Place], block: int) -> Iterator[str | int]:
    """What is wrong with one file, in words; and between, bytes that were read."""
    if length is None:
        yield f"{path} is not among the files that the manifest lists"
        return
    try:
        with open(path, "rb", buffering=0) as file:
            there = path.stat().st_size
            if there != length:
                yield f"{path} is damaged: {there:,} bytes, {length:,} were written"
            if (wrong := _header_differs(file, there, places)) is not None:
                yield f"{path} is damaged: its header {wrong}"
            for place in sorted(places, key=lambda place: place.plain["start"]):
                yield from _box_damage(path, file, place, block)
    except FileNotFoundError:
        yield f"{path} is missing"
    except OSError as error:
        yield f"{path} cannot be read: {(error.strerror or str(error)).lower()}"


def _header_differs(file: BinaryIO, length: int, places: list[_Place]) -> str | None:
    """What a safetensors header says otherwise than the manifest, in words."""
    size = int.from_bytes(file.read(8), "little")
    if size > length - 8:
        return "is longer than the file"
    try:
        header = json.loads(file.read(size))
    except ValueError:
        header = None
    if not isinstance(header, dict):
        return "is not what was written"
    wanted = {
        place.plain["key"]: {
            "dtype": place.dtype,
            "shape": place.plain["sizes"],
            "data_offsets": [place.plain["start"] - 8 - size, place.plain["start"] - 8 - size + place.nbytes],
        }
        for place in places
    }
    differ = sorted(key for key in wanted.keys() | header.keys() if wanted.get(key) != header.get(key))
    return f"is wrong about {differ[0]}" if differ else None


def _box_damage(path: Path, file: BinaryIO, place: _Place, block: int) -> Iterator[str | int]:
    start, left, sums = place.plain["start"], place.nbytes, place.plain["sums"]
    file.seek(start)
    bad = 0
    for wanted in sums:
        content = _exactly(file, min(block, left))
        # Nothing at all sums up like zeros, which moments may well be.
        bad += len(content) < min(block, left) or checksum(content) != wanted
        left -= min(block, left)
        yield len(content)
    if bad:
        yield f"{path} is damaged: {place}: {bad} of {len(sums)} blocks are not what was written"


def _exactly(file: BinaryIO, size: int) -> bytes:
    """`size` bytes, fewer only at the file's end; an unbuffered file may give less at once."""
    parts = []
    while size > 0 and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
