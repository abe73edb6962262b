"""What both families share: a language model is an embedding, a chain of blocks and a head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from meshwright.model.attention import Explicit, Sdpa
from meshwright.model.documents import positions_inside
from meshwright.model.dropout import DropoutKey, dropout
from meshwright.model.layers import Head
from meshwright.spec.model import ModelSpec


class LanguageModel(nn.Module, ABC):
    """A plain model for one device. `build` makes one.

    A family gives `blocks`, `ends`, `embed`, `context` (what every block gets beside the hidden states), `final_norm`,
    `embedding_weight` and `lm_head`.
    """

    lm_head: Head

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec

    @property
    @abstractmethod
    def blocks(self) -> nn.ModuleList:
        """The repeated blocks, in order."""

    @property
    @abstractmethod
    def ends(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the layers before the blocks, the token table first, and of those behind them, the head last."""

    @abstractmethod
    def embed(self, tokens: Tensor, positions: Tensor | None, dropout: DropoutKey | None) -> Tensor:
        """tokens i64[B, T] -> hidden states [B, T, D]."""

    @abstractmethod
    def context(
        self,
        tokens: Tensor,
        dtype: torch.dtype,
        positions: Tensor | None,
        length: int | None,
        documents: Tensor | None,
        dropout: DropoutKey | None,
    ) -> tuple[Any, ...]:
        """Arguments of every block after the hidden states, whose dtype is given."""

    @abstractmethod
    def final_norm(self, x: Tensor) -> Tensor:
        """Hidden states [B, T, D] behind the last block -> the head's input, of the same shape."""

    @abstractmethod
    def embedding_weight(self) -> nn.Parameter:
        """The token embedding's weight [V, D], which a tied head shares."""

    def rebuild_buffers(self, device: torch.device | str) -> None:
        """Compute what is neither parameter nor state anew on `device` (after the meta device, say)."""

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        length: int | None = None,
        documents: Tensor | None = None,
        dropout: DropoutKey | None = None,
    ) -> Tensor:
        """Logits [B, T, V]; with targets the sum of token losses, 0-dim, in promote_types(dtype, float32).

        tokens, targets i64[B, T]; a target of loss.IGNORE does not count. positions i64[T] or [B, T], 0..T−1 by
        default, feed the position embedding only: causality follows the order of tokens. length: of the sequences that
        given positions are of, where it is not 1 + the largest of them. documents i64[B, T], ascending: the document of
        each token, where several are packed into a sequence; tokens see their own only, and positions begin anew in
        each, unless they are given. dropout is needed in training where the spec has dropout (ValueError without).

        Raises ValueError for documents with dynamic rope_scaling: frequencies would be those of the whole sequence's
        length, not of each document's.
        """
        positions, length = self.placed(tokens, positions, length, documents)
        x = self.embed(tokens, positions, dropout)
        return self.head(self.chain(x, tokens, positions, length, documents, dropout), targets)

    def placed(
        self, tokens: Tensor, positions: Tensor | None, length: int | None, documents: Tensor | None
    ) -> tuple[Tensor | None, int | None]:
        """The positions that tokens get, and the length of the sequences that these are of; see `forward`."""
        if documents is not None:
            if self.spec.rope_scaling is not None and self.spec.rope_scaling.kind == "dynamic":
                raise ValueError("documents do not go with dynamic rope_scaling, which depends on a sequence's length")
            if positions is None:
                return positions_inside(documents), tokens.size(1)
        return positions, length

    def chain(
        self,
        x: Tensor,
        tokens: Tensor,
        positions: Tensor | None,
        length: int | None,
        documents: Tensor | None,
        dropout: DropoutKey | None,
    ) -> Tensor:
        """Hidden states [B, T, D] of `tokens` before the blocks -> behind them; positions and length as `placed`."""
        context = self.context(tokens, x.dtype, positions, length, documents, dropout)
        for block in self.blocks:
            x = block(x, *context)
        return x

    def head(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Hidden states [B, T, D] to logits, or with targets to the sum of token losses."""
        out: Tensor = self.lm_head(self.final_norm(x), targets)
        return out

    def tie(self) -> None:
        """Make the head's weight the embedding's own parameter where the spec says so."""
        if self.spec.is_tied:
            self.lm_head.weight = self.embedding_weight()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Leaving the meta device makes new parameters, one for each place a tied one has.
        super()._apply(fn, recurse)
        self.tie()
        return self


def attention(kind: str, spec: ModelSpec, place: int, masks: str = "counter") -> Sdpa | Explicit:
    """The attention core of one block; `place` is that of its dropout, `masks` where it takes its masks from."""
    if kind == "sdpa":
        return Sdpa(spec.causal, spec.window, spec.attn_dropout)
    return Explicit(spec.causal, spec.window, dropout(masks, spec.attn_dropout, place))
