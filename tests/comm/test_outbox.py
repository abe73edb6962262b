"""Sends that let go of their tensors: by a thread when they have left, or by waiting for all but the last ones."""

from __future__ import annotations

import time

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.comm.outbox import Outbox
from meshwright.spec.traffic import SENT_AT_ONCE, SENT_TOGETHER

COUNT = 6


def send(mesh, by, size):
    """Rank 0 sends COUNT messages of `size` bytes, of which rank 1 asks for one after the other; how many tensors are
    there once it has asked for all, and after `drain`."""
    group = mesh.group("dp")
    if mesh.rank == 1:
        got = torch.full((COUNT, size // 4), torch.nan)
        for row in got:
            group.recv(row, 0, reason="t", phase="forward")
        group.barrier("t")
        return [float(row.mean()) for row in got]
    outbox, storages = Outbox(by), []
    for number in range(COUNT):
        tensor = torch.full((size // 4,), float(number))
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        outbox.post(group.send(tensor, 1, reason="t", phase="forward", async_=True), group, size)
    del tensor
    group.barrier("t")
    expected = {"thread": 0 if size >= SENT_TOGETHER else COUNT, "stream": SENT_AT_ONCE, "nobody": COUNT}[by]
    patience = time.monotonic() + 5
    while there(storages) != expected and time.monotonic() < patience:
        time.sleep(0.01)
    before = there(storages)
    outbox.drain()
    return before == expected, before, there(storages)


def there(storages):
    return sum(not storage.expired() for storage in storages)


@pytest.mark.parametrize(("by", "size"), [("thread", SENT_TOGETHER), ("thread", 64), ("stream", 64), ("nobody", 64)])
def test_tensors_are_let_go(ranks, by, size):
    (right, before, after), heard = ranks.run(2, send, by, size)
    assert right, before
    assert after == 0
    assert heard == [float(number) for number in range(COUNT)]
