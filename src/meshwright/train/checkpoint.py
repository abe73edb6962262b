"""Checkpoints that are whole or absent: a folder a step, written aside, flushed, and put in place by one rename.

    checkpoints/step-00000050/tensors.safetensors    every tensor by name
    checkpoints/step-00000050/meta.json              step and run, with the tensors' size and checksum

A process that dies anywhere in `save` leaves the former checkpoints as they were, and a hidden folder that the next
save clears away. Nothing is ever pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.spec.errors import RunError

TENSORS, META = "tensors.safetensors", "meta.json"
_NAME = re.compile(r"step-(\d{8,})")
_ASIDE = ".saving-"


class CheckpointError(RunError):
    """A checkpoint that could not be written; the former ones are untouched."""


@dataclass(frozen=True)
class Newest:
    """The newest whole checkpoint's step, None where there is none, and in words what newer ones were passed over."""

    step: int | None
    skipped: tuple[str, ...]


def path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return folder / f"step-{step:08d}"


def steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint, ascending; whether each is whole is `load`'s to find out."""
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], keep: int) -> Path:
    """Write the checkpoint of `step`, then remove all but the newest `keep`.

    `meta` must be JSON. Saving a step again replaces it. Raises CheckpointError where the file system refuses
    (disk full, no permission); what was written of this checkpoint is removed then.
    """
    aside = folder / f"{_ASIDE}{step:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(folder)
        aside.mkdir()
        _write(aside, tensors, meta)
        _put_in_place(folder, aside, path(folder, step))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"{path(folder, step)} could not be written: {error}") from error
    for old in [s for s in steps(folder) if s != step][::-1][keep - 1 :]:
        _remove(path(folder, old))
    return path(folder, step)


def load(where: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name and `meta` of one checkpoint. Raises RunError naming a file that is missing or damaged."""
    meta = _read_meta(where)
    _check(where, meta)
    try:
        return load_file(where / TENSORS, device=str(device)), meta["meta"]
    except (OSError, SafetensorError) as error:
        raise RunError(f"{where / TENSORS} cannot be read: {error}") from error


def newest(folder: Path) -> Newest:
    """Find the newest checkpoint that is whole."""
    skipped = []
    for step in reversed(steps(folder)):
        try:
            _check(path(folder, step), _read_meta(path(folder, step)))
        except RunError as error:
            skipped.append(str(error))
        else:
            return Newest(step, tuple(skipped))
    return Newest(None, tuple(skipped))


def set_aside(folder: Path, after: int) -> list[int]:
    """Rename checkpoints of steps beyond `after`, so that a run that goes another way from there does not find them.

    Returns their steps. They keep their content, as "superseded-step-…".
    """
    beyond = [step for step in steps(folder) if step > after]
    for step in beyond:
        place = path(folder, step)
        away = place.with_name(f"superseded-{place.name}")
        number = 1
        while away.exists():
            number += 1
            away = place.with_name(f"superseded-{place.name}-{number}")
        os.rename(place, away)
    return beyond


def _write(aside: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    # Copies only where a tensor is not contiguous or shares its storage, which the format cannot express.
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, aside / TENSORS)
    _flush(aside / TENSORS)
    size, checksum = _digest(aside / TENSORS)
    with open(aside / META, "w", encoding="utf-8") as file:
        json.dump({"meta": dict(meta), "bytes": size, "crc32": checksum}, file)
        file.flush()
        os.fsync(file.fileno())
    _flush(aside)


def _put_in_place(folder: Path, aside: Path, place: Path) -> None:
    if place.exists():
        # Two renames: between them the step is absent, and an older or no checkpoint is found instead.
        _remove(place)
    os.rename(aside, place)
    _flush(folder)


def _remove(place: Path) -> None:
    """Take a checkpoint away: renamed first, so that a half-removed one is never mistaken for a damaged one."""
    away = place.with_name(f"{_ASIDE}old-{place.name}")
    with contextlib.suppress(OSError):
        shutil.rmtree(away, ignore_errors=True)
        os.rename(place, away)
        shutil.rmtree(away)


def _clear_leftovers(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name.startswith(_ASIDE):
            shutil.rmtree(entry, ignore_errors=True)


def _read_meta(where: Path) -> dict[str, Any]:
    try:
        meta = json.loads((where / META).read_text(encoding="utf-8"))
        assert {"meta", "bytes", "crc32"} <= set(meta)
        return dict(meta)
    except FileNotFoundError as error:
        raise RunError(f"{where / META} is missing") from error
    except (OSError, ValueError, AssertionError) as error:
        raise RunError(f"{where / META} is damaged") from error


def _check(where: Path, meta: Mapping[str, Any]) -> None:
    try:
        size, checksum = _digest(where / TENSORS)
    except OSError as error:
        raise RunError(f"{where / TENSORS} is missing or cannot be read: {error}") from error
    if size != meta["bytes"]:
        raise RunError(f"{where / TENSORS} is damaged: {size} bytes, {meta['bytes']} were written")
    if checksum != meta["crc32"]:
        raise RunError(f"{where / TENSORS} is damaged: its checksum is not what was written")


def _digest(file: Path) -> tuple[int, int]:
    size = checksum = 0
    with open(file, "rb") as stream:
        while chunk := stream.read(1 << 22):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return size, checksum


def _flush(what: Path) -> None:
    descriptor = os.open(what, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
