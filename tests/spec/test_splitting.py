"""What tensor ranks do not divide is refused, with what would do."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.splitting import check

LLAMA = ModelSpec(family="llama", vocab=101, hidden=48, layers=1, heads=12, kv_heads=4, ffn=60, max_seq=32)


@pytest.mark.parametrize("tp", [1, 2, 4, 12])
def test_what_divides(tp: int) -> None:
    """Twelve heads, four key-value heads, each held by three of twelve ranks; the vocabulary is filled up."""
    check(LLAMA, Layout(tp=tp), 31)


@pytest.mark.parametrize(
    ("tp", "fields", "words"),
    [
        (5, {}, "layout.tp=5 does not divide 12 heads; use 1, 2, 4 or 12"),
        (24, {}, "layout.tp=24 does not divide 12 heads; use 1, 2, 4 or 12"),
        (6, {}, "layout.tp=6 does not divide 4 key-value heads; use 1, 2, 4 or 12"),
        (4, {"ffn": 62}, "layout.tp=4 does not divide the feed-forward width 62; use 1 or 2"),
        (2, {"ffn": 61}, "layout.tp=2 does not divide the feed-forward width 61; use 1"),
    ],
)
def test_what_does_not(tp: int, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(LLAMA.model_copy(update=fields), Layout(tp=tp), 32)
    assert str(caught.value) == words


@pytest.mark.parametrize(("tp", "right"), [(4, "tp=2"), (12, "tp=2")])
def test_sequences_that_do_not_divide(tp: int, right: str) -> None:
    longer = -(-30 // tp) * tp
    with pytest.raises(ValueError, match=f"use data.seq_len={longer}, sp=false, or {right}$"):
        check(LLAMA, Layout(tp=tp, sp=True), 30)
    check(LLAMA, Layout(tp=tp), 30)
