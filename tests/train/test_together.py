"""All ranks train on the same tokens, though the text changes while they start or machines hold their own copies."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from meshwright.comm.collectives import Group
from meshwright.spec.load import load_run
from meshwright.train import tokenfile
from meshwright.train.together import prepare_together

BEFORE = b"the text that rank 0 has seen\n" * 20


def prepare_in(mesh, folders: list[Path], local_ranks: list[int], path: str, held_out: float, late: bytes) -> bytes:
    """Digest of the tokens this rank would train on. Rank 0, once it has prepared them, writes `late` over the text."""
    os.chdir(folders[mesh.rank])
    os.environ["LOCAL_RANK"] = str(local_ranks[mesh.rank])
    barrier = Group.barrier

    def barrier_and_change(self: Group, reason: str) -> None:
        if self.rank == 0 and late:
            Path(path).write_bytes(late)
        barrier(self, reason)

    Group.barrier = barrier_and_change
    try:
        run = load_run(None, [f"data={{path: {path}, seq_len: 8, held_out: {held_out}}}", "out=run"])
        found = prepare_together(run, mesh.world_group, mesh.device)
        assert (found.held_out is None) == (held_out == 0)
        return tokenfile.digest(found.train)
    finally:
        Group.barrier = barrier


@pytest.mark.parametrize("held_out", [0, 0.2])
def test_the_others_follow_rank_0_though_the_text_has_changed(ranks, tmp_path, held_out):
    (tmp_path / "text.txt").write_bytes(BEFORE)
    found = ranks.run(3, prepare_in, [tmp_path] * 3, [0, 1, 2], "text.txt", held_out, BEFORE + b"and more\n")
    assert len(set(found)) == 1
    assert len(list((tmp_path / "run" / "data").glob("*-train.npy"))) == 1


def test_a_token_file_that_changes_is_read_alike(ranks, tmp_path):
    """It is used where it lies, so what counts is what is in it once rank 0 has chosen it."""
    np.save(tmp_path / "ids.npy", np.arange(200, dtype=np.uint8))
    np.save(tmp_path / "longer.npy", np.arange(250, dtype=np.uint8))
    for late in (b"", (tmp_path / "longer.npy").read_bytes()):
        assert len(set(ranks.run(2, prepare_in, [tmp_path] * 2, [0, 1], "ids.npy", 0, late))) == 1


def test_machines_with_copies_of_their_own_compare_them(ranks, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "text.txt").write_bytes(BEFORE)
        os.utime(folder / "text.txt", (number, number))
    args = ([folders[0], folders[1], folders[1]], [0, 0, 1], "text.txt", 0.2, b"")
    assert len(set(ranks.run(3, prepare_in, *args))) == 1
    (folders[1] / "text.txt").write_bytes(BEFORE.replace(b"seen", b"read"))
    ends = ranks.attempt(3, prepare_in, *args)
    for end in ends[1:]:
        assert "UserError: data.path: text.txt is not the same for rank" in end.error, end
        assert "set out to a folder that all machines share" in end.error
