"""Saving a run while it trains, and finding and reading what was saved.

    training     step 50 │ forward and backward of step 51 │ update │ step 52 │ …
    a thread             │ copy │ write, flush, manifest, rename, pointer, prune │

In a thread each rank copies its part of the state into buffers that it keeps, and writes the copy (storage.py has the
format, parts.py who writes what). Forward and backward change nothing of what is saved, so training waits for the copy
only before it updates, which it seldom must. The ranks' threads agree by a process group of their own. A save begins
when the one before it is over.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.comm.mesh import Mesh
from meshwright.spec.errors import RunError
from meshwright.train import folders, manifestfile
from meshwright.train.manifest import Manifest
from meshwright.train.parts import Part, SaveParts
from meshwright.train.storage import NotFinite, Reader, Writer

# One rank alone is no mistake.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckpointError(RunError):
    """A checkpoint that could not be written; the former ones are untouched."""


@dataclass(frozen=True)
class Saved:
    """How a save ended on this rank.

    error: None, or CheckpointError or NotFinite, which say why there is no such checkpoint. but: where there is one,
    in words what failed after it was in place. stall: seconds that training stood still for it; seconds: from its
    beginning to its end.
    """

    step: int
    where: Path
    error: RunError | None
    stall: float
    seconds: float
    but: str | None = None


class Saver:
    """A run's saves below `folder`, on this rank.

    parts: what this rank writes, views of what trains, which must stay where it is, and between `save` and `copied` as
    it is. keep: newest checkpoints kept;
    keep_every: steps that it divides are kept beside these, 0 for none. background=False saves while training waits,
    and takes no memory. All ranks make one, and save the same steps.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        parts: Sequence[Part],
        *,
        keep: int,
        keep_every: int = 0,
        background: bool = True,
    ) -> None:
        self.folder, self.mesh = folder, mesh
        self.keep, self.keep_every, self.background = keep, keep_every, background
        self._parts = list(parts)
        self._staged: list[Part] | None = None
        self._group = mesh.storage_group()
        self._running: _Save | None = None

    def save(self, step: int, meta: Mapping[str, Any], *, background: bool = True) -> Saved | None:
        """Begin to save `step` with `meta`, which must be JSON; returns how the save before ended, if there was one.

        Call `copied` before the parts change. With background=False, for a caller who waits in any case, it is over on
        return and nothing is copied.
        """
        former = self.wait()
        background = background and self.background
        began = time.perf_counter()
        parts = self._parts
        if background:
            if self._staged is None:
                self._staged = [replace(part, tensor=_host_buffer(part.tensor)) for part in self._parts]
            parts = self._staged
        writer = Writer(
            self.folder, step, meta, keep=self.keep, keep_every=self.keep_every, advance=self.mesh.patience.advance
        )
        self._running = _Save(step, self._copy, lambda: self._write(writer, parts), began, background)
        return former

    def copied(self) -> None:
        """Wait until the parts may change: those of the save under way, if there is one, have been copied."""
        if self._running is not None:
            began = time.perf_counter()
            self._running.copied.wait()
            self._running.stall += time.perf_counter() - began

    def poll(self) -> Saved | None:
        """How the save under way ended, once, if it is over by now."""
        return self.wait() if self._running is not None and self._running.over else None

    def wait(self) -> Saved | None:
        """Wait for the save under way, if there is one, and tell how it ended.

        Raises RunError where no rank's writing advances any more.
        """
        running, self._running = self._running, None
        if running is None:
            return None
        began = time.perf_counter()
        self.mesh.patience.wait(lambda: running.over, f"the checkpoint of step {running.step}")
        stall = running.stall + time.perf_counter() - began
        where = folders.place(self.folder, running.step)
        seconds, first = running.ended - running.began, _first(running.error)
        if isinstance(first, folders.InPlaceError):
            return Saved(running.step, where, None, stall, seconds, but=str(first))
        return Saved(running.step, where, _in_words(first, where), stall, seconds)

    def _copy(self) -> None:
        """The parts as they are now, into buffers that are made at the first save and used again."""
        assert self._staged is not None
        for part, staged in zip(self._parts, self._staged, strict=True):
            staged.tensor.copy_(part.tensor, non_blocking=True)
        if self.mesh.device.type != "cpu":
            torch.accelerator.synchronize(self.mesh.device)

    def _write(self, writer: Writer, parts: list[Part]) -> None:
        try:
            dcp.save(
                {},
                storage_writer=writer,
                planner=SaveParts(parts),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except BaseException:
            writer.give_up()
            raise


class _Save:
    """One save under way: in a thread, after a copy; or over when it is made."""

    def __init__(
        self, step: int, copy: Callable[[], None], write: Callable[[], None], began: float, background: bool
    ) -> None:
        self.step, self.began = step, began
        self.error: BaseException | None = None
        self.ended = 0.0
        self.copied = threading.Event()
        self._copy, self._write = copy if background else None, write
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        if background:
            self._thread.start()
        else:
            self._run()
        self.stall = time.perf_counter() - began

    @property
    def over(self) -> bool:
        return self.ended > 0

    def _run(self) -> None:
        try:
            if self._copy is not None:
                self._copy()
            self.copied.set()
            self._write()
        except BaseException as error:  # told by Saver.wait, on the thread that trains
            self.error = error
        finally:
            self.copied.set()
            self.ended = time.perf_counter()


def _host_buffer(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


def _first(error: BaseException | None) -> BaseException | None:
    """That of the lowest rank; torch collects those of all in one."""
    if isinstance(error, CheckpointException):
        _, (first, _) = min(error.failures.items())
        return first
    return error


def _in_words(error: BaseException | None, where: Path) -> RunError | None:
    """What a save's error means."""
    if error is None:
        return None
    if isinstance(error, NotFinite):
        return error
    if isinstance(error, OSError | RunError):
        return CheckpointError(f"{where} could not be written: {error}")
    raise error


# -- what is there ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint that looks whole: its step and manifest, None where there is none; and in words what newer
    ones were passed over."""

    step: int | None
    skipped: tuple[str, ...]


def newest(folder: Path, before: int | None = None) -> Newest:
    """Find the newest checkpoint (of a step below `before`) whose manifest and files are all there.

    Checksums of the files are taken when they are read: see `read`.
    """
    skipped = []
    for step in reversed(folders.steps(folder)):
        if before is not None and step >= before:
            continue
        try:
            manifest_of(folders.path(folder, step))
        except RunError as error:
            skipped.append(str(error))
        else:
            return Newest(step, tuple(skipped))
    return Newest(None, tuple(skipped))


def manifest_of(where: Path) -> Manifest:
    """The manifest of one checkpoint. Raises RunError naming what is missing, damaged, of the wrong length or of
    another step than the folder's."""
    found = Manifest.read(where)
    manifestfile.look(where, found.meta, found.files)
    found.check_cover()
    return found


def read(where: Path, parts: Sequence[Part], found: Manifest | None = None) -> None:
    """Fill `parts` from the checkpoint in `where`. Raises RunError naming a file that is missing or damaged, or a
    tensor that is not there; then some parts may have been filled."""
    Reader(where, manifest_of(where) if found is None else found).read(parts)


def load(where: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors of one checkpoint, whole, and its meta; on the CPU. Raises RunError as `read` does."""
    found = manifest_of(where)
    tensors = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in found.tensors.items()}
    read(where, [Part.whole(name, tensor) for name, tensor in tensors.items()], found)
    return tensors, found.meta
