"""Embedding, head and loss with the vocabulary dealt out, against torch's own on all words."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from meshwright.model.layers import Embedding, Head
from meshwright.model.loss import IGNORE
from meshwright.parallel import vocabulary
from meshwright.parallel.products import Line
from meshwright.parallel.vocabulary import (
    Terms,
    VocabularyEmbedding,
    VocabularyHead,
    chunked_cross_entropy,
    cross_entropy,
    part_of,
)
from meshwright.spec.errors import UserError

TERMS = {
    "plain": Terms(),
    "smoothing": Terms(label_smoothing=0.1),
    "z-loss": Terms(z_loss=0.01),
    "both": Terms(label_smoothing=0.2, z_loss=0.03),
}
B, T, D = 2, 6, 5
CPU = {"dtype": torch.float64, "device": torch.device("cpu")}


def batch(vocab: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [B, T, D], a weight [vocab, D], and targets of which some do not count."""
    generator = torch.Generator().manual_seed(vocab)
    hidden = scale * torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, D, generator=generator, dtype=torch.float64)
    targets = torch.randperm(B * T, generator=generator).remainder(vocab).view(B, T)
    targets[0, 2] = targets[1, 3:] = IGNORE
    return hidden, weight, targets


def plain(hidden, weight, targets, terms: Terms, factor: float = 1.0):
    """The loss by torch's own cross entropy and the formula of z-loss; and its gradients."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = (hidden @ weight.t()).flatten(0, 1)
    counts = targets.flatten() != IGNORE
    loss = F.cross_entropy(
        logits, targets.flatten(), ignore_index=IGNORE, reduction="sum", label_smoothing=terms.label_smoothing
    )
    loss = loss + terms.z_loss * logits[counts].logsumexp(dim=-1).square().sum()
    (factor * loss).backward()
    return loss.detach(), hidden.grad, weight.grad


def mine(weight: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """This rank's rows, filled up with zeros."""
    width = -(-weight.size(0) // size)
    rows = weight.new_zeros(width, weight.size(1))
    part = weight[width * rank : width * (rank + 1)]
    rows[: len(part)] = part
    return rows


def parts(mesh, vocab, terms, chunked, sp, rows, scale, silent):
    line = Line(mesh.group("tp"), sequence=sp)
    hidden, weight, targets = batch(vocab, scale)
    if silent:
        targets.fill_(IGNORE)
    if sp:
        hidden = hidden.chunk(mesh.world, dim=1)[mesh.rank]
    x, w = hidden.clone().requires_grad_(), mine(weight, mesh.rank, mesh.world).requires_grad_()
    with mock.patch.object(vocabulary, "LOSS_ROWS", rows):
        if chunked:
            loss = chunked_cross_entropy(x, w, targets, vocab, line, terms)
        else:
            (logits,) = vocabulary.columns(line, "tp.head", x, [w], [None])
            loss = cross_entropy(logits, targets, vocab, line, terms)
        (0.5 * loss).backward()
    return loss.detach(), x.grad, w.grad


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def compare(ends, vocab, terms, sp, scale=1.0, silent=False):
    hidden, weight, targets = batch(vocab, scale)
    if silent:
        targets.fill_(IGNORE)
    loss, dhidden, dweight = plain(hidden, weight, targets, terms, 0.5)
    for rank, (found, dx, dw) in enumerate(ends):
        assert_same(found, loss)
        assert torch.equal(found, ends[0][0])
        assert_same(dx, dhidden.chunk(len(ends), dim=1)[rank] if sp else dhidden)
        assert_same(dw, mine(dweight, rank, len(ends)))  # what is filled up: exactly nothing
        filled = mine(torch.ones_like(dweight), rank, len(ends)) == 0
        assert (dw[filled] == 0).all()


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("chunked", [False, True], ids=["full", "chunked"])
@pytest.mark.parametrize(("vocab", "tp"), [(12, 2), (11, 3)])
def test_loss_and_gradients(ranks, vocab, tp, chunked, terms):
    ends = ranks.run(tp, parts, vocab, terms, chunked, False, 5, 1.0, False, axes={"tp": tp})
    compare(ends, vocab, terms, False)


@pytest.mark.parametrize("chunked", [False, True], ids=["full", "chunked"])
def test_parts_of_the_sequence(ranks, chunked):
    ends = ranks.run(3, parts, 11, TERMS["both"], chunked, True, 7, 1.0, False, axes={"tp": 3})
    compare(ends, 11, TERMS["both"], True)


@pytest.mark.parametrize("chunked", [False, True], ids=["full", "chunked"])
@pytest.mark.parametrize("vocab", [1, 3, 5])
def test_fewer_words_than_would_fill_all_ranks(ranks, vocab, chunked):
    """Of 4 ranks some have no word at all: 3 of 1 word, 1 of 3 words; of 5 words the third rank has the last."""
    ends = ranks.run(4, parts, vocab, TERMS["both"], chunked, False, 4096, 1.0, False, axes={"tp": 4})
    compare(ends, vocab, TERMS["both"], False)


@pytest.mark.parametrize("chunked", [False, True], ids=["full", "chunked"])
@pytest.mark.parametrize("rows", [1, 4, 11, 12, 13])
def test_borders_of_chunks(ranks, rows, chunked):
    """12 tokens, in chunks of one and of more than all."""
    if chunked or rows == 1:
        ends = ranks.run(2, parts, 9, TERMS["plain"], chunked, False, rows, 1.0, False, axes={"tp": 2})
        compare(ends, 9, TERMS["plain"], False)


@pytest.mark.parametrize("chunked", [False, True], ids=["full", "chunked"])
def test_no_target_that_counts(ranks, chunked):
    ends = ranks.run(2, parts, 9, TERMS["both"], chunked, False, 5, 1.0, True, axes={"tp": 2})
    compare(ends, 9, TERMS["both"], False, silent=True)
    assert ends[0][0] == 0 and (ends[0][1] == 0).all() and (ends[0][2] == 0).all()


@pytest.mark.parametrize("chunked", [False, True], ids=["full", "chunked"])
def test_logits_whose_exponential_is_too_large_for_any_number(ranks, chunked):
    ends = ranks.run(2, parts, 9, TERMS["plain"], chunked, False, 5, 1e4, False, axes={"tp": 2})
    assert torch.isfinite(ends[0][0]) and ends[0][0] > 1e4
    compare(ends, 9, TERMS["plain"], False, scale=1e4)


def narrow(mesh, chunked):
    line = Line(mesh.group("tp"))
    hidden, weight, targets = batch(11)
    x, w = hidden.bfloat16().requires_grad_(), mine(weight, mesh.rank, mesh.world).bfloat16().requires_grad_()
    head = VocabularyHead(torch.nn.Parameter(w.detach()), 11, line, chunked=chunked)
    loss = head(x, targets)
    loss.backward()
    return loss.detach(), x.grad, head.weight.grad


@pytest.mark.parametrize("chunked", [False, True], ids=["full", "chunked"])
def test_a_narrow_models_loss_is_computed_wide(ranks, chunked):
    hidden, weight, targets = batch(11)
    loss, dhidden, dweight = plain(hidden.bfloat16().double(), weight.bfloat16().double(), targets, Terms())
    for rank, (found, dx, dw) in enumerate(ranks.run(2, narrow, chunked, axes={"tp": 2})):
        assert found.dtype == torch.float32 and (dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16)
        assert found.item() == pytest.approx(loss.item(), rel=0.01)
        assert (dx - dhidden).norm() < 0.02 * dhidden.norm()
        assert (dw - mine(dweight, rank, 2)).norm() < 0.02 * dweight.norm()


def not_finite_where_it_does_not_count(mesh):
    """A row of another device's padding may hold anything."""
    line = Line(mesh.group("tp"))
    hidden, weight, targets = batch(9)
    logits = (hidden @ mine(weight, mesh.rank, mesh.world).t()).clone()
    logits[0, 2] = float("nan")
    logits.requires_grad_()
    loss = cross_entropy(logits, targets, 9, line)
    loss.backward()
    return loss.detach(), logits.grad


def test_a_row_that_does_not_count_may_hold_anything(ranks):
    hidden, weight, targets = batch(9)
    loss, _, _ = plain(hidden, weight, targets, Terms())
    for found, gradient in ranks.run(2, not_finite_where_it_does_not_count, axes={"tp": 2}):
        assert_same(found, loss)
        assert torch.isfinite(gradient).all() and (gradient[0, 2] == 0).all()


def twice(mesh):
    """Two backward passes over one graph."""
    line = Line(mesh.group("tp"))
    hidden, weight, targets = batch(9)
    logits = (hidden @ mine(weight, mesh.rank, mesh.world).t()).requires_grad_()
    loss = cross_entropy(logits, targets, 9, line, TERMS["both"])
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    return torch.equal(first, second), logits.detach()


def test_backward_leaves_what_it_keeps_as_it_was(ranks):
    hidden, weight, _ = batch(9)
    for rank, (same, logits) in enumerate(ranks.run(2, twice, axes={"tp": 2})):
        assert same and torch.equal(logits, hidden @ mine(weight, rank, 2).t())


def refused(mesh, width):
    try:
        cross_entropy(torch.zeros(2, 3, width), torch.zeros(2, 3, dtype=torch.int64), 11, Line(mesh.group("tp")))
    except UserError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("width", [11, 12, 5])
def test_logits_of_all_words_are_refused(ranks, width):
    for said in ranks.run(2, refused, width, axes={"tp": 2}):
        assert said == (
            f"loss: logits of {width} words; over 2 ranks each gives those of its own 6 of 11, and all of them are "
            "never put together"
        )


# -- embedding and head ------------------------------------------------------------------------------------------------


def looked_up(mesh, vocab, sp):
    line = Line(mesh.group("tp"), sequence=sp)
    _, weight, _ = batch(vocab)
    old = Embedding(vocab, D, **CPU)
    part = torch.nn.Parameter(mine(weight, mesh.rank, mesh.world))
    embedding = part_of(old, "embed", {"weight": part}, line)
    indices = torch.arange(B * T).remainder(vocab).view(B, T)
    out = embedding(indices)
    (out * torch.arange(out.numel()).view_as(out)).sum().backward()
    return out.detach(), part.grad, indices


@pytest.mark.parametrize(("vocab", "tp", "sp"), [(11, 2, False), (11, 3, True), (3, 4, False)])
def test_embedding(ranks, vocab, tp, sp):
    _, weight, _ = batch(vocab)
    ends = ranks.run(tp, looked_up, vocab, sp, axes={"tp": tp})
    weight.requires_grad_()
    indices = torch.arange(B * T).remainder(vocab).view(B, T)
    whole = F.embedding(indices, weight)
    outs = whole.chunk(tp, dim=1) if sp else [whole] * tp
    weights = [torch.arange(out.numel(), dtype=torch.float64).view_as(out) for out in outs]
    grad = torch.cat(weights, dim=1) if sp else weights[0]
    (whole * grad).sum().backward()
    for rank, (out, dweight, kept) in enumerate(ends):
        assert torch.equal(out, outs[rank].detach())
        assert_same(dweight, mine(weight.grad, rank, tp))
        assert torch.equal(kept, indices)  # the caller's are not written to


def out_of_range(mesh):
    """What is said of words that there are not, by the embedding and by the loss."""
    line = Line(mesh.group("tp"))
    embedding = VocabularyEmbedding(torch.nn.Parameter(torch.zeros(6, 4)), 11, line)
    logits = torch.zeros(2, 6)
    said = []
    for word in (-1, 11):
        words = torch.tensor([[0, word]])
        for attempt in (lambda w=words: embedding(w), lambda w=words: cross_entropy(logits, w.flatten(), 11, line)):
            with pytest.raises(IndexError) as caught:
                attempt()
            said.append(str(caught.value))
    cross_entropy(logits, torch.tensor([10, IGNORE]), 11, line)
    return said


def test_words_that_there_are_not_are_no_other_ranks(ranks):
    """A padded row would take the twelfth of eleven words."""
    for said in ranks.run(2, out_of_range, axes={"tp": 2}):
        words = [f"{what} {word}" for word in (-1, 11) for what in ("token", "target")]
        assert said == [f"{word} is out of range: the vocabulary has 11 words" for word in words]


def read(mesh, vocab, sp):
    line = Line(mesh.group("tp"), sequence=sp)
    hidden, weight, _ = batch(vocab)
    old = Head(D, vocab, chunked=True, **CPU)
    part = torch.nn.Parameter(mine(weight, mesh.rank, mesh.world))
    head = part_of(old, "head", {"weight": part}, line)
    x = (hidden.chunk(mesh.world, dim=1)[mesh.rank] if sp else hidden).clone().requires_grad_()
    logits = head(x)
    (logits * torch.arange(logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), x.grad, part.grad


@pytest.mark.parametrize(("vocab", "tp", "sp"), [(11, 2, False), (11, 3, True), (3, 4, False)])
def test_logits_for_reading(ranks, vocab, tp, sp):
    hidden, weight, _ = (tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in batch(vocab))
    logits = hidden @ weight.t()
    (logits * torch.arange(logits.numel()).view_as(logits)).sum().backward()
    for rank, (found, dx, dw) in enumerate(ranks.run(tp, read, vocab, sp, axes={"tp": tp})):
        assert_same(found, logits.detach())
        assert_same(dx, hidden.grad.chunk(tp, dim=1)[rank] if sp else hidden.grad)
        assert_same(dw, mine(weight.grad, rank, tp))


def counted(mesh, chunked):
    """What is sent for a loss: three numbers a token, and the head's input."""
    line = Line(mesh.group("tp"))
    line.micro = 4
    hidden, weight, targets = batch(11)
    head = VocabularyHead(torch.nn.Parameter(mine(weight, mesh.rank, mesh.world)), 11, line, chunked=chunked)
    mesh.ledger.clear()
    head(hidden.requires_grad_(), targets).backward()
    return [(r.key.reason, r.key.phase, r.key.micro, r.payload) for r in mesh.ledger.rows()]


@pytest.mark.parametrize("chunked", [False, True], ids=["full", "chunked"])
def test_what_is_sent(ranks, chunked):
    for rows in ranks.run(2, counted, chunked, axes={"tp": 2}):
        assert rows == [("tp.loss", "forward", 4, 3 * B * T * 8), ("tp.head", "backward", 4, B * T * D * 8)]
