"""The bigram baseline against a count by hand."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from meshwright.train import bigram
from meshwright.train.bigram import bigram_loss


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
@pytest.mark.parametrize("dtype", [np.uint8, ">i4"])
def test_naive_count(chunk: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigram, "_CHUNK", chunk)
    train, held_out = b"the cat sat on the mat, the rat ran", b"that cat ran at the rats!"
    pairs, firsts = Counter(pairwise(train)), Counter(train[:-1])
    wanted = [-math.log((pairs[a, b] + 1) / (firsts[a] + 200)) for a, b in pairwise(held_out)]
    for name, text in (("train", train), ("held", held_out)):
        np.save(tmp_path / f"{name}.npy", np.frombuffer(text, np.uint8).astype(dtype))
    loss = bigram_loss(tmp_path / "train.npy", tmp_path / "held.npy", 200)
    assert loss == pytest.approx(sum(wanted) / len(wanted), rel=1e-12)


def test_probabilities_sum_to_one(tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", np.array([0, 1, 1, 2, 1], dtype=np.uint8))
    total = 0.0
    for second in range(5):
        np.save(tmp_path / "held.npy", np.array([1, second], dtype=np.uint8))
        total += math.exp(-bigram_loss(tmp_path / "train.npy", tmp_path / "held.npy", 5))
    assert total == pytest.approx(1)


def test_nothing_to_say(tmp_path: Path) -> None:
    path, one = tmp_path / "t.npy", tmp_path / "one.npy"
    np.save(path, np.array([0, 1, 2], dtype=np.uint16))
    np.save(one, np.array([0], dtype=np.uint16))
    assert bigram_loss(path, path, 4097) is None
    assert bigram_loss(path, one, 8) is None
    assert bigram_loss(path, path, 3) == pytest.approx(-math.log(2 / 4))


def test_the_samples_that_a_validation_scores(tmp_path):
    train, held_out = tmp_path / "train.npy", tmp_path / "held.npy"
    np.save(train, np.array([0, 1, 0, 2, 0, 1], dtype=np.uint8))
    np.save(held_out, np.array([0, 1, 0, 2, 1, 1, 0], dtype=np.uint8))
    # samples of two tokens: number 1 has the targets 2 and 1 after 0 and 2, number 2 has 1 and 0 after 1 and 1
    expected = -sum(math.log(p) for p in (2 / 6, 1 / 4, 1 / 4, 2 / 4)) / 4
    assert bigram_loss(train, held_out, 3, samples=[1, 2], seq_len=2) == pytest.approx(expected)


def test_pairs_of_two_documents_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each document counted and scored by itself, whatever part of the file is read at once."""
    texts = {"train": (b"the cat ", b"s", b"at on the mat"), "held": (b"that ", b"cat ran")}
    paths = {}
    for name, parts in texts.items():
        paths[name] = tmp_path / f"{name}.npy"
        np.save(paths[name], np.frombuffer(b"".join(parts), np.uint8))
        lengths = [len(part) for part in parts]
        np.save(tmp_path / f"{name}-documents.npy", np.cumsum([0, *lengths[:-1]]))
    pairs = Counter(pair for part in texts["train"] for pair in pairwise(part))
    firsts = Counter(first for first, _ in pairs.elements())
    wanted = {
        place: -math.log((pairs[a, b] + 1) / (firsts[a] + 200))
        for place, (a, b) in enumerate(pairwise(b"that cat ran")) if place != 4
    }  # fmt: skip
    begins = tmp_path / "train-documents.npy", tmp_path / "held-documents.npy"
    for chunk in (1, 3, 1 << 20):
        monkeypatch.setattr(bigram, "_CHUNK", chunk)
        loss = bigram_loss(paths["train"], paths["held"], 200, documents=begins)
        assert loss == pytest.approx(sum(wanted.values()) / len(wanted), rel=1e-12)
        part = bigram_loss(paths["train"], paths["held"], 200, samples=[1], seq_len=4, documents=begins)
        assert part == pytest.approx(sum(wanted[place] for place in (5, 6, 7)) / 3, rel=1e-12)
