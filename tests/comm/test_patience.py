"""Waiting goes on as long as any rank's work advances, and no longer."""

from __future__ import annotations

import threading
import time

import torch

from meshwright.comm.blackbox import BlackBox, box_path, read
from meshwright.comm.mesh import Mesh
from meshwright.comm.patience import Patience

TIMEOUT = 0.8  # of collectives, and of work that stands still


def work(mesh: Mesh, seconds: float, advances: bool) -> float:
    """Rank 1 works in a thread; all wait until it has told the end, and return the seconds that took."""
    began, over = time.monotonic(), threading.Event()

    def busy() -> None:
        while time.monotonic() - began < seconds:
            time.sleep(0.05)
            if advances:
                mesh.patience.advance()
        over.set()

    def done() -> bool:
        return over.is_set() if mesh.rank == 1 else time.monotonic() - began >= seconds

    if mesh.rank == 1:
        threading.Thread(target=busy, daemon=True).start()
    mesh.patience.wait(done, "the checkpoint")
    return time.monotonic() - began


def twice(mesh: Mesh, folder: str) -> tuple:
    took = work(mesh, 2.5, advances=True), work(mesh, 0.1, advances=False)
    t = torch.ones(1)
    box = read(box_path(folder, mesh.rank))
    mesh.world_group.all_reduce(t, reason="test", phase="step")
    return *took, box.note, t.item()


def test_work_longer_than_the_timeout_is_waited_for(ranks, tmp_path) -> None:
    env = {"MESHWRIGHT_BLACKBOX": str(tmp_path)}
    ends = ranks.run(3, twice, str(tmp_path), group_timeout=TIMEOUT, env=env)
    assert [(note, total) for *_, note, total in ends] == [("waiting for the checkpoint", 3.0)] * 3
    for rank, (long, short, *_) in enumerate(ends):
        assert 2.5 <= long < 3.5 and short < 0.5, (rank, long, short)


def hang(mesh: Mesh) -> float:
    return work(mesh, 3 * TIMEOUT, advances=False)


def test_work_that_stands_still_is_not(ranks) -> None:
    for outcome in ranks.attempt(2, hang, group_timeout=TIMEOUT):
        assert "RunError: the checkpoint has not advanced in 0.8 s" in outcome.error


def test_alone(tmp_path) -> None:
    patience = Patience(1, BlackBox(tmp_path / "box"), 0.4)
    before = read(tmp_path / "box").ticks
    began = time.monotonic()

    def done() -> bool:
        patience.advance()
        return time.monotonic() - began > 0.6

    patience.wait(done, "it")
    assert read(tmp_path / "box").ticks > before
    patience.wait(lambda: True, "nothing")
