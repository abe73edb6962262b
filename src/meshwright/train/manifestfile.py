"""A manifest as a file: read and checked against its own checksum, as JSON has it; manifest.py says what is in it.

Imports no torch, so that what is in a checkpoint can be told at once.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.spec.errors import RunError
from meshwright.train import folders

NAME = "manifest.json"
_FORMER_NAME = "meta.json"  # what stood in its place before version 1
FORMAT, VERSION = "meshwright checkpoint", 1
ITEMSIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "BOOL": 1}
ITEMSIZES |= {"U64": 8, "U32": 4, "U16": 2, "U8": 1}
"""Bytes of an element, by safetensors' name of the dtype."""


def read(folder: Path) -> dict[str, Any]:
    """The manifest of the checkpoint in `folder`. Raises RunError naming the file where it is missing or damaged."""
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
    if plain.pop("crc32") != checksum(plain):
        raise RunError(f"{path} is damaged: its checksum is not what was written")
    if plain["version"] != VERSION:
        raise RunError(f"{path} is of version {plain['version']} of the format; this release reads {VERSION}")
    return plain


def write(path: Path, plain: Mapping[str, Any]) -> None:
    """Write what `read` reads. Raises OSError."""
    path.write_text(json.dumps({**plain, "crc32": checksum(plain)}), encoding="utf-8")


def look(folder: Path, meta: Mapping[str, Any], files: Mapping[str, int]) -> None:
    """What can be told of a checkpoint without reading its files: that each is there with its length, and that the
    folder is that of its step. Raises RunError."""
    named, step = folders.step_of(folder.absolute()), meta.get("step")
    if named is not None and step is not None and step != named:
        raise RunError(f"{folder} holds step {step}: somebody has renamed it")
    for name, size in files.items():
        try:
            there = (folder / name).stat().st_size
        except OSError as error:
            raise RunError(f"{folder / name} is missing or cannot be read: {error.strerror}") from error
        if there != size:
            raise RunError(f"{folder / name} is damaged: {there} bytes, {size} were written")


def looks_whole(folder: Path) -> bool:
    """Whether `look` finds nothing; checksums of the files are taken when they are read."""
    try:
        plain = read(folder)
        look(folder, plain["meta"], plain["files"])
    except RunError:
        return False
    return True


def checksum(plain: Mapping[str, Any]) -> int:
    """CRC-32 of what JSON makes of it, whatever the order of its keys."""
    return zlib.crc32(json.dumps(json.loads(json.dumps(plain)), sort_keys=True).encode())
