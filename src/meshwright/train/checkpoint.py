"""Checkpoints that are whole or absent: a folder a step, written aside, flushed, and put in place by one rename.

    checkpoints/step-00000050/tensors.safetensors    every tensor by name
    checkpoints/step-00000050/meta.json              step and run, the tensors' size and checksum, and its own checksum

A process that dies anywhere in `save` leaves the former checkpoints as they were, and a hidden folder that the next
save clears away. A step that is saved again is moved to "former-step-…" first, and counts there until its successor
is in place. Nothing is ever pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from meshwright.spec.errors import RunError
from meshwright.train import tensorfile
from meshwright.train.folders import former, path, place, steps

__all__ = ["CheckpointError", "Newest", "NotFinite", "load", "newest", "path", "save", "set_aside", "steps"]

TENSORS, META = "tensors.safetensors", "meta.json"
_ASIDE = re.compile(r"\.saving-(\d+)-.*")  # the process that writes or removes it, and what


class CheckpointError(RunError):
    """A checkpoint that could not be written; the former ones are untouched."""


class NotFinite(RunError):
    """Tensors that nobody could go on from are not saved; the former checkpoints are untouched."""


@dataclass(frozen=True)
class Newest:
    """The newest whole checkpoint's step, None where there is none, and in words what newer ones were passed over."""

    step: int | None
    skipped: tuple[str, ...]


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    keep: int,
    advance: Callable[[], None] = lambda: None,
) -> Path:
    """Write the checkpoint of `step`, then remove all but the newest `keep`.

    `meta` must be JSON. Saving a step again replaces it. `advance` is called again and again meanwhile. Raises
    CheckpointError where the file system refuses (disk full, no permission), what was written of this checkpoint is
    removed then; NotFinite, before anything is written, where a tensor is not finite.
    """
    _check_finite(tensors, advance)
    target = place(folder, step)
    aside = _aside(target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(folder)
        aside.mkdir()
        _write(aside, tensors, meta, advance)
        _put_in_place(aside, target, former(folder, step))
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"{target} could not be written: {error}") from error
    for old in [s for s in steps(folder) if s != step][::-1][keep - 1 :]:
        _remove(path(folder, old))
    return target


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
    if beyond:
        _clear_leftovers(folder)
    for step in beyond:
        here = place(folder, step)
        away = here.with_name(f"superseded-{here.name}")
        number = 1
        while away.exists():
            number += 1
            away = here.with_name(f"superseded-{here.name}-{number}")
        os.rename(here, away)
    return beyond


def _check_finite(tensors: Mapping[str, Tensor], advance: Callable[[], None]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            # NaN spoils both; takes no memory.
            lowest, highest = torch.aminmax(tensor)
            if not (torch.isfinite(lowest) and torch.isfinite(highest)):
                raise NotFinite(f"{name} is not finite")
        advance()


def _aside(target: Path, what: str = "") -> Path:
    return target.with_name(f".saving-{os.getpid()}-{what}{target.name}")


def _write(aside: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], advance: Callable[[], None]) -> None:
    size, checksum = tensorfile.write(aside / TENSORS, tensors, advance)
    about = {"meta": dict(meta), "bytes": size, "crc32": checksum}
    with open(aside / META, "w", encoding="utf-8") as file:
        json.dump(about | {"meta_crc32": _meta_checksum(about)}, file)
        file.flush()
        os.fsync(file.fileno())
    _flush(aside)


def _meta_checksum(about: Mapping[str, Any]) -> int:
    """CRC-32 of what JSON makes of `about`, whatever the order of its keys."""
    return zlib.crc32(json.dumps(json.loads(json.dumps(about)), sort_keys=True).encode())


def _put_in_place(aside: Path, target: Path, before: Path) -> None:
    again = target.exists()
    if again:
        os.rename(target, before)
    os.rename(aside, target)
    _flush(target.parent)
    if again:
        _remove(before)


def _remove(where: Path) -> None:
    """Take a checkpoint away: renamed first, so that a half-removed one is never mistaken for a damaged one."""
    away = _aside(where, "old-")
    with contextlib.suppress(OSError):
        shutil.rmtree(away, ignore_errors=True)
        os.rename(where, away)
        shutil.rmtree(away)


def _clear_leftovers(folder: Path) -> None:
    """Finish what processes that died have begun; leave alone what belongs to one that lives."""
    for entry in folder.iterdir():
        if (match := _ASIDE.fullmatch(entry.name)) and not _lives(int(match[1])):
            shutil.rmtree(entry, ignore_errors=True)
    for step in steps(folder):
        here, before = place(folder, step), former(folder, step)
        if before.exists():
            if here.exists():
                _remove(before)
            else:
                os.rename(before, here)


def _lives(process: int) -> bool:
    """Whether another process of this number is there: what this one left over is of a save that failed."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _read_meta(where: Path) -> dict[str, Any]:
    try:
        about = json.loads((where / META).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{where / META} is missing") from error
    except OSError as error:
        raise RunError(f"{where / META} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except ValueError as error:
        raise RunError(f"{where / META} is damaged: it is not what was written") from error
    if not isinstance(about, dict) or about.keys() != {"meta", "bytes", "crc32", "meta_crc32"}:
        raise RunError(f"{where / META} is damaged: it is not what was written")
    if about.pop("meta_crc32") != _meta_checksum(about):
        raise RunError(f"{where / META} is damaged: its checksum is not what was written")
    return about


def _check(where: Path, meta: Mapping[str, Any]) -> None:
    try:
        size, checksum = tensorfile.checksum(where / TENSORS)
    except OSError as error:
        raise RunError(f"{where / TENSORS} is missing or cannot be read: {error}") from error
    if size != meta["bytes"]:
        raise RunError(f"{where / TENSORS} is damaged: {size} bytes, {meta['bytes']} were written")
    if checksum != meta["crc32"]:
        raise RunError(f"{where / TENSORS} is damaged: its checksum is not what was written")


def _flush(what: Path) -> None:
    descriptor = os.open(what, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
