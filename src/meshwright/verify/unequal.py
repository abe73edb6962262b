"""The batch of a proof: random tokens whose valid targets are spread unequally on purpose.

A layout that averages averages, or counts a part twice, agrees with one device on equal parts. So here the number
of valid targets differs by sequence and by half of a sequence, and one sequence in four has none at all. With packing
documents are unequal too: of four sequences one is a single document, one has a border at every eighth, where ranks'
parts end, and nowhere else, and two have some anywhere, documents of one token among them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meshwright.model.loss import IGNORE
from meshwright.spec.run import RunSpec


def proof_data(run: RunSpec) -> UnequalData:
    """The tokens of a proof of `run`; reference and ranks make them alike from the run's seed."""
    return UnequalData(run.model.vocab, run.data.seq_len, run.seed, packed=run.data.packing == "documents")


class UnequalData:
    """A data set like the training one, made from the seed: sample ids count up without end."""

    def __init__(self, vocab: int, seq_len: int, seed: int, *, packed: bool = False) -> None:
        self.vocab, self.seq_len, self.seed, self.packed = vocab, seq_len, seed, packed

    def ids(self, step: int, sequences: int) -> Tensor:
        return torch.arange(step * sequences, (step + 1) * sequences)

    def batch(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and targets, int64 [B, T]; a target is the next token or `IGNORE`."""
        rows = [self._sample(int(i)) for i in ids]
        if not rows:
            empty = torch.empty(0, self.seq_len, dtype=torch.int64)
            return empty, empty.clone()
        return torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])

    def documents(self, ids: Tensor) -> Tensor | None:
        """The document of each position, int64 [B, T]; None without packing."""
        if not self.packed:
            return None
        rows = [self._begins(int(i)).cumsum(0) for i in ids]
        return torch.stack(rows) if rows else torch.empty(0, self.seq_len, dtype=torch.int64)

    def _begins(self, index: int) -> Tensor:
        """Whether a document begins at each position but the first, where it is False."""
        rng = np.random.default_rng([self.seed, index, 1])
        begins = rng.uniform(size=self.seq_len) < (0.0, 0.15, 0.0, 0.4)[index % 4]
        if index % 4 == 2:
            begins[:: max(self.seq_len // 8, 1)] = True
        begins[0] = False
        return torch.from_numpy(begins)

    def _sample(self, index: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng([self.seed, index])
        row = torch.from_numpy(rng.integers(self.vocab, size=self.seq_len + 1))
        targets = row[1:].clone()
        share = 0.0 if index % 4 == 3 else rng.uniform(0.1, 1.0)
        keep = torch.from_numpy(rng.uniform(size=self.seq_len) < share)
        if index % 4 == 1:
            keep[self.seq_len // 2 :] = False
        if index % 4 != 3:
            keep[0] = True
        targets[~keep] = IGNORE
        if self.packed:
            targets[:-1][self._begins(index)[1:]] = IGNORE
        return row[:-1], targets
