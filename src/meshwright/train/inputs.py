"""What a forward gets on this rank: whole sequences, or with context ranks its part of each.

Targets are made before anything is cut (see train/data.py), so the last token of a part has its right one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.model.base import LanguageModel
from meshwright.model.dropout import DropoutKey
from meshwright.spec.layout import Layout
from meshwright.spec.sequence import spans


@dataclass(frozen=True)
class Inputs:
    """tokens, targets i64[B, T]; positions i64[T] of these tokens in sequences of `length`, None where they are all."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    length: int = 0

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.tokens, self.targets, self.positions) if t is not None]

    def loss(self, model: LanguageModel, dropout: DropoutKey | None = None) -> Tensor:
        """The sum of these tokens' losses, 0-dim."""
        if self.positions is None:
            loss: Tensor = model(self.tokens, self.targets, dropout=dropout)
        else:
            loss = model(self.tokens, self.targets, positions=self.positions, length=self.length, dropout=dropout)
        return loss

    def key(self, seed: int, step: int, rows: Tensor) -> DropoutKey:
        """What masks of these tokens depend on; rows i64[B]: the sequences' places in the global batch."""
        return DropoutKey(seed, step, rows, self.positions, self.length)


class Share:
    """This rank's part of sequences of `length` tokens. Holds no tensors."""

    def __init__(self, layout: Layout, place: int, length: int, device: torch.device) -> None:
        """place: that on `cp`. Raises ValueError for a length that cannot be cut."""
        self.length, self.device = length, device
        self.spans = spans(length, layout.cp, place, layout.cp_order) if layout.cp > 1 else None

    def of(self, tokens: Tensor, targets: Tensor) -> Inputs:
        """Of whole sequences' tokens and targets, i64[B, length]."""
        if self.spans is None:
            return Inputs(tokens.to(self.device), targets.to(self.device))
        runs = [(span.start, span.stop, span.step) for span in self.spans]
        mine = (
            torch.cat([whole[:, start:stop:step] for start, stop, step in runs], dim=1).to(self.device)
            for whole in (tokens, targets)
        )
        positions = torch.cat([torch.arange(*run, device=self.device) for run in runs])
        return Inputs(*mine, positions, self.length)
