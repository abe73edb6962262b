"""Signals in a rank: stop in order when asked to, and never outlive the launcher. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

LAUNCHER_PID = "MESHWRIGHT_LAUNCHER_PID"
"""Environment variable in which the launcher leaves its process id for the ranks."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SECOND_INTERRUPT_AFTER = 1.0
"""Seconds. A terminal or a supervisor often delivers one Ctrl-C twice; a person's second one comes later than this."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> bool:
    """Have the kernel kill this process (SIGKILL) when its parent dies, even by `kill -9`.

    Call it first thing in a rank. If the parent died before the call, which the launcher's process id in the
    environment or a change of parent gives away, the process ends here. Returns False where the system has no such
    service (anything but Linux).
    """
    parent = int(os.environ.get(LAUNCHER_PID) or os.getppid())
    if not sys.platform.startswith("linux"):
        return False
    done: bool = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    if os.getppid() != parent:  # it died before prctl took hold: no signal will come
        os._exit(128 + signal.SIGKILL)
    return done


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Around work that leaves nothing half done: SIGTERM and SIGHUP end it as SystemExit(143), and not in a death."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    former: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                former[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class StopFlag:
    """Remembers that SIGINT or SIGTERM came, so that the loop can end at a step's boundary.

    `requested` is None, or the number of the first stop signal; the loop shares it with all ranks. Installing twice
    or receiving more signals changes nothing, except that a SIGINT more than a second after the first signal raises
    KeyboardInterrupt: whoever presses Ctrl-C again does not want to wait. Handlers can only be set in the main thread;
    elsewhere the flag stays None. Usable as a context manager; `restore` puts the former handlers back.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._since = 0.0
        self._former: dict[int, Any] = {}

    def install(self) -> Self:
        if not self._former and threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def restore(self) -> None:
        while self._former:
            number, handler = self._former.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested is None:
            self.requested, self._since = number, now
        elif number == signal.SIGINT and now - self._since > SECOND_INTERRUPT_AFTER:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        return self.install()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.restore()
