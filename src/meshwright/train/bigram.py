"""The baseline any language model has to beat: which token follows which, counted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MAX_VOCAB = 4096  # a table of 4096² counts is 128 MiB
_CHUNK = 1 << 22


def bigram_loss(
    train: Path,
    held_out: Path,
    vocab: int,
    *,
    samples: Sequence[int] = (),
    seq_len: int = 0,
    documents: tuple[Path, Path] | None = None,
) -> float | None:
    """Cross-entropy in nats a token of an add-one-smoothed bigram model, counted on `train`, scored on `held_out`.

    p(b | a) = (n(a, b) + 1) / (n(a) + V), n(a) the pairs that begin with a. Both are token files of ids below
    `vocab`. Scored are the targets of `samples` of `seq_len` tokens (as `data.Dataset` numbers them), so that the
    figure stands beside a validation loss over the same ones; without samples every token but the first. documents:
    the files beside the two that say where documents begin; then pairs of two documents neither count nor are scored.
    None where V is above MAX_VOCAB or nothing can be scored.
    """
    if vocab > MAX_VOCAB:
        return None
    pairs = np.zeros(vocab * vocab, dtype=np.int64)
    of_train, of_held_out = documents or (None, None)
    for first, second in _pairs(train, documents=of_train):
        pairs += np.bincount(first * vocab + second, minlength=vocab * vocab)
    firsts = pairs.reshape(vocab, vocab).sum(axis=1)
    total, count = 0.0, 0
    spans = [slice(k * seq_len, (k + 1) * seq_len + 1) for k in samples] or [slice(None)]
    for span in spans:
        for first, second in _pairs(held_out, span, of_held_out):
            scores = np.log(pairs[first * vocab + second] + 1) - np.log(firsts[first] + vocab)
            total -= float(scores.sum())
            count += len(first)
    return total / count if count else None


def _pairs(
    path: Path, span: slice = slice(None), documents: Path | None = None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Neighbouring tokens of the file's `span`, in parts: int64 [n] and the [n] that follow them."""
    tokens = np.load(path, mmap_mode="r", allow_pickle=False)[span]
    begin = span.start or 0
    starts = None if documents is None else np.load(documents, mmap_mode="r", allow_pickle=False)
    for start in range(0, len(tokens) - 1, _CHUNK):
        part = tokens[start : start + _CHUNK + 1].astype(np.int64)
        first, second = part[:-1], part[1:]
        if starts is not None:
            low = begin + start + 1  # of the tokens that are second
            new = starts[bisect_left(starts, low) : bisect_left(starts, low + len(second))].astype(np.int64) - low
            first, second = np.delete(first, new), np.delete(second, new)
        yield first, second
