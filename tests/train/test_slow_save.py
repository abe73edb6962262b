"""A save that takes longer than a collective may wait."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from meshwright.comm.mesh import Mesh
from meshwright.spec.load import load_run
from meshwright.train import folders, tensorfile
from meshwright.train.loop import Loop
from meshwright.train.signals import StopFlag

TIMEOUT = 1.5
FIELDS = [
    "model={layers: 1, hidden: 16, heads: 2, kv_heads: 1, ffn: 24}",
    "data.seq_len=16",
    "batch={sequences: 4, micro: 2}",
    "validation.every=0",
    "layout.dp=2",
    "checkpoint.every=1",
    "steps=2",
]


def train(mesh: Mesh, folder: str) -> tuple[int, float]:
    """Two steps, each saved to a disk that takes rank 1 a while for some kB."""
    put, seconds = tensorfile._put, 0.0

    def slowly(*args):
        nonlocal seconds
        if mesh.rank == 1:
            time.sleep(0.15)
            seconds += 0.15
        put(*args)

    tensorfile._put = slowly
    torch.set_num_threads(1)
    run = load_run(None, [*FIELDS, f"data.path={folder}/text.txt", f"out={folder}/run"])
    code = Loop(run, mesh, StopFlag(), quiet=True).run()
    return code, seconds


def test_a_save_longer_than_the_timeout_fails_no_run(ranks, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {i}: {i * i}\n" for i in range(100)))
    (code, _), (other, seconds) = ranks.run(2, train, str(tmp_path), group_timeout=TIMEOUT)
    assert (code, other) == (0, 0)
    assert seconds > 4 * TIMEOUT, "two saves, each far longer than a collective waits"
    assert folders.steps(tmp_path / "run" / "checkpoints") == [1, 2]
