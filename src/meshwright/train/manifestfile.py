"""A manifest as a file: read and checked against its own checksum, as JSON has it; manifest.py says what is in it.

Imports no torch, so that what is in a checkpoint can be told at once.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, NonNegativeInt, PositiveInt, ValidationError

from meshwright.spec.errors import RunError
from meshwright.train import folders

NAME = "manifest.json"
_FORMER_NAME = "meta.json"  # what stood in its place before version 1
FORMAT, VERSION = "meshwright checkpoint", 1
ITEMSIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "BOOL": 1}
ITEMSIZES |= {"U64": 8, "U32": 4, "U16": 2, "U8": 1}
"""Bytes of an element, by safetensors' name of the dtype."""


class _Box(BaseModel, strict=True):
    offsets: list[int]
    sizes: list[int]
    file: str
    key: str
    start: NonNegativeInt
    sums: list[int]


class _Tensor(BaseModel, strict=True):
    dtype: Literal[tuple(ITEMSIZES)]  # type: ignore[valid-type]
    shape: list[NonNegativeInt]
    boxes: list[_Box]


class _Run(BaseModel, strict=True):
    model: dict[str, Any]
    precision: str
    data: dict[str, Any]


class _Meta(BaseModel, strict=True):
    step: NonNegativeInt
    updates: NonNegativeInt
    run: _Run


class _Whole(BaseModel, strict=True):
    meta: dict[str, Any]
    block: PositiveInt
    files: dict[str, NonNegativeInt]
    tensors: dict[str, _Tensor]


def read(folder: Path) -> dict[str, Any]:
    """The manifest of the checkpoint in `folder`. Raises RunError naming the file where it is missing or damaged, or
    some other program wrote it otherwise than manifest.py says."""
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
    if plain.get("version") != VERSION:
        raise RunError(f"{path} is of version {plain.get('version')} of the format; this release reads {VERSION}")
    if (wrong := _misfit(plain)) is not None:
        raise RunError(f"{path} is damaged: {wrong}")
    return plain


def _misfit(plain: Mapping[str, Any]) -> str | None:
    """What is not of the form that it should be, or does not fit together, in words."""
    try:
        whole = _Whole.model_validate(plain)
    except ValidationError as error:
        return _words(error)
    for name, tensor in whole.tensors.items():
        for box in tensor.boxes:
            nbytes = math.prod(box.sizes) * ITEMSIZES[tensor.dtype]
            if len(box.sums) != -(-nbytes // whole.block):
                return f"{name} has {len(box.sums)} checksums for {nbytes} bytes"
            if box.start + nbytes > whole.files.get(box.file, box.start + nbytes):
                return f"{name} has a box that lies outside of {box.file}"
    return None


def _words(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{' '.join(map(str, first['loc']))}: {first['msg'][0].lower()}{first['msg'][1:]}"


def check_meta(meta: Mapping[str, Any]) -> None:
    """Raise RunError where `meta` does not tell which run is to go on from where, as every run's checkpoint does."""
    try:
        _Meta.model_validate(dict(meta))
    except ValidationError as error:
        raise RunError(f"the checkpoint was not written by a run: {_words(error)}") from error


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
