"""What a run measured, step by step: metrics.jsonl and, of the same numbers, TensorBoard's event files."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FILE = "metrics.jsonl"
KEPT = ("restart",)
"""Splits whose lines stay when a run goes back to an earlier step: they tell of the going back."""
_EVENTS = "events.out.tfevents.*"


class Metrics:
    """Writes measurements into `folder`. A disk that fails costs the measurements and a warning, never the run.

    metrics.jsonl holds one JSON object a line: step, split, and the values, null for those that are not finite.
    A run that begins at step 0 begins a new file and keeps an older one as metrics.jsonl.old; one that goes on after
    step `start` first drops the lines of later steps, which are trained again, so that none appears twice; lines about
    restarts stay. `again`: it does so at step 0 too, its ranks having been started again. `enabled=False` touches
    nothing. `warn` takes the text of the one warning; by default it is a Python warning.
    """

    def __init__(
        self, folder: Path, *, enabled: bool, start: int, again: bool = False, warn: Callable[[str], None] | None = None
    ) -> None:
        self._path = folder / FILE
        self._enabled = enabled
        self._start = start
        self._keeps = bool(start) or again
        self._warn = warn or (lambda text: warnings.warn(text.removeprefix("warning: "), RuntimeWarning, stacklevel=4))
        self._warned = False
        self.last: dict[str, int] = {}
        """By split the last step that the file had when it was opened, of what was kept of it."""
        self._lines: FileIO | None = None
        self._board: SummaryWriter | None = None

    def __enter__(self) -> Self:
        if self._enabled:
            self._attempt(FILE, self._open_lines)
            self._attempt(_EVENTS, self._open_board)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lines, board = self._lines, self._board
        self._lines = self._board = None
        if lines is not None:
            self._attempt(FILE, lines.close)
        if board is not None:
            self._attempt(_EVENTS, board.close)

    def write(self, step: int, split: str, values: Mapping[str, float | int | None]) -> None:
        """Record `values` of `step` (from 1) under `split`, such as train or validation."""
        if self._lines is not None:
            self._attempt(FILE, lambda: self._write_line(step, split, values))
        if self._board is not None:
            self._attempt(_EVENTS, lambda: self._write_board(step, split, values))

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if not self._warned:
                self._warned = True
                why = (error.strerror or str(error)).lower()
                self._warn(f"warning: {self._path.parent / name} cannot be written, metrics are incomplete: {why}")

    # -- metrics.jsonl ------------------------------------------------------------------------------------------

    def _open_lines(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            if self._keeps:
                self._drop_later()
            else:
                os.replace(self._path, self._path.with_name(f"{FILE}.old"))
        self._lines = self._path.open("ab", buffering=0)

    def _drop_later(self) -> None:
        draft = self._path.with_name(f"{FILE}.tmp")
        with self._path.open(encoding="utf-8", errors="replace") as lines, draft.open("w", encoding="utf-8") as kept:
            kept.writelines(self._up_to(lines))
            kept.flush()
            os.fsync(kept.fileno())
        os.replace(draft, self._path)

    def _up_to(self, lines: TextIO) -> Iterator[str]:
        """What is kept: see the class. What is no whole line, as a killed run leaves, is dropped."""
        for line in lines:
            try:
                about = json.loads(line)
                split, step = about.get("split"), int(about["step"])
                keep = line.endswith("\n") and (step <= self._start or split in KEPT)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            if keep:
                self.last[split] = max(step, self.last.get(split, 0))
                yield line

    def _write_line(self, step: int, split: str, values: Mapping[str, float | int | None]) -> None:
        assert self._lines is not None
        finite = {name: _finite(value) for name, value in values.items()}
        line = json.dumps({"step": step, "split": split, **finite}, allow_nan=False).encode() + b"\n"
        before = self._lines.seek(0, os.SEEK_END)
        try:
            if self._lines.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            # Room may be made while the run goes on: the next line must not follow half of this one.
            with contextlib.suppress(OSError):
                self._lines.truncate(before)
            raise

    # -- TensorBoard ----------------------------------------------------------------------------------------------

    def _open_board(self) -> None:
        # Imported here: seconds of work that only rank 0 needs.
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(self._path.parent), purge_step=self._start + 1)

    def _write_board(self, step: int, split: str, values: Mapping[str, float | int | None]) -> None:
        assert self._board is not None
        for name, value in values.items():
            if _finite(value) is not None:
                self._board.add_scalar(f"{split}/{name}", value, step)


def _finite(value: float | int | None) -> float | int | None:
    return value if value is not None and math.isfinite(value) else None
