"""Gloo's threads that read from sockets, made to yield to those that compute.

Each Gloo group of a process has a thread that reads what the others send. A message that comes before its receiver
has asked for it stays in the socket, and until then the thread asks the kernel for it again and again, without pause
(torch 2.13; gloo/transport/tcp: Pair::read leaves such a message "for the next loop iteration"). So a rank that is
behind is slowed down by what the others have sent it already, where it has no core to spare. At the lowest priority
the thread takes only what computing leaves.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LOOP = "gloo_tcp_loop"
"""What Gloo calls such a thread."""
LOWEST = 19


def yield_to_computing() -> None:
    """Give Gloo's reading threads of this process the lowest priority; where the system has no such thing, nothing."""
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended
                if (thread / "comm").read_text().strip() == LOOP:
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), LOWEST)
