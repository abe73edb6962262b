"""Work that rank 0 does alone while the others wait: as long as it takes, if only it advances.

A collective waits no longer than the group's timeout, whatever the reason. A save may well take longer than a rank
should be waited for that has gone astray, so the others wait outside of any collective, in the store that all ranks
share, and give up only when rank 0 has not advanced for that time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from meshwright.comm.blackbox import BlackBox
from meshwright.spec.errors import RunError

DONE, ADVANCES = "done", "advances"
_LONGEST_NAP = 0.5  # seconds between two looks; shorter at first, so that short work is not waited for in vain
_TELL_EVERY = 1.0  # seconds; the store has one server for all ranks


class Lead:
    """Rank 0's own work, as every rank of a run meets it. `timeout`: seconds that it may stand still."""

    def __init__(self, rank: int, world: int, blackbox: BlackBox, timeout: float) -> None:
        self._rank = rank
        self._blackbox = blackbox
        self._timeout = timeout
        self._works = 0
        # torch has no public name for the store that the ranks already share.
        self._store = (
            dist.PrefixStore("meshwright.lead", dist.distributed_c10d._get_default_store()) if world > 1 else None
        )

    @contextlib.contextmanager
    def works(self, what: str) -> Iterator[Callable[[], None]]:
        """Rank 0 does "saving a checkpoint", or whatever it is, in the body; the others leave the body when it has.

        All ranks must come. Gives what rank 0 calls, as often as it likes, when it has advanced. Raises RunError on
        the others when it has not for the timeout.
        """
        self._works += 1
        if self._rank != 0:
            yield lambda: None
            self._blackbox.note(f"waiting for rank 0: {what}")
            self._wait(what)
            return
        self._blackbox.note(what)
        told = time.monotonic()

        def advance() -> None:
            nonlocal told
            self._blackbox.tick()
            if self._store is not None and time.monotonic() - told > min(_TELL_EVERY, self._timeout / 4):
                self._store.add(ADVANCES, 1)
                told = time.monotonic()

        try:
            yield advance
        finally:
            if self._store is not None:
                self._store.add(DONE, 1)

    def _wait(self, what: str) -> None:
        assert self._store is not None
        began = advanced = time.monotonic()
        seen = 0
        while self._store.add(DONE, 0) < self._works:
            now = time.monotonic()
            advances = self._store.add(ADVANCES, 0)
            if advances != seen:
                seen, advanced = advances, now
            elif now - advanced > self._timeout:
                raise RunError(f"rank 0 has not advanced with {what} in {self._timeout:g} s")
            time.sleep(min(_LONGEST_NAP, self._timeout / 4, max(0.002, (now - began) / 20)))
