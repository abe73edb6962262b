"""What a forward gets on this rank: whole sequences, or with context ranks its part of each.

Targets are made before anything is cut (see train/data.py), so the last token of a part has its right one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.model.base import LanguageModel
from meshwright.model.documents import positions_inside
from meshwright.model.dropout import DropoutKey
from meshwright.spec.layout import Layout
from meshwright.spec.sequence import spans


@dataclass(frozen=True)
class Inputs:
    """tokens, targets i64[B, T] of this rank, of sequences of `length`.

    places i64[T]: where in them these tokens are, None where they are all. positions: those that the model gives them,
    i64[T], or [B, T] with documents, None where it finds them itself. documents: those of the whole sequences,
    i64[B, length], None where each is one.
    """

    tokens: Tensor
    targets: Tensor
    places: Tensor | None = None
    positions: Tensor | None = None
    length: int = 0
    documents: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        found = (self.tokens, self.targets, self.places, self.positions, self.documents)
        return [t for t in found if t is not None]

    def forward(
        self,
        model: LanguageModel,
        *,
        dropout: DropoutKey | None = None,
        hidden: Tensor | None = None,
        scored: bool = True,
    ) -> Tensor:
        """What `model` makes of these tokens: the sum of their losses, or logits where they are not to be scored; of a
        pipeline's stage hidden states, unless it is the last. Context ranks are told of documents by who calls this.

        hidden: what a stage behind the first begins with.
        """
        given: dict[str, Any] = {} if hidden is None else {"hidden": hidden}
        if self.positions is None:
            given["documents"] = self.documents
        else:
            given |= {"positions": self.positions, "length": self.length}
        out: Tensor = model(self.tokens, self.targets if scored else None, dropout=dropout, **given)
        return out

    def key(self, seed: int, step: int, rows: Tensor) -> DropoutKey:
        """What masks of these tokens depend on; rows i64[B]: the sequences' places in the global batch."""
        return DropoutKey(seed, step, rows, self.places, self.length)


class Share:
    """This rank's part of sequences of `length` tokens. Holds no tensors."""

    def __init__(self, layout: Layout, place: int, length: int, device: torch.device) -> None:
        """place: that on `cp`. Raises ValueError for a length that cannot be cut."""
        self.length, self.device = length, device
        self.spans = spans(length, layout.cp, place, layout.cp_order) if layout.cp > 1 else None

    def of(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Inputs:
        """Of whole sequences' tokens and targets, i64[B, length], and of their documents, if they are several."""
        if self.spans is None:
            whole = None if documents is None else documents.to(self.device)
            return Inputs(tokens.to(self.device), targets.to(self.device), documents=whole)
        runs = [(span.start, span.stop, span.step) for span in self.spans]

        def mine(whole: Tensor) -> Tensor:
            return torch.cat([whole[:, start:stop:step] for start, stop, step in runs], dim=1).to(self.device)

        places = torch.cat([torch.arange(*run, device=self.device) for run in runs])
        positions = places if documents is None else mine(positions_inside(documents))
        # Who sees whom is decided on the host.
        return Inputs(mine(tokens), mine(targets), places, positions, self.length, documents)
