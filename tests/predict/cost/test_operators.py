"""The operators' products are what `predict.flops` counts, and what torch does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from meshwright.predict.cost.operators import Flash, Operator, Product, Shard, Sizes, block, head
from meshwright.predict.cost.parts import again
from meshwright.predict.flops import counted
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec

GPT = ModelSpec(family="gpt2", vocab=1000, hidden=64, layers=3, heads=8, max_seq=64)
DROPS = GPT.model_copy(update={"attn_dropout": 0.1, "resid_dropout": 0.1, "embd_dropout": 0.1})
LLAMA = ModelSpec(family="llama", vocab=1003, hidden=64, layers=3, heads=8, kv_heads=2, ffn=96, max_seq=64)
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"tp": 4, "sp": True},
    {"recompute": "full"},
    {"tp": 2, "recompute": "selective"},
    {"recompute": "selective", "recompute_keep": ("attention",)},
    {"cp": 4},
    {"cp": 2, "tp": 2, "cp_method": "ulysses"},
    {"cp": 4, "cp_order": "contiguous", "recompute": "full"},
]


def products(operators: Iterable[Operator], which: str) -> int:
    works = [work for each in operators for work in getattr(each, which)]
    return sum(work.flops for work in works if isinstance(work, Product | Flash))


@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("spec", [GPT, DROPS, LLAMA], ids=["gpt", "drops", "llama"])
def test_products_are_those_that_are_counted(
    spec: ModelSpec, fused: bool, attention: Any, fields: dict[str, Any]
) -> None:
    if "cp" in fields and attention == "explicit":
        return
    layout = Layout(dp=1, **fields)
    shard = Shard.of(layout, 3)
    it = Sizes(spec, shard, 32, 2, attention, fused)
    inside, behind = block(it), head(it)
    # The dearest of the context ranks: all do alike in zigzag, the last has most where each has a run.
    expected = counted(spec, batch=3, seq=32, attention=attention, layout=layout, place=layout.cp - 1)
    assert spec.layers * products(inside, "forward") + products(behind, "forward") == expected.forward
    assert spec.layers * products(inside, "backward") + products(behind, "backward") == expected.backward
    assert spec.layers * products(again(inside, shard, spec), "forward") == expected.recompute
