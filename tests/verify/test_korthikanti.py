"""Korthikanti et al.'s formula for the activations of a layer, against storages measured and predicted, one by one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from meshwright.model.build import build
from meshwright.model.dropout import DropoutKey
from meshwright.model.init import initialise_
from meshwright.predict import activations, korthikanti
from meshwright.predict.korthikanti import TERMS
from meshwright.spec.model import ModelSpec
from meshwright.verify.activations import measure

# No two of h, 4h, a·s and their products with the paper's factors agree, so that no tensor can stand for another.
SPEC = ModelSpec(
    family="gpt2", vocab=33, hidden=40, layers=2, heads=5, max_seq=64,
    embd_dropout=0.1, attn_dropout=0.1, resid_dropout=0.1,
)  # fmt: skip
LAYER = "transformer.h.1."
STATISTICS = 2 * 2  # mean and 1/σ of both norms, which the paper neglects


def statistics(batch: int, seq: int) -> list[int]:
    return [2 * batch * seq] * STATISTICS  # the CPU's kernel keeps them in bfloat16 too


def measured(batch: int, seq: int, dtype: torch.dtype) -> list[tuple[str, int]]:
    """Module within the layer, and bytes, of each storage."""
    model = build(SPEC, attention="explicit", dtype=dtype).train()
    initialise_(model, 0)
    tokens = torch.randint(SPEC.vocab, (batch, seq))
    kept = measure(
        model, lambda: model(tokens, tokens, dropout=DropoutKey(0, 0, torch.arange(batch))), inputs=(tokens,)
    )
    return [(k.where.removeprefix(LAYER), k.bytes) for k in kept.kept if k.where.startswith(LAYER)]


def test_the_terms_are_the_papers() -> None:
    sums = {(heading, "sbh"): sum(t.sbh for t in TERMS if t.heading == heading) for heading in ("attention", "MLP")}
    assert sums == {("attention", "sbh"): 11, ("MLP", "sbh"): 19}
    assert sum(t.sbh for t in TERMS if t.heading == "LayerNorm") == 4
    assert sum(t.ass for t in TERMS) == 5
    gpt3 = SPEC.model_copy(update={"hidden": 12288, "heads": 96})
    terms = sum(term.bytes(gpt3, batch=1, seq=2048) for term in TERMS)
    # Section 5: for GPT-3 5as/h is 80, so it is 70% of the layer's activations.
    assert terms == korthikanti.layer_bytes(gpt3, batch=1, seq=2048) == 2048 * 12288 * (34 + 80)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("seq", [16, 48])
def test_a_layer_keeps_what_the_paper_says_tensor_by_tensor(seq: int, batch: int, dtype: torch.dtype) -> None:
    found = Counter(measured(batch, seq, dtype))
    for size in statistics(batch, seq):
        norm = next(where for where in ("ln_1", "ln_2") if found[where, size])
        found[norm, size] -= 1
    paper = Counter((term.where, term.bytes(SPEC, batch=batch, seq=seq)) for term in TERMS)
    assert +found == paper
    total = sum(size for _, size in measured(batch, seq, dtype))
    assert total == korthikanti.layer_bytes(SPEC, batch=batch, seq=seq) + sum(statistics(batch, seq))


@pytest.mark.parametrize("seq", [16, 48, 1024])
def test_a_layer_is_predicted_to_keep_what_the_paper_says_under_the_names_it_gives(seq: int) -> None:
    rows = activations.saved(SPEC, batch=2, seq=seq, dtype_bytes=2, attention="explicit")
    foretold = {(r.where.removeprefix(LAYER), r.what): r.bytes for r in rows if r.where.startswith(LAYER)}
    for norm in ("ln_1", "ln_2"):
        for what in ("mean", "inverse standard deviation"):
            assert foretold.pop((norm, what)) == 2 * 2 * seq
    assert foretold == {(term.where, term.what): term.bytes(SPEC, batch=2, seq=seq) for term in TERMS}


def test_the_page_shows_what_is_predicted() -> None:
    """The tables of docs/activations.md, printed by benchmarks/activations.py, are of this version."""
    page = (Path(__file__).parents[2] / "docs/activations.md").read_text()
    spec = SPEC.model_copy(update={"hidden": 768, "heads": 12, "max_seq": 1024, "vocab": 256})
    lengths = [
        [r for r in activations.saved(spec, batch=2, seq=seq, dtype_bytes=2, attention="explicit") if LAYER in r.where]
        for seq in (512, 1024)
    ]
    table = page.partition("### GPT-2, explicit")[2].partition("###")[0]
    cells = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if line.startswith("| `")]
    assert [(line[1].strip("`"), line[2], line[5], line[6]) for line in cells] == [
        (short.where.removeprefix(LAYER), short.what, f"{short.bytes:,}", f"{long.bytes:,}")
        for short, long in zip(*lengths, strict=True)
    ]
    terms = {(term.where, term.what): f"{term.paper}: {term.formula()}" for term in TERMS}
    assert [line[3] for line in cells] == [terms.get((line[1].strip("`"), line[2]), "left out") for line in cells]
