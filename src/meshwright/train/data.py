"""Which samples make up a step, and their tokens. A pure function of seed and step: no state to save or to lose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from meshwright.model.loss import IGNORE
from meshwright.spec.errors import UserError
from meshwright.train.shuffle import shuffled


class Dataset:
    """A memory-mapped token file, cut into samples of `seq_len` tokens.

    Sample k holds the tokens from k · seq_len on; its targets are the tokens one further, made here, before anything
    is split over ranks. The last sample may be short: it is padded, and its missing targets are IGNORE. Every token
    but the first is a target exactly once an epoch.

    An epoch's order is a permutation that follows from seed and epoch (`shuffle.py`); no table of it is kept.
    """

    def __init__(self, path: Path, seq_len: int, seed: int) -> None:
        self._tokens = np.load(path, mmap_mode="r", allow_pickle=False)
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
        """Tokens and targets of the samples `ids`, int64 [B, seq_len] each; targets past the end are IGNORE."""
        tokens = torch.zeros(len(ids), self._seq_len, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORE)
        for row, sample in enumerate(ids.tolist()):
            start = sample * self._seq_len
            part = torch.from_numpy(self._tokens[start : start + self._seq_len + 1].astype(np.int64))
            tokens[row, : min(len(part), self._seq_len)] = part[: self._seq_len]
            targets[row, : len(part) - 1] = part[1:]
        return tokens, targets

    def spread(self, sequences: int) -> Tensor:
        """Up to `sequences` samples spread evenly over the file, always the same ones: for validation."""
        count = min(sequences, self._length)
        return torch.arange(count, dtype=torch.int64) * self._length // count
