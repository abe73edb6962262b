"""A layer's activations over tensor ranks: Korthikanti et al.'s formulas (2022, arXiv 2205.05198, sections 4, 5)."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.predict import activations, korthikanti
from meshwright.predict.korthikanti import MASK, TERMS
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec

# As the paper counts: GPT, attention written out, two bytes a value, masks of one byte, all three dropouts.
GPT2 = ModelSpec(
    family="gpt2", vocab=33, hidden=48, layers=3, heads=4, max_seq=64,
    embd_dropout=0.1, attn_dropout=0.1, resid_dropout=0.1,
)  # fmt: skip
LAYER = "transformer.h.1."
B, S = 3, 16
SBH, ASS = B * S * 48, B * S * S * 4


def rows(layout: Layout) -> dict[tuple[str, str], int]:
    """Bytes by module within the layer and what it is."""
    kept = activations.saved(GPT2, layout, batch=B, seq=S, dtype_bytes=2, attention="explicit")
    return {(r.where.removeprefix(LAYER), r.what): r.bytes for r in kept if r.where.startswith(LAYER)}


ONE, TP, SP = Layout(dp=1), Layout(dp=1, tp=4), Layout(dp=1, tp=4, sp=True)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (ONE, 34 * SBH + 5 * ASS),
        (TP, 10 * SBH + (24 * SBH + 5 * ASS) // 4),
        (SP, (34 * SBH + 5 * ASS) // 4),
        (Layout(dp=1, tp=2), 10 * SBH + (24 * SBH + 5 * ASS) // 2),
    ],
    ids=["one device", "tensor", "tensor and sequence", "two tensor ranks"],
)
def test_a_layer_keeps_what_the_paper_says(layout: Layout, expected: int) -> None:
    """Tensor by tensor, and the statistics of two norms, two numbers a token each, which it leaves out."""
    found = rows(layout)
    tokens = B * S // (layout.tp if layout.sp else 1)
    statistics = {(norm, what): found.pop((norm, what)) for norm in ("ln_1", "ln_2")
                  for what in ("mean", "inverse standard deviation")}  # fmt: skip
    assert set(statistics.values()) == {2 * tokens}  # the CPU's kernel keeps them in two bytes too
    assert found == {(term.where, term.what): term.bytes(GPT2, batch=B, seq=S, layout=layout) for term in TERMS}
    assert sum(found.values()) == korthikanti.layer_bytes(GPT2, batch=B, seq=S, layout=layout) == expected


def test_without_what_the_paper_computes_again_there_are_34_sbh_over_t() -> None:
    """Its selective recomputation keeps all but what attention makes of the scores."""
    again = {("attn.core", "softmax"), ("attn.core.dropout", MASK), ("attn.core", "dropped weights")}
    kept = {(term.where, term.what): rows(SP)[term.where, term.what] for term in TERMS}
    left = sum(size for name, size in kept.items() if name not in again)
    expected = korthikanti.layer_bytes(GPT2, batch=B, seq=S, layout=SP, attention_again=True)
    assert left == expected == 34 * SBH // 4


# What one keeps and the other computes again, in sbh: the tables of docs/activations.md.
PAPER_ONLY = {
    ("attn.c_attn", "normed input of q, k, v"): 2,
    ("attn.c_proj", "output of attention"): 2,
    ("attn_dropout", MASK): 1,
    ("ln_2", "residual stream"): 2,
    ("mlp.c_fc", "normed input"): 2,
    ("mlp.c_proj", "after GELU"): 8,
    ("mlp_dropout", MASK): 1,
}
OURS_ONLY = {("attn.c_proj", "output of the projection"): 2, ("mlp.c_proj", "output of the projection"): 2}


@pytest.mark.parametrize("layout", [ONE, TP, SP], ids=["one device", "tensor", "tensor and sequence"])
def test_our_selective_recompute_keeps_20_sbh_where_the_papers_keeps_34(layout: Layout) -> None:
    ours = layout.model_copy(update={"recompute": "selective"})
    parts = activations.storages(GPT2, layout, batch=B, seq=S, dtype_bytes=2, attention="explicit")
    block = parts.blocks[1]
    stay = [block[0], *activations.outputs(block, ours)]
    sizes = {(row.where.removeprefix(LAYER), row.what): row.bytes for row in stay}
    by_paper = {(t.where, t.what): t for t in TERMS if not t.ass}
    assert sum(t.sbh for t in by_paper.values()) == 34
    assert {name for name in by_paper if name not in sizes} - {("attn.core", part) for part in "qkv"} == set(PAPER_ONLY)
    assert set(sizes) - set(by_paper) == {*OURS_ONLY, ("attn.core", "q, k and v in one")}  # the paper's q, k, v: 6 sbh
    assert {name: by_paper[name].sbh for name in PAPER_ONLY} == PAPER_ONLY
    whole = SBH // (layout.tp if layout.sp else 1)
    assert {name: sizes[name] for name in OURS_ONLY} == {name: sbh * whole for name, sbh in OURS_ONLY.items()}
    # Block input and outputs of the rows' products whole, what columns put out dealt out.
    assert sum(sizes.values()) == 6 * whole + 14 * SBH // layout.tp
    assert 34 - sum(PAPER_ONLY.values()) + sum(OURS_ONLY.values()) == 6 + 14
    kept = activations.saved(GPT2, ours, batch=B, seq=S, dtype_bytes=2, attention="explicit")
    assert sum(r.bytes for r in kept if r.where == LAYER.rstrip(".")) == sum(sizes.values())


def test_the_page_shows_these_tables() -> None:
    page = (Path(__file__).parents[2] / "docs/activations.md").read_text()
    section = page.partition("## Over tensor ranks")[2].partition("## Tables")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:3] == "| `"]
    split = {f"{t.where}: {t.what}": (t.formula(), t.dealt_out) for t in TERMS}
    assert {f"{where.strip('`')}: {what}": ways for where, what, *ways in (c for c in cells if len(c) == 5)} == {
        name: [formula, f"{formula} / t" if dealt_out else formula, f"{formula} / t"]
        for name, (formula, dealt_out) in split.items()
    }
    only = {c[0].replace("`", ""): int(c[1]) for c in cells if len(c) == 2 and c[0] not in ("", "sbh")}
    assert only == {f"{where}: {what}": sbh for (where, what), sbh in (PAPER_ONLY | OURS_ONLY).items()}
