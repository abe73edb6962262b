"""Attention over parts of a sequence: gather, rsa and ring against attention of the whole."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from meshwright.comm.mesh import Mesh
from meshwright.parallel.context import attend, attention, gathered_attention, ring_attention, rsa_attention
from meshwright.parallel.sight import Context
from meshwright.spec.errors import UserError
from parallel.sequences import Case, assert_as_near_as_torch, assert_whole, influence, mine

ORDERS = ("contiguous", "zigzag", "striped")


@pytest.mark.parametrize("method", ["gather", "rsa", "ring"])
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_out_and_gradients_are_those_of_the_whole(ranks, cp, method):
    cases = [
        Case(method, order, causal, heads=heads, kv_heads=kv_heads, batch=batch)
        for order, causal in itertools.product(ORDERS, (True, False))
        for heads, kv_heads, batch in ((4, 2, 2), (3, 3, 1))
    ]
    assert_whole(ranks, cp, cases)


@pytest.mark.parametrize("method", ["gather", "rsa", "ring"])
@pytest.mark.parametrize("cp", [2, 4])
def test_windows_end_where_they_do_in_the_whole(ranks, cp, method):
    """Within a chunk, at its border, one before and one behind it; over several; and wider than the sequence."""
    assert_whole(
        ranks, cp, [Case(method, order, window=w) for order in ORDERS for w in (1, 2, 3, 5, 6, 7, 12, 13, 23, 24, 99)]
    )


@pytest.mark.parametrize("method", ["gather", "rsa", "ring"])
@pytest.mark.parametrize("cp", [2, 4])
def test_queries_see_their_own_document(ranks, cp, method):
    """Documents that end within chunks and at their borders, of one token, and others in each sequence."""
    borders = ((0, 4, 6, 12, 13, 23), (0, 1, 18), (0,))
    ids = [tuple(sum(start <= p for start in starts) for p in range(24)) for starts in borders]
    cases = [Case(method, order, documents=ids[0], window=w) for order in ORDERS for w in (None, 4)]
    cases += [Case(method, order, documents=(ids[1], ids[0])) for order in ORDERS]
    cases += [Case(method, order, documents=(ids[1], ids[2]), causal=False) for order in ORDERS]
    assert_whole(ranks, cp, cases)


@pytest.mark.parametrize(("method", "inner"), [("gather", 1), ("rsa", 1), ("ring", 1), ("ulysses", 1), ("usp", 2)])
def test_documents_that_are_cut_each_by_itself(ranks, method, inner):
    """Of several lengths, with windows, and not causal."""
    cases = [
        Case(method, order, causal, window, length=48, packed=(0, 8, 32, 40, 48), inner=inner)
        for order in ORDERS
        for causal, window in ((True, None), (True, 3), (False, None))
    ]
    assert_whole(ranks, 4, cases)


@pytest.mark.parametrize("method", ["gather", "rsa", "ring"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_numbers(ranks, method, dtype):
    assert_as_near_as_torch(ranks, 4, [Case(method, order, length=256, dtype=dtype) for order in ORDERS])


@pytest.mark.parametrize("method", ["gather", "rsa", "ring"])
def test_a_token_changes_what_comes_behind_it_and_nothing_else(ranks, method):
    """Probed at both ends of every rank's chunks, in each order; with documents, within its own."""
    documents = tuple(int(p >= 7) + int(p >= 12) for p in range(24))
    cases = [Case(method, order, batch=1, documents=ids) for order in ORDERS for ids in (None, documents)]
    for changed in ranks.run(4, influence, cases, [0, 2, 3, 5, 6, 11, 12, 20, 21, 23], axes={"cp": 4}):
        for case, each in zip(cases, changed, strict=True):
            for position, found in each.items():
                ends = [24] if case.documents is None else [e for e in (7, 12, 24) if e > position]
                assert found == list(range(position, ends[0])), (case, position)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gives back."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, *(t.numel() for t in tree_iter(out) if isinstance(t, torch.Tensor)), 0)
        return out


def largest(mesh: Mesh, case: Case) -> int:
    *inputs, grad = (mine(each, mesh, case.order) for each in case.inputs())
    with Largest() as mode:
        attention(*(each.requires_grad_() for each in inputs), mesh, **case.options).backward(grad)
    return mode.elements


def test_only_rsa_holds_the_scores_of_its_queries_with_all_keys(ranks):
    """T = 512 over 2 ranks: 256 × 512 scores of one head, where keys and values are 512 × 8 twice."""
    sizes = {
        method: ranks.run(2, largest, Case(method, length=512, batch=1, heads=1, kv_heads=1), axes={"cp": 2})
        for method in ("gather", "rsa", "ring")
    }
    assert sizes["rsa"] == [256 * 512] * 2
    assert sizes["ring"] == [2 * 256 * 8] * 2
    assert sizes["gather"] == [2 * 512 * 8] * 2


def refused(mesh: Mesh) -> list[str]:
    found = []
    for length, options in ((3, {}), (6, {"packed": (0, 4, 24)}), (6, {"packed": (0, 8, 16)})):
        q = torch.ones(1, length, 2, 8)
        try:
            ring_attention(q, q, q, mesh, order="zigzag", **options)
        except UserError as exc:
            found.append(str(exc))
    return found


def test_parts_that_no_sequence_has_are_refused_in_words(ranks):
    """By every rank, before anything is sent."""
    for found in ranks.run(4, refused, axes={"cp": 4}):
        assert found == [
            "cp: a sequence of 12 cannot be cut into 8 equal chunks for cp=4 (zigzag); use 16",
            "cp: a sequence of 4 cannot be cut into 8 equal chunks for cp=4 (zigzag); use 8",
            "cp: documents [0, 8, 16] must ascend from 0 to the length, 24",
        ]


def told_anew(mesh):
    """Attention by one context that serves several documents, causal or not; and by fresh ones."""
    generator = torch.Generator().manual_seed(mesh.rank)
    q, k, v = (torch.randn(1, 4, 2, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    context = Context(mesh, method="ring", order="zigzag")
    pairs = []
    for begins in (3, 6):
        ids = (torch.arange(8) >= begins).long()
        context.documents = ids
        fresh = ring_attention(q, k, v, mesh, documents=ids)
        pairs.append((attend(context, q, k, v, causal=True, window=None), fresh))
    context.documents = None
    for packed in ((0, 4, 8), None):
        context.packed = packed
        fresh = ring_attention(q, k, v, mesh, packed=packed)
        pairs.append((attend(context, q, k, v, causal=True, window=None), fresh))
    fresh = ring_attention(q, k, v, mesh, causal=False)
    pairs.append((attend(context, q, k, v, causal=False, window=None), fresh))
    return pairs


def test_a_context_is_told_anew(ranks):
    for pairs in ranks.run(2, told_anew, axes={"cp": 2}):
        assert all(torch.equal(*pair) for pair in pairs)
        assert not any(torch.equal(pairs[0][0], other) for other, _ in pairs[1:])


def borrowed(mesh):
    """How many buffers forward and backward have taken, and how many they have given back."""
    scratch = mesh.group("cp").scratch
    counted = (mock.patch.object(scratch, name, wraps=getattr(scratch, name)) for name in ("take", "give"))
    with next(counted) as take, next(counted) as give:
        for window in (None, 1):
            q, k, v = (torch.ones(1, 4, 2, 8, requires_grad=True) for _ in range(3))
            ring_attention(q, k, v, mesh, window=window).sum().backward()
    return take.call_count, give.call_count


def test_what_a_ring_borrows_it_gives_back(ranks):
    for taken, given in ranks.run(4, borrowed, axes={"cp": 4}):
        assert taken == given >= 7


def odd(mesh):
    """What is said of tensors and options that do not belong together, and that nothing has been sent."""
    q, k = torch.zeros(1, 4, 4, 8), torch.zeros(1, 4, 2, 8)
    calls = [
        (q, torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8), {}),
        (q, k[:, :2], k[:, :2], {}),
        (q, k, k.double(), {}),
        (q, k, k, {"window": 0}),
        (q, k, k, {"order": "zigzak"}),
        (q, k, k, {"documents": torch.zeros(4, dtype=torch.int64)}),
        (q, k, k, {"documents": torch.zeros(3, 8, dtype=torch.int64)}),
    ]
    said = []
    for one in (ring_attention, gathered_attention, rsa_attention):
        for *tensors, options in calls:
            with pytest.raises(UserError) as caught:
                one(*tensors, mesh, **options)
            said.append(str(caught.value))
    return said, list(mesh.ledger.rows())


def test_what_does_not_belong_together_is_refused_before_anything_is_sent(ranks):
    words = [
        "cp: 3 key-value heads do not divide 4 heads",
        "cp: q, k and v are [1, 4, 4, 8], [1, 2, 2, 8], [1, 2, 2, 8], and not",
        "cp: q, k and v are torch.float32, torch.float32 and torch.float64, and not of one dtype",
        "cp: a window of 0 has no key; use 1 or more",
        "cp: order=zigzak: use one of contiguous, zigzag, striped",
        "cp: documents are [4], and not those of the whole sequences on every rank, [8] or [1, 8]",
        "cp: documents are [3, 8], and not those of the whole sequences",
    ]
    for said, rows in ranks.run(2, odd, axes={"cp": 2}):
        assert not rows
        for sentence, begin in zip(said, 3 * words, strict=True):
            assert sentence.startswith(begin), sentence
