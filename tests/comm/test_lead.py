"""The others wait for rank 0 as long as it advances, and no longer."""

from __future__ import annotations

import time

import torch

from meshwright.comm.blackbox import BlackBox, box_path, read
from meshwright.comm.lead import Lead
from meshwright.comm.mesh import Mesh

TIMEOUT = 0.8  # of collectives, and of a rank 0 that stands still


def work(mesh: Mesh, seconds: float, advances: bool) -> float:
    began = time.monotonic()
    with mesh.lead.works("saving a checkpoint") as advance:
        while mesh.rank == 0 and time.monotonic() - began < seconds:
            time.sleep(0.05)
            if advances:
                advance()
    return time.monotonic() - began


def twice(mesh: Mesh, folder: str) -> tuple:
    took = work(mesh, 2.5, advances=True), work(mesh, 0.1, advances=False)
    t = torch.ones(1)
    note = read(box_path(folder, mesh.rank)).note
    mesh.world_group.all_reduce(t, reason="test", phase="step")
    return *took, note, t.item()


def test_work_longer_than_the_timeout_is_waited_for(ranks, tmp_path) -> None:
    env = {"MESHWRIGHT_BLACKBOX": str(tmp_path)}
    ends = ranks.run(3, twice, str(tmp_path), group_timeout=TIMEOUT, env=env)
    assert [(note, total) for *_, note, total in ends] == [
        ("saving a checkpoint", 3.0),
        *[("waiting for rank 0: saving a checkpoint", 3.0)] * 2,
    ]
    for rank, (long, short, *_) in enumerate(ends):
        assert 2.5 <= long < 3.5 and short < 0.5, (rank, long, short)


def hang(mesh: Mesh) -> float:
    return work(mesh, 3 * TIMEOUT if mesh.rank == 0 else 0, advances=False)


def test_work_that_stands_still_is_not(ranks) -> None:
    outcomes = ranks.attempt(2, hang, group_timeout=TIMEOUT)
    assert "RunError: rank 0 has not advanced with saving a checkpoint in 0.8 s" in outcomes[1].error
    assert outcomes[1].seconds < outcomes[0].seconds


def fail(mesh: Mesh) -> str:
    try:
        with mesh.lead.works("saving"):
            if mesh.rank == 0:
                raise OSError("disk full")
    except OSError as exc:
        return str(exc)
    return "went on"


def test_work_that_fails_is_over(ranks) -> None:
    assert ranks.run(2, fail, group_timeout=TIMEOUT) == ["disk full", "went on"]


def test_alone(tmp_path) -> None:
    box = BlackBox(tmp_path / "box")
    with Lead(0, 1, box, 0.0).works("saving") as advance:
        before = read(tmp_path / "box").ticks
        advance()
        assert (read(tmp_path / "box").note, read(tmp_path / "box").ticks) == ("saving", before + 1)
