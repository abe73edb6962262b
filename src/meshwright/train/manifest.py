"""The manifest of a checkpoint: which tensors it holds, of which boxes each is made, and where these lie.

    {"format": "meshwright checkpoint", "version": 1, "meta": {…}, "block": 4194304,
     "files": {"rank-00000.safetensors": 1234, …},                         bytes of each
     "tensors": {"model/lm_head.weight": {"dtype": "F32", "shape": [101, 6],
        "boxes": [{"offsets": [0, 0], "sizes": [50, 6], "file": "rank-00000.safetensors",
                   "key": "model/lm_head.weight@0,0", "start": 512, "sums": [305419896]}, …]}},
     "crc32": 2271560481}                                                   of all the rest

Names are the public (Hugging Face) ones behind the kind: model, exp_avg, exp_avg_sq. A box is one safetensors key;
`start` is where its bytes begin in the file, and `sums` has a checksum (tensorfile.py) for each `block` bytes of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright.spec.boxes import Box, uncovered
from meshwright.spec.errors import RunError
from meshwright.train import manifestfile
from meshwright.train.manifestfile import FORMAT, NAME, VERSION
from meshwright.train.tensorfile import BLOCK, DTYPES, TORCH_DTYPES, Stored


@dataclass(frozen=True, slots=True)
class StoredBox:
    """One box of a tensor, and where its bytes are."""

    box: Box
    file: str
    key: str
    stored: Stored

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        place = {"file": self.file, "key": self.key, "start": self.stored.start, "sums": list(self.stored.sums)}
        return {"offsets": list(self.box.offsets), "sizes": list(self.box.sizes), **place}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> StoredBox:
        box = Box(tuple(plain["offsets"]), tuple(plain["sizes"]))
        return cls(box, plain["file"], plain["key"], Stored(plain["start"], tuple(plain["sums"])))


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the numbers in its tensors. files: bytes of each, by name."""

    meta: dict[str, Any]
    files: dict[str, int]
    tensors: dict[str, Entry] = field(default_factory=dict)

    def check_cover(self) -> None:
        """Raise RunError naming a tensor whose boxes leave a gap, overlap, or lie in no file."""
        for name, entry in self.tensors.items():
            wrong = uncovered(entry.shape, [stored.box for stored in entry.boxes])
            lost = sorted({stored.file for stored in entry.boxes} - self.files.keys())
            if wrong is not None or lost:
                raise RunError(f"{name} is not whole: {wrong or f'it has boxes in {lost[0]}, which is not listed'}")

    def write(self, path: Path) -> None:
        """Write it as JSON; `folders.put_in_place` flushes it. Raises OSError."""
        manifestfile.write(path, self._plain())

    def _plain(self) -> dict[str, Any]:
        tensors = {
            name: {
                "dtype": DTYPES[entry.dtype],
                "shape": list(entry.shape),
                "boxes": [stored.plain() for stored in entry.boxes],
            }
            for name, entry in self.tensors.items()
        }
        head = {"format": FORMAT, "version": VERSION, "meta": self.meta, "block": BLOCK}
        return {**head, "files": self.files, "tensors": tensors}

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """That of the checkpoint in `folder`. Raises RunError naming the file where it is missing or damaged."""
        plain = manifestfile.read(folder)
        if plain["block"] != BLOCK:
            raise RunError(f"{folder / NAME} has checksums of {plain['block']} bytes; this release reads {BLOCK}")
        return cls(plain["meta"], plain["files"], {name: _entry(about) for name, about in plain["tensors"].items()})


def _entry(about: Mapping[str, Any]) -> Entry:
    boxes = tuple(map(StoredBox.of, about["boxes"]))
    return Entry(TORCH_DTYPES[about["dtype"]], tuple(about["shape"]), boxes)
