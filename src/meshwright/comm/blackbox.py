"""The black box: a few hundred bytes in a memory-mapped file that say what a rank is doing, and outlive it.

The rank stores into mapped memory (no system call), and the kernel keeps the page when the process is killed, so the
launcher can read what a dead rank was in. Writes are not atomic: a rank killed within one leaves mixed text, never
an unreadable file.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from meshwright.spec.errors import UserError

ENVIRONMENT = "MESHWRIGHT_BLACKBOX"
"""Environment variable with the folder of the black boxes; the launcher sets it."""

_MAGIC = b"MWBOX01\n"
_HEAD = struct.Struct("<8sIIq")  # magic, pid, rank, step
_ENTRY = struct.Struct("<qdB160s")  # sequence number, time, state, operation + axis + reason
_NOTE = struct.Struct("<qd104s")  # sequence number at which it was noted, time, text
_STEP = struct.Struct("<q")
_STEP_AT = 16
_ENTRY_AT = _HEAD.size
_STATE_AT = _ENTRY_AT + 16
_NOTE_AT = _ENTRY_AT + _ENTRY.size
_TICKS = struct.Struct("<q")
_TICKS_AT = _NOTE_AT + _NOTE.size
_STOP = struct.Struct("<ii")  # signal that this rank was sent; signal that all agreed to stop for
_STOP_AT = _TICKS_AT + _TICKS.size
_SIZE = _STOP_AT + _STOP.size
_WIDTHS = (24, 32, 104)  # bytes of operation, axis, reason
_STATES = ("new", "in", "done")
_IN, _DONE = 1, 2


@dataclass(frozen=True, slots=True)
class Record:
    """What a black box says."""

    pid: int
    rank: int
    step: int
    sequence: int  # collectives issued so far; the last one is described below
    state: str  # "in": issuing or waiting for it; "done": back from it; "new": none yet
    op: str
    axis: str
    reason: str
    time: float  # seconds since the epoch at which that collective was issued or waited for
    note: str  # what the rank said it was doing since that collective; "" if nothing
    ticks: int  # how often the rank said that it advances in work without communication
    asked: int = 0  # the signal by which this rank itself was asked to stop
    stopped: int = 0  # the signal for which all ranks agreed to stop, once they have stopped


def box_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """The black box of a rank in the launcher's folder."""
    return Path(folder) / f"rank{rank}.box"


class BlackBox:
    """The writing side. `path` None keeps it in anonymous memory: same cost, nothing outlives the process."""

    def __init__(self, path: str | os.PathLike[str] | None = None, rank: int = 0) -> None:
        self._map = _open(path)
        self._texts: dict[tuple[str, str, str], bytes] = {}
        self._sequence = 0
        self._step = 0
        self._ticks = 0
        _HEAD.pack_into(self._map, 0, _MAGIC, os.getpid(), rank, 0)

    @classmethod
    def from_environment(cls, rank: int) -> BlackBox:
        """The box in the launcher's folder, or an anonymous one. Raises UserError if the folder cannot be written."""
        folder = os.environ.get(ENVIRONMENT)
        return cls(box_path(folder, rank) if folder else None, rank)

    @property
    def step(self) -> int:
        """The optimizer step the rank is in."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        _STEP.pack_into(self._map, _STEP_AT, step)

    @property
    def sequence(self) -> int:
        """Collectives entered so far."""
        return self._sequence

    def enter(self, op: str, axis: str, reason: str) -> int:
        """This rank issues its next collective; returns its sequence number, from 1 on."""
        self._sequence += 1
        self.enter_again(self._sequence, op, axis, reason)
        return self._sequence

    def enter_again(self, sequence: int, op: str, axis: str, reason: str) -> None:
        """This rank waits for the collective that had this sequence number."""
        key = (op, axis, reason)
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = b"".join(_clip(t, w) for t, w in zip(key, _WIDTHS, strict=True))
        _ENTRY.pack_into(self._map, _ENTRY_AT, sequence, time.time(), _IN, text)

    def leave(self) -> None:
        """Back from the collective entered last."""
        self._map[_STATE_AT] = _DONE

    def note(self, text: str) -> None:
        """This rank does something other than communicate, for example "loading data"; holds until the next `enter`."""
        _NOTE.pack_into(self._map, _NOTE_AT, self._sequence, time.time(), _clip(text, 104))
        self.tick()

    def tick(self) -> None:
        """This rank advances in work without communication that may take long, such as a save.

        Whoever waits for the rank tells by this a slow one from one that hangs.
        """
        self._ticks += 1
        _TICKS.pack_into(self._map, _TICKS_AT, self._ticks)

    def stopped(self, agreed: int, asked: int) -> None:
        """All ranks stopped in order because of signal `agreed`; `asked`: the one that came to this rank, 0 if none."""
        _STOP.pack_into(self._map, _STOP_AT, asked, agreed)


def read(path: str | os.PathLike[str]) -> Record | None:
    """What a rank, alive or dead, has left. A truncated file reads as far as it goes; None if nothing is readable."""
    try:
        data = Path(path).read_bytes()
    except OSError:
        return None
    if not data.startswith(_MAGIC):
        return None
    data = data[:_SIZE].ljust(_SIZE, b"\0")
    _, pid, rank, step = _HEAD.unpack_from(data, 0)
    sequence, entered, state, text = _ENTRY.unpack_from(data, _ENTRY_AT)
    noted, _, note = _NOTE.unpack_from(data, _NOTE_AT)
    (ticks,) = _TICKS.unpack_from(data, _TICKS_AT)
    asked, stopped = _STOP.unpack_from(data, _STOP_AT)
    op, axis, reason = (_text(text[start : start + width]) for start, width in zip((0, 24, 56), _WIDTHS, strict=True))
    return Record(
        pid=pid,
        rank=rank,
        step=step,
        sequence=sequence,
        state=_STATES[state] if state < len(_STATES) else "new",
        op=op,
        axis=axis,
        reason=reason,
        time=entered,
        note=_text(note) if noted >= sequence else "",
        ticks=ticks,
        asked=asked,
        stopped=stopped,
    )


def _open(path: str | os.PathLike[str] | None) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, _SIZE)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            # Real blocks, not a hole: writing into a hole of a full disk would kill the process with SIGBUS.
            os.write(file, bytes(_SIZE))
            return mmap.mmap(file, _SIZE)
        finally:
            os.close(file)
    except (OSError, ValueError) as exc:
        raise UserError(f"{ENVIRONMENT}: {path} cannot be written ({exc}); name a folder that can") from exc


def _clip(text: str, width: int) -> bytes:
    return text.encode("utf-8", "replace")[:width].ljust(width, b"\0")


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "replace")
