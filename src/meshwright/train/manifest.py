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

import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright.spec.boxes import Box, uncovered
from meshwright.spec.errors import RunError
from meshwright.train.tensorfile import BLOCK, DTYPES, TORCH_DTYPES, Stored

NAME = "manifest.json"
_FORMER_NAME = "meta.json"  # what stood in its place before version 1
FORMAT, VERSION = "meshwright checkpoint", 1


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
        """Write it as JSON and flush it to the disk. Raises OSError."""
        plain = self._plain()
        with open(path, "w", encoding="utf-8") as file:
            json.dump(plain | {"crc32": _checksum(plain)}, file)
            file.flush()
            os.fsync(file.fileno())

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
        path = folder / NAME
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            if (folder / _FORMER_NAME).exists():
                raise RunError(f"{folder} is of an older release; this one does not read its format") from error
            raise RunError(f"{path} is missing") from error
        except OSError as error:
            raise RunError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
        except ValueError as error:
            raise RunError(f"{path} is damaged: it is not what was written") from error
        if not isinstance(plain, dict) or plain.get("format") != FORMAT or "crc32" not in plain:
            raise RunError(f"{path} is damaged: it is not what was written")
        if plain.pop("crc32") != _checksum(plain):
            raise RunError(f"{path} is damaged: its checksum is not what was written")
        if plain["version"] != VERSION or plain["block"] != BLOCK:
            raise RunError(f"{path} is of version {plain['version']} of the format; this release reads {VERSION}")
        return cls(plain["meta"], plain["files"], {name: _entry(about) for name, about in plain["tensors"].items()})


def _entry(about: Mapping[str, Any]) -> Entry:
    boxes = tuple(map(StoredBox.of, about["boxes"]))
    return Entry(TORCH_DTYPES[about["dtype"]], tuple(about["shape"]), boxes)


def _checksum(plain: Mapping[str, Any]) -> int:
    """CRC-32 of what JSON makes of it, whatever the order of its keys."""
    return zlib.crc32(json.dumps(json.loads(json.dumps(plain)), sort_keys=True).encode())
