"""The embedding, the output head and the loss with the vocabulary dealt out over `tp` (Shoeybi et al. 2019, section 3).

A rank has ⌈V/t⌉ words. It looks its own up, zero for all others, and the sum over the ranks is the embedding. Of the
logits it computes those of its words; the loss needs each token's largest logit, the sum of exponentials and the
target's logit, three numbers where all logits would be V. Where t does not divide V the last ranks have words that
there are not: their logits are −∞, their weights get no gradient, and checkpoints do not know them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.model.layers import Embedding, Head
from meshwright.model.loss import IGNORE, add_product_
from meshwright.parallel.products import Line, columns, summed_over, whole_features
from meshwright.spec.errors import UserError
from meshwright.spec.run import LOSS_ROWS


def part_of(old: nn.Module, name: str, part: Mapping[str, nn.Parameter], line: Line) -> nn.Module | None:
    """What takes the place of a layer that the plan calls "vocabulary" or "positions"; None for nothing."""
    if isinstance(old, Head):
        return VocabularyHead(part["weight"], old.weight.size(0), line, chunked=old.chunked)
    if isinstance(old, Embedding):
        if part["weight"] is old.weight:
            return PositionsPart(old.weight, line) if line.sequence else None
        return VocabularyEmbedding(part["weight"], old.weight.size(0), line)
    raise UserError(f"tensor: {name} is neither embedding nor head, and cannot be cut by words")


def _check_words(words: Tensor, vocab: int, what: str, counts: Tensor | None = None) -> None:
    """Raise IndexError for words (of those that count) that there are not, which each rank would take for another's.

    As torch's own embedding and loss do on the CPU; an accelerator would have to be waited for.
    """
    if words.device.type != "cpu":
        return
    words = words if counts is None else words[counts]
    if not words.numel():
        return
    least, greatest = (int(word) for word in words.aminmax())
    if least < 0 or greatest >= vocab:
        wrong = least if least < 0 else greatest
        raise IndexError(f"{what} {wrong} is out of range: the vocabulary has {vocab} words")


class VocabularyEmbedding(nn.Embedding):
    """indices i64[B, T] -> [B, T, D], or this rank's part of the sequence. Backward keeps where its own words stand."""

    def __init__(self, weight: nn.Parameter, vocab: int, line: Line) -> None:
        super().__init__(*weight.shape, _weight=weight)
        self.weight, self.vocab, self.line = weight, vocab, line

    def forward(self, indices: Tensor) -> Tensor:  # the parameter's name differs from torch's
        _check_words(indices, self.vocab, "token")
        rows = self.weight.size(0)
        local = indices - rows * self.line.group.rank
        others = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill_(others, 0), self.weight).masked_fill(others.unsqueeze(-1), 0.0)
        return summed_over(self.line, "tp.embed", found)


class PositionsPart(nn.Embedding):
    """positions i64[..., T] -> those of this rank's part of the sequence [..., T/t, D]."""

    def __init__(self, weight: nn.Parameter, line: Line) -> None:
        super().__init__(*weight.shape, _weight=weight)
        self.weight, self.line = weight, line

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions.chunk(self.line.group.size, dim=-1)[self.line.group.rank], self.weight)


class VocabularyHead(nn.Module):
    """x [B, T, D], or this rank's part of the sequence -> logits [B, T, V] of all words, for reading; with targets
    i64[B, T] the sum of token losses, the same on all ranks, from each rank's logits alone."""

    def __init__(self, weight: nn.Parameter, vocab: int, line: Line, *, chunked: bool) -> None:
        super().__init__()
        self.weight, self.vocab, self.line, self.chunked = weight, vocab, line, chunked

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is not None and self.chunked:
            return chunked_cross_entropy(x, self.weight, targets, self.vocab, self.line)
        (logits,) = columns(self.line, "tp.head", x, [self.weight], [None])
        if targets is not None:
            return cross_entropy(logits, targets, self.vocab, self.line)
        return whole_features(self.line, "tp.logits", logits)[..., : self.vocab]


# -- the loss --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """What a token's loss is beside the cross entropy with its target.

    label_smoothing: so much of the target's weight goes to all words alike (Szegedy et al. 2016). z_loss: times the
    square of the logarithm of the softmax's sum (Chowdhery et al. 2022, section 5), which keeps logits from drifting.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


def cross_entropy(logits: Tensor, targets: Tensor, vocab: int, line: Line, terms: Terms = Terms()) -> Tensor:
    """Σ over targets that count of −log softmax(logits)[target], 0-dim, float32 at least; the same on all ranks.

    logits [..., ⌈V/t⌉] of this rank's words, targets i64[...] among all `vocab`. Backward keeps the softmax of them.
    Raises UserError for logits of another width, as all words' would be.
    """
    width = -(-vocab // line.group.size)
    if logits.size(-1) != width:
        raise UserError(
            f"loss: logits of {logits.size(-1)} words; over {line.group.size} ranks each gives those of its own "
            f"{width} of {vocab}, and all of them are never put together"
        )
    total: Tensor = _CrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), vocab, line, terms)
    return total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab: int, line: Line, terms: Terms) -> Tensor:
        part = _Part(logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True), targets, vocab, line)
        ctx.vocab, ctx.terms, ctx.dtype, ctx.words = vocab, terms, logits.dtype, part.words
        total, softmax = part.loss(terms)
        sums = (part.log_sum,) if terms.z_loss else ()
        ctx.save_for_backward(softmax, part.target, part.counts, *sums)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        softmax, target, counts, *sums = ctx.saved_tensors
        out = _gradient(softmax.clone(), target, counts, sums[0] if sums else None, ctx.words, ctx.vocab, ctx.terms)
        return out.mul_(grad).to(ctx.dtype), None, None, None, None


class _Part:
    """This rank's logits [N, width], which are overwritten, and what the ranks find out of them together."""

    def __init__(self, logits: Tensor, targets: Tensor, vocab: int, line: Line) -> None:
        width = logits.size(-1)
        first = width * line.group.rank
        self.words = max(min(width, vocab - first), 0)  # that there are
        self.logits, self.line, self.vocab = logits, line, vocab
        self.counts = targets != IGNORE
        _check_words(targets, vocab, "target", self.counts)
        self.target = targets - first
        self.target.masked_fill_((self.target < 0) | (self.target >= self.words) | ~self.counts, -1)

    def loss(self, terms: Terms) -> tuple[Tensor, Tensor]:
        """The sum of the token losses, and the softmax of this rank's words, in the logits' memory."""
        logits = self.logits
        logits[:, self.words :] = -torch.inf
        largest = logits.max(dim=-1).values if logits.size(-1) else logits.new_full(logits.shape[:1], -torch.inf)
        self._send(largest, "max")
        logits.sub_(largest[:, None])
        sums = logits.new_zeros(3 if terms.label_smoothing else 2, len(logits))
        mine = self.target >= 0
        sums[0] = torch.where(mine, logits.gather(1, self.target.clamp(min=0)[:, None])[:, 0], 0.0)
        if terms.label_smoothing:
            sums[2] = logits[:, : self.words].sum(dim=-1)
        softmax = logits.exp_()
        torch.sum(softmax, dim=-1, out=sums[1])
        self._send(sums, "sum")
        log = sums[1].log()
        softmax.div_(sums[1][:, None])
        self.log_sum = log + largest
        losses = log - (1 - terms.label_smoothing) * sums[0]
        if terms.label_smoothing:
            losses -= terms.label_smoothing / self.vocab * sums[2]
        if terms.z_loss:
            losses += terms.z_loss * self.log_sum.square()
        return torch.where(self.counts, losses, 0.0).sum(), softmax

    def _send(self, tensor: Tensor, op: Any) -> None:
        line = self.line
        line.group.all_reduce(tensor, reason="tp.loss", phase=line.phase, micro=line.micro, op=op)


def _gradient(
    softmax: Tensor, target: Tensor, counts: Tensor, log_sum: Tensor | None, words: int, vocab: int, terms: Terms
) -> Tensor:
    """Of the loss with respect to this rank's logits, in the softmax's memory; rows that do not count are 0."""
    if log_sum is not None:
        softmax.mul_((1 + 2 * terms.z_loss * log_sum)[:, None])
    mine = (target >= 0)[:, None].to(softmax.dtype)
    softmax.scatter_add_(1, target.clamp(min=0)[:, None], mine.mul_(terms.label_smoothing - 1))
    if terms.label_smoothing:
        softmax[:, :words].sub_(terms.label_smoothing / vocab)
    # Not a product: a row of another device's padding may hold what is not finite.
    return softmax.masked_fill_(~counts[:, None], 0.0)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab: int, line: Line, terms: Terms = Terms()
) -> Tensor:
    """The same from hidden states [B, T, D] (with `sp` this rank's part of the sequence) and this rank's rows of the
    head's weight, never holding more than a chunk of logits; see model/loss.py. Backward keeps the gradients."""
    total: Tensor = _Chunked.apply(hidden, weight, targets, vocab, line, terms, torch.is_grad_enabled())
    return total


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab: int, line: Line, terms: Terms, again: bool
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        ctx.line, ctx.micro = line, line.micro
        for_hidden, for_weight = (again and needed for needed in ctx.needs_input_grad[:2])
        whole = line.gather(hidden, "tp.head", line.phase, line.micro).wait() if line.sequence else hidden
        rows = whole.reshape(-1, whole.size(-1))
        dhidden = torch.empty_like(whole).view_as(rows) if for_hidden else None
        dweight = torch.zeros_like(weight, dtype=wide) if for_weight else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for begin in range(0, len(rows), LOSS_ROWS):
            chunk = rows[begin : begin + LOSS_ROWS]
            part = _Part((chunk @ weight.t()).to(wide), targets.flatten()[begin : begin + LOSS_ROWS], vocab, line)
            loss, softmax = part.loss(terms)
            total += loss
            if not (for_hidden or for_weight):
                continue
            log_sum = part.log_sum if terms.z_loss else None
            grad = _gradient(softmax, part.target, part.counts, log_sum, part.words, vocab, terms).to(weight.dtype)
            if dhidden is not None:
                torch.mm(grad, weight, out=dhidden[begin : begin + LOSS_ROWS])
            if dweight is not None:
                add_product_(dweight, grad, chunk)
        ctx.save_for_backward(
            None if dhidden is None else dhidden.view_as(whole), None if dweight is None else dweight.to(weight.dtype)
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dhidden, dweight = ctx.saved_tensors
        line, pending, dx = ctx.line, None, None
        if dhidden is not None:
            dx = (dhidden * grad).to(dhidden.dtype)
            if line.sequence:
                dx, pending = line.scatter(dx, "tp.head", "backward", ctx.micro)
            else:
                pending = line.group.all_reduce(dx, reason="tp.head", phase="backward", micro=ctx.micro, async_=True)
        dw = None if dweight is None else (dweight * grad).to(dweight.dtype)
        if pending is not None:
            pending.wait()
        return dx, dw, None, None, None, None, None
