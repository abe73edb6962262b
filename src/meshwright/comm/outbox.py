"""Messages on their way out, whose tensors are let go as soon as they have left.

Gloo says that a send is over to nobody but who waits for it. A pipeline has better things to do than to wait, and until
it does the tensor stays: of as many micro-batches as have been sent on. So on the CPU a thread waits.
"""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue
from typing import Literal

from meshwright.comm.collectives import Group
from meshwright.comm.pending import Pending
from meshwright.spec.traffic import SENT_AT_ONCE, SENT_TOGETHER


class Outbox:
    """Takes sends under way, in the order of their issue; `drain` at the end of a step.

    by: "thread": it is woken for SENT_TOGETHER bytes. "stream": an accelerator's stream waits for all but the last
    SENT_AT_ONCE of each way, which have been received by then unless the other rank is far behind. "nobody", where
    sends are compared (comm/check.py), which is for the rank's own thread to do: tensors stay until `drain`.
    """

    def __init__(self, by: Literal["thread", "stream", "nobody"]) -> None:
        self._by = by
        self._posted: list[Pending] = []
        self._small: list[Pending] = []  # posted, and not yet worth waking the thread for
        self._bytes = 0  # of these
        self._ways: dict[Group, deque[Pending]] = {}
        self._watch: _Watch | None = None

    def post(self, pending: Pending, way: Group, size: int) -> None:
        """Take a send of `size` bytes; nobody else may wait for it."""
        if self._by == "stream":
            under_way = self._ways.setdefault(way, deque())
            under_way.append(pending)
            if len(under_way) > SENT_AT_ONCE:
                under_way.popleft().wait()
            return
        self._posted.append(pending)
        if self._by == "thread":
            self._small.append(pending)
            self._bytes += size
            if self._bytes >= SENT_TOGETHER:
                self._wake()

    def drain(self) -> None:
        """Return when everything has left. Raises RunError where something could not."""
        for under_way in self._ways.values():
            while under_way:
                under_way.popleft().wait()
        if self._watch is not None:
            self._watch.until_all_gone()
        self._small, self._bytes = [], 0
        posted, self._posted = self._posted, []
        for pending in posted:
            pending.wait()

    def _wake(self) -> None:
        if self._watch is None:
            self._watch = _Watch()
            # A daemon, of its own object, so that it keeps neither this nor the process alive.
            threading.Thread(target=self._watch.run, daemon=True).start()
        for pending in self._small:
            self._watch.add(pending)
        self._small, self._bytes = [], 0

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
