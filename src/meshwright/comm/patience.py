"""Waiting for what takes as long as it takes, if only it advances: a slow disk, on this rank or another.

A collective waits no longer than the group's timeout, whatever the reason. Writing a checkpoint may well take longer
than a rank should be waited for that has gone astray. So ranks wait outside of any collective, look into the store that
they all share for signs that somebody advances, and give up only when there have been none for the timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from meshwright.comm.blackbox import BlackBox
from meshwright.spec.errors import RunError

ADVANCES = "advances"
_LONGEST_NAP = 0.5  # seconds between two looks; shorter at first, so that short work is not waited for in vain
_TELL_EVERY = 1.0  # seconds; the store has one server for all ranks


class Patience:
    """The work of any thread of any rank, and those who wait for it. `timeout`: seconds that it may stand still."""

    def __init__(self, world: int, blackbox: BlackBox, timeout: float) -> None:
        self._blackbox = blackbox
        self._timeout = timeout
        self._told = 0.0
        self._lock = threading.Lock()
        self._alone = 0
        # torch has no public name for the store that the ranks already share.
        self._store = (
            dist.PrefixStore("meshwright.patience", dist.distributed_c10d._get_default_store()) if world > 1 else None
        )

    def advance(self) -> None:
        """Work has advanced; to be called as often as it likes, from any thread."""
        now = time.monotonic()
        with self._lock:
            if now - self._told < min(_TELL_EVERY, self._timeout / 4):
                return
            self._told = now
        if self._store is None:
            self._alone += 1
        else:
            self._store.add(ADVANCES, 1)

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Return when `done` says so. `what` is waited for, in words: "the checkpoint of step 50".

        Raises RunError when nobody has advanced for the timeout.
        """
        if done():
            return
        self._blackbox.note(f"waiting for {what}")
        began = advanced = time.monotonic()
        seen = self._advances()
        while not done():
            now, advances = time.monotonic(), self._advances()
            if advances != seen:
                seen, advanced = advances, now
                self._blackbox.tick()
            elif self._timeout and now - advanced > self._timeout:
                raise RunError(f"{what} has not advanced in {self._timeout:g} s")
            time.sleep(min(_LONGEST_NAP, max(0.002, (now - began) / 20), self._timeout / 4 or _LONGEST_NAP))

    def _advances(self) -> int:
        return self._alone if self._store is None else self._store.add(ADVANCES, 0)
