"""Watches the ranks of one host: notices the first that fails, passes stop signals on, ends the others in time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Self

from meshwright.spec.exits import (
    ANSWER_NO,
    FAILED,
    INTERRUPTED,
    OK,
    ORDERLY,
    READER_GONE,
    TERMINATED,
    WRONG_INPUT,
)
from meshwright.train.postmortem import Evidence, Failed, Failure
from meshwright.train.signals import SECOND_INTERRUPT_AFTER

PATIENCE = 5.0
"""Seconds from SIGTERM to SIGKILL for the ranks that survive another's failure."""
SETTLE = 0.3
"""Seconds after a failure in which the ranks it takes down may leave their own word, before they are told to end."""


class StopAskedError(Exception):
    """The launcher was asked to stop while it had no ranks; the signal is `StopRequests.signal`."""


class StopRequests:
    """The launcher's own stop signals, remembered for the next look at the ranks; a context manager.

    SIGHUP (the terminal went away) counts as SIGTERM, unless it was ignored before, as under nohup.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.at_once = False
        self._raising = False
        self._since = 0.0
        self._former: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = (signal.SIGTERM if number == signal.SIGHUP else number), now
        elif number == signal.SIGINT and now - self._since > SECOND_INTERRUPT_AFTER:
            self.at_once = True
        if self._raising:
            raise StopAskedError

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Where there are no ranks that could stop in order: a signal, before or within, raises StopAskedError."""
        if self.signal is not None:
            raise StopAskedError
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Watch:
    """One look at a time (`look`, every tenth of a second) until there is an exit code.

    A rank is over in order with 0, 3, 130, 141 or 143; anything else is a failure and ends the run. Once a stop is
    asked for, by a signal to the launcher or by a rank that ended because of one, the ranks have `grace` seconds,
    counted anew whenever one of them communicates or its black box says that it advances.
    """

    def __init__(
        self,
        processes: Mapping[int, subprocess.Popen[bytes]],
        evidence: Evidence,
        requests: StopRequests,
        *,
        grace: float,
        say: Callable[[str], None],
    ) -> None:
        self.processes = processes
        self.evidence = evidence
        self.failed: Failed | None = None
        self.ended_at: float | None = None
        """When the first rank's end was noticed, in seconds since the epoch."""
        self._ask: int | None = None
        self._evidence, self._requests, self._grace, self._say = evidence, requests, grace, say
        self._ends: dict[int, tuple[int, float]] = {}
        self._forwarded = False
        self._progress: tuple[object, ...] = ()
        self._deadline: float | None = None

    def look(self) -> int | None:
        """The exit code of the whole command once all ranks have ended, else None."""
        self._note_ends()
        if any(code not in ORDERLY for code, _ in self._ends.values()):
            return self._fail()
        if len(self._ends) == len(self.processes):
            end_groups(self.processes, patience=0)
            return self._orderly_code()
        if self._stop_signal() is not None:
            return self._stop()
        return None

    @property
    def over(self) -> bool:
        """Whether all ranks have ended."""
        self._note_ends()
        return len(self._ends) == len(self.processes)

    @property
    def asked_here(self) -> bool:
        """Whether the ranks stopped because of a signal to this launcher or to one of its ranks: not another node's."""
        boxes = (self._evidence.box(rank) for rank in self.processes)
        return self._requests.signal is not None or any(box.asked for box in boxes if box)

    def wind_up(self) -> None:
        """Have the ranks stop in order, as if they had been sent SIGTERM, and wait until they have ended."""
        self._ask = signal.SIGTERM
        while self.look() is None:
            time.sleep(0.05)

    def give_up(self) -> None:
        """End the ranks without further ado: what they wait for will not come."""
        self._end_all(patience=0)
        self._note_ends()

    def _note_ends(self) -> None:
        for rank, process in self.processes.items():
            if rank not in self._ends and (code := process.poll()) is not None:
                self._ends[rank] = (code, time.time())
                self.ended_at = self.ended_at or time.time()

    def _stop_signal(self) -> int | None:
        """The signal by which the run was asked to stop, at the launcher or at any one rank.

        SIGPIPE where a rank's reader has gone: that rank has ended, and the others are to end soon.
        """
        if self._requests.signal is not None or self._ask is not None:
            return self._requests.signal or self._ask
        codes = {self._stopped(rank) for rank in self._ends}
        return next((code - 128 for code in (TERMINATED, INTERRUPTED, READER_GONE) if code in codes), None)

    def _stopped(self, rank: int) -> int:
        """The exit code that an ended rank's end amounts to.

        A rank that stops in order says so in its black box and ends with 0. One that a signal to stop has killed was
        not ready for it yet; our own signals come later than this is asked.
        """
        code, _ = self._ends[rank]
        if code == OK and (box := self._evidence.box(rank)) is not None and box.stopped:
            return 128 + box.stopped
        return 128 - code if code in (-signal.SIGTERM, -signal.SIGINT) else code

    def _orderly_code(self) -> int:
        number = self._stop_signal()
        if number is not None:
            return 128 + number
        return ANSWER_NO if any(code == ANSWER_NO for code, _ in self._ends.values()) else OK

    def _stop(self) -> int | None:
        now = time.monotonic()
        number = self._requests.signal or self._ask
        if number is not None and not self._forwarded:
            self._forwarded = True
            if self._ask is None:
                self._say(f"{signal.Signals(number).name}: the ranks finish this step, save and end")
            for process in self.processes.values():
                if process.poll() is None:
                    _signal_group(process.pid, number)
        boxes = [self._evidence.box(rank) for rank in self.processes]
        progress = (len(self._ends), *((box.sequence, box.ticks) if box else None for box in boxes))
        if self._deadline is None or progress != self._progress:
            self._progress, self._deadline = progress, now + self._grace
        if not self._requests.at_once and now < self._deadline:
            return None
        self._say("stopped at once" if self._requests.at_once else f"no progress in {self._grace:g} s: ranks killed")
        self._end_all(patience=0)
        return self._orderly_code()

    def _fail(self) -> int:
        """End the others and work out who was first; what they were doing is read before they are disturbed."""
        boxes = {rank: self._evidence.box(rank) for rank in self.processes}
        settled = time.monotonic() + SETTLE
        while time.monotonic() < settled and len(self._ends) < len(self.processes):
            time.sleep(0.02)
            self._note_ends()
        failures = self._failures()
        finished = frozenset(rank for rank, (code, _) in self._ends.items() if code in ORDERLY)
        number = self._stop_signal()
        self._end_all(PATIENCE)
        if number is not None and all(f.echo or f.by_signal == number for f in failures):
            self._say("stopped before the ranks could save")  # a rank was not ready for the signal and died of it
            return 128 + number
        self.failed = Failed(failures, boxes, finished)
        return WRONG_INPUT if self.failed.first.wrong_input else FAILED

    def _failures(self) -> list[Failure]:
        failures = []
        for rank in self.processes:
            code, seen = self._ends.get(rank, (None, time.time()))
            error = self._evidence.error(rank)
            if error or (code is not None and code not in ORDERLY):
                failures.append(Failure(rank, code, seen, error))
        return failures

    def _end_all(self, patience: float) -> None:
        for pid in end_groups(self.processes, patience):
            self._say(f"process {pid} does not die; it may hang in the kernel on a device or a disk")


def end_groups(processes: Mapping[int, subprocess.Popen[bytes]], patience: float) -> list[int]:
    """End all processes and whatever they started: SIGTERM, `patience` seconds, SIGKILL to each one's process group.

    Every process must lead a group of its own. Returns the ids of those that are still there after a SIGKILL.
    """
    if patience > 0:
        for process in processes.values():
            if process.poll() is None:
                _signal_group(process.pid, signal.SIGTERM)
        _wait(processes, patience)
    for process in processes.values():
        _signal_group(process.pid, signal.SIGKILL)  # a group may outlive its leader
    return _wait(processes, PATIENCE)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _wait(processes: Mapping[int, subprocess.Popen[bytes]], seconds: float) -> list[int]:
    end = time.monotonic() + seconds
    while alive := [p.pid for p in processes.values() if p.poll() is None]:
        if time.monotonic() >= end:
            break
        time.sleep(0.02)
    return alive
