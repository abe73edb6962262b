"""Messages on their way out, whose tensors are let go as soon as they have left.

Gloo says that a send is over to nobody but who waits for it. A pipeline has better things to do than to wait, and until
it does the tensor stays: of as many micro-batches as have been sent on. So on the CPU a thread waits.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue

from meshwright.comm.pending import Pending

LARGE = 1 << 18
"""Bytes from which on a message is watched: to wake a thread for a smaller one takes longer than to send it."""


class Outbox:
    """Takes sends under way, in the order of their issue; `drain` at the end of a step.

    watched: large ones, by a thread. Not so with an accelerator, whose streams would be made to wait, nor where sends
    are compared (comm/check.py), which is for the rank's own thread to do: then tensors stay until `drain`.
    """

    def __init__(self, *, watched: bool) -> None:
        self._watched = watched
        self._posted: list[Pending] = []
        self._watch: _Watch | None = None

    def post(self, pending: Pending, size: int) -> None:
        """Take a send of `size` bytes; nobody else may wait for it."""
        self._posted.append(pending)
        if self._watched and size >= LARGE:
            if self._watch is None:
                self._watch = _Watch()
                # Of the thread's own, so that it does not keep this alive.
                threading.Thread(target=self._watch.run, daemon=True).start()
            self._watch.add(pending)

    def drain(self) -> None:
        """Return when everything has left. Raises RunError where something could not."""
        if self._watch is not None:
            self._watch.until_all_gone()
        posted, self._posted = self._posted, []
        for pending in posted:
            pending.wait()

    def __del__(self) -> None:
        if self._watch is not None:
            self._watch.end()


class _Watch:
    """What the thread does, and what it has not done yet."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Pending | None] = SimpleQueue()
        self._leaving = 0
        self._changed = threading.Condition()

    def add(self, pending: Pending) -> None:
        with self._changed:
            self._leaving += 1
        self._queue.put(pending)

    def until_all_gone(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._leaving == 0)

    def end(self) -> None:
        self._queue.put(None)

    def run(self) -> None:
        while (pending := self._queue.get()) is not None:
            pending.let_go()
            del pending
            with self._changed:
                self._leaving -= 1
                self._changed.notify_all()
