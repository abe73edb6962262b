from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from meshwright.comm.yielding import LOOP


def priorities(mesh):
    """Of the threads that read for this rank's groups, and of the one that computes."""
    mesh.group("dp"), mesh.group("tp")
    threads = [t for t in Path("/proc/self/task").iterdir() if (t / "comm").read_text().strip() == LOOP]
    return [os.getpriority(os.PRIO_PROCESS, int(t.name)) for t in threads], os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_reading_threads_of_every_group_yield_to_computing(ranks):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for reading, computing in ranks.run(4, priorities, axes={"dp": 2, "tp": 2}):
        assert len(reading) >= 3 and set(reading) == {19}
        assert computing == own
