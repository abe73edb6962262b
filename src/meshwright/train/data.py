"""Which samples make up a step, and their tokens. A pure function of seed and step: no state to save or to lose."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.model.loss import IGNORE
from meshwright.spec.errors import UserError
from meshwright.train.shuffle import shuffled


class Dataset:
    """A memory-mapped token file, cut into samples of `seq_len` tokens.

    Sample k holds the tokens from k · seq_len on; its targets are the tokens one further, made here, before anything
    is split over ranks. The last sample may be short: it is padded, and its missing targets are IGNORE. Every token
    but the first is a target exactly once an epoch.

    documents: the file that says where documents begin (`tokenfile.starts_beside`). Then the first token of each is no
    target, and of each sample is known which of its positions are one document's. A document goes over as many samples
    as it takes; what a sample has of it is by itself.

    An epoch's order is a permutation that follows from seed and epoch (`shuffle.py`); no table of it is kept.
    """

    def __init__(self, path: Path, seq_len: int, seed: int, documents: Path | None = None) -> None:
        self._tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        self._starts = None if documents is None else np.load(documents, mmap_mode="r", allow_pickle=False)
        self._seq_len = seq_len
        self._seed = seed
        self._length = -(-(len(self._tokens) - 1) // seq_len)
        if self._length < 1:
            raise UserError(f"data: {path} holds {len(self._tokens)} tokens; a sample needs at least 2")

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._length

    def ids(self, step: int, sequences: int) -> Tensor:
        """The samples of global step `step` (from 0), int64 [sequences], the same in every layout.

        Steps take samples from one endless stream, epoch after epoch, so a step may hold the end of one epoch and
        the beginning of the next: none is left out, none comes twice an epoch.
        """
        places = np.arange(step * sequences, (step + 1) * sequences, dtype=np.int64)
        epochs, inside = np.divmod(places, self._length)
        parts = [
            shuffled(inside[epochs == epoch], self._length, seed=self._seed, epoch=int(epoch))
            for epoch in range(int(epochs[0]), int(epochs[-1]) + 1)
        ]
        return torch.from_numpy(np.concatenate(parts))

    def batch(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and targets of the samples `ids`, int64 [B, seq_len] each; targets past the end are IGNORE, and those
        that would be the first token of a document."""
        tokens = torch.zeros(len(ids), self._seq_len, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORE)
        for row, sample in enumerate(ids.tolist()):
            start = sample * self._seq_len
            part = torch.from_numpy(self._tokens[start : start + self._seq_len + 1].astype(np.int64))
            tokens[row, : min(len(part), self._seq_len)] = part[: self._seq_len]
            targets[row, : len(part) - 1] = part[1:]
            targets[row, self._begins(start, start + self._seq_len + 1) - 1] = IGNORE
        return tokens, targets

    def documents(self, ids: Tensor) -> Tensor | None:
        """The document of each position of the samples `ids`, int64 [B, seq_len], ascending from 0; None where
        attention knows none. What pads the last sample is one of its own."""
        if self._starts is None:
            return None
        rows = [np.repeat(np.arange(len(parts)), parts) for parts in map(self.lengths, ids.tolist())]
        return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, self._seq_len, dtype=torch.int64)

    def lengths(self, sample: int) -> NDArray[np.int64]:
        """Tokens of each document in a sample, and of what pads it; of a sample without documents all."""
        start = sample * self._seq_len
        begins = self._begins(start, start + self._seq_len)
        if self._starts is not None and (there := len(self._tokens) - start) < self._seq_len:
            begins = np.append(begins, there)
        return np.diff(begins, prepend=0, append=self._seq_len)

    def _begins(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where documents begin behind the token `start` and before `stop`, counted from `start`."""
        if self._starts is None:
            return np.empty(0, dtype=np.int64)
        first, last = bisect_right(self._starts, start), bisect_left(self._starts, stop)
        return self._starts[first:last].astype(np.int64) - start

    def spread(self, sequences: int) -> Tensor:
        """Up to `sequences` samples spread evenly over the file, always the same ones: for validation."""
        count = min(sequences, self._length)
        return torch.arange(count, dtype=torch.int64) * self._length // count
