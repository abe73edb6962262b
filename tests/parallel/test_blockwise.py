"""Kernels of a block: the written-out one, for what fused kernels do not take, beside the fused; and the merge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.parallel import blockwise
from meshwright.parallel.blockwise import Merged

HIDDEN = torch.zeros(7, 5, dtype=torch.bool)
HIDDEN[2] = True  # a query that sees nothing
HIDDEN[4, 1:] = True
MASK = torch.zeros(7, 5, dtype=torch.float64).masked_fill(HIDDEN, -torch.inf)
BY_SEQUENCE = torch.stack((MASK, MASK.flip(0)))[:, None]


def inputs() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = ((2, 7, 6, 8), (2, 5, 2, 8), (2, 5, 2, 8), (2, 7, 6, 8))
    return [torch.randn(shape, dtype=torch.float64, generator=random) for shape in shapes]


@pytest.mark.parametrize("rows", [1 << 25, 1, 100], ids=["at once", "row by row", "a few rows"])
@pytest.mark.parametrize(
    ("causal", "mask"),
    [(False, None), (True, None), (False, MASK), (False, BY_SEQUENCE)],
    ids=["full", "causal", "mask", "masks"],
)
def test_written_out_is_the_fused_kernel(monkeypatch, causal, mask, rows):
    monkeypatch.setattr(blockwise, "_ROWS", rows)
    q, k, v, grad = inputs()
    out, lse = blockwise.forward(q, k, v, causal=causal, mask=mask)
    ours, ours_lse = blockwise._written_out(q, k, v, causal, mask)
    seen = lse.isfinite()
    assert (seen.all(-1).sum() == 14) == (mask is None)
    torch.testing.assert_close(ours_lse, lse)
    torch.testing.assert_close(ours[seen], out[seen])
    # As if these were some of the keys of a larger whole: its log-sum-exps are larger.
    whole = lse.nan_to_num(neginf=0.0) + 0.7
    found = blockwise._written_out_backward(grad, q, k, v, out, whole, causal, mask)
    for a, b in zip(found, blockwise.backward(grad, q, k, v, out, whole, causal=causal, mask=mask), strict=True):
        torch.testing.assert_close(a, b)


def test_blocks_of_keys_merge_to_the_whole_in_any_order():
    """Also where the first block has nothing for a query, or not all queries."""
    q, k, v, _ = inputs()
    whole, whole_lse = blockwise.forward(q, k, v, causal=False)
    hidden = torch.zeros(7, 2, dtype=torch.float64)
    hidden[3] = -torch.inf
    first = slice(0, 2), slice(2, 5)
    for parts in (first, first[::-1]):
        merged = Merged(q)
        for keys in parts:
            for rows in (slice(0, 3), slice(3, 7)):
                merged.add(rows, *blockwise.forward(q[:, rows], k[:, keys], v[:, keys], causal=False))
        out, lse = merged.result()
        torch.testing.assert_close(out, whole)
        torch.testing.assert_close(lse, whole_lse)
    merged = Merged(q)
    for _ in range(2):  # twice nothing for query 3
        merged.add(slice(0, 7), *blockwise.forward(q, k[:, :2], v[:, :2], causal=False, mask=hidden))
    merged.add(slice(3, 4), *blockwise.forward(q[:, 3:4], k, v, causal=False))
    out, lse = merged.result()
    torch.testing.assert_close(out[:, 3], whole[:, 3])
    torch.testing.assert_close(lse[:, 3], whole_lse[:, 3])
