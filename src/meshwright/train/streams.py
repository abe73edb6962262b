"""The process's standard streams in whatever state they were handed over: closed, full, or read by nobody."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import TextIO


def reopen() -> None:
    """Give closed standard streams a place, before some file takes their number and receives what is said to them.

    What is said to a closed stderr goes nowhere. A closed stdout refuses every write, so that a result which reaches
    nobody is an error.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is taken, and that is this one. Processes started from here have it too.
            os.set_inheritable(os.open(os.devnull, flags), True)
    # None where the interpreter found them closed.
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - open until the end, like the one it stands for
    if sys.stderr is None:
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def reader_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more; if so, nothing more is written to it."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):
        return False
    if gone:
        _give_up(sys.stdout)
    return gone


def stdout_fails() -> str | None:
    """Why stdout takes nothing, in words, None where it does; if it takes nothing, nothing more is written to it."""
    try:
        sys.stdout.flush()  # what failed before is in the buffer still
        os.write(sys.stdout.fileno(), b"")  # without a buffer it is lost
    except (ValueError, AttributeError):  # no file at all, as in tests
        return None
    except OSError as error:
        _give_up(sys.stdout)
        return (error.strerror or str(error)).lower()
    return None


def finish() -> None:
    """Write out what is buffered; the interpreter must not fail over a broken stream at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            _give_up(stream)


def _give_up(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
