"""Documents packed into sequences: layouts held against the plain model, whose parity tests/model/test_documents.py
holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.model.build import build
from meshwright.model.init import initialise_
from meshwright.model.loss import IGNORE
from meshwright.parallel import context
from meshwright.predict.memory import memory
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Checkpoint, Data, RunSpec
from meshwright.train.inputs import Share
from meshwright.train.trainer import Totals, Trainer
from meshwright.verify.peak import peak
from meshwright.verify.small import small_run
from meshwright.verify.unequal import UnequalData, proof_data
from verify.proofs import alone, on_ranks, prove, small_proof

LLAMA = ModelSpec(family="llama", vocab=37, hidden=24, layers=2, heads=4, kv_heads=2, ffn=40, max_seq=32)
GPT2 = ModelSpec(family="gpt2", vocab=37, hidden=24, layers=2, heads=4, max_seq=32)
MODELS = {
    "llama": LLAMA,
    "window": LLAMA.model_copy(update={"window": 3, "qk_norm": True}),
    "not causal": LLAMA.model_copy(update={"causal": False, "tied": True}),
    "gpt2, dropout": GPT2.model_copy(update={"embd_dropout": 0.2, "resid_dropout": 0.3}),
    "gpt2, weights dropped": GPT2.model_copy(update={"attn_dropout": 0.2}),
}
PACKED = Data(seq_len=16, packing="documents")


def make_run(model: str, layout: dict[str, Any], sequences: int = 7, **options: Any) -> RunSpec:
    return small_proof(MODELS[model], PACKED, sequences, layout, **options)


# -- the proof's documents -------------------------------------------------------------------------------------------


def test_documents_of_a_proof_are_unequal() -> None:
    """One in a sequence, many, of one token, and borders at every eighth of one, where ranks' parts end."""
    data = UnequalData(37, 16, seed=1, packed=True)
    documents = data.documents(torch.arange(8))
    _, targets = data.batch(torch.arange(8))
    plain = UnequalData(37, 16, seed=1)
    assert plain.documents(torch.arange(8)) is None
    assert documents[0].unique().numel() == documents[4].unique().numel() == 1
    assert documents[2].tolist() == [place // 2 for place in range(16)]
    lengths = [torch.unique(row, return_counts=True)[1].tolist() for row in documents]
    assert 1 in lengths[3] and len(lengths[3]) > 3 and max(map(len, (lengths[1], lengths[5]))) > 1
    last = documents.diff(dim=1) != 0
    assert (targets[:, :-1][last] == IGNORE).all()
    assert torch.equal(targets[:, :-1][~last], plain.batch(torch.arange(8))[1][:, :-1][~last])


# -- one device, data and tensor ranks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "attention"),
    [(name, how) for name in MODELS for how in ("sdpa", "explicit") if how == "explicit" or "weights" not in name],
)
def test_one_device(ranks: Any, model: str, attention: str) -> None:
    prove(ranks, make_run(model, {}, attention=attention))


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "zero": 3},
        {"dp": 2, "zero": 1, "recompute": "full", "recompute_every": 2},
        {"dp": 2, "zero": 2, "recompute": "selective"},
        {"tp": 2},
        {"tp": 2, "sp": True, "recompute": "full"},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["window", "gpt2, dropout"])
def test_ranks(ranks: Any, model: str, layout: dict[str, Any]) -> None:
    prove(ranks, make_run(model, layout))


def test_a_rank_without_a_sequence(ranks: Any) -> None:
    prove(ranks, make_run("llama", {"dp": 2, "zero": 3}, sequences=1))


def scored(mesh: Mesh, run: RunSpec) -> Totals:
    return Trainer(run, mesh).evaluate(proof_data(run), torch.arange(5))


def test_validation_knows_documents(ranks: Any) -> None:
    """It scores what the first step does before any update."""
    run = make_run("llama", {}, sequences=5)
    (found,) = on_ranks(ranks, run, scored)
    assert found.loss == pytest.approx(alone(run).losses[0], rel=1e-12)


def test_the_small_run_of_a_proof_is_packed_too() -> None:
    assert small_run(make_run("llama", {})).data.packing == "documents"


# -- context ranks ---------------------------------------------------------------------------------------------------

METHODS = ("gather", "rsa", "ring", "ulysses")
ORDERS = ("contiguous", "zigzag", "striped")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("method", METHODS)
def test_methods_and_orders(ranks: Any, method: str, order: str) -> None:
    prove(ranks, make_run("window", {"cp": 2, "cp_order": order, "cp_method": method}))


@pytest.mark.parametrize("order", ORDERS)
def test_learned_positions(ranks: Any, order: str) -> None:
    """Rotary ones only tell how far apart two tokens are, and so not where a document begins."""
    prove(ranks, make_run("gpt2, dropout", {"cp": 2, "cp_order": order}))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", {"cp_method": "usp", "cp_ulysses": 2, "cp_order": "striped"}),
        ("window", {"cp_method": "usp", "cp_ulysses": 2}),
        ("not causal", {"cp_method": "ring"}),
    ],
    ids=str,
)
def test_four_context_ranks(ranks: Any, model: str, layout: dict[str, Any]) -> None:
    prove(ranks, make_run(model, {"cp": 4, **layout}))


@pytest.mark.parametrize("method", METHODS)
def test_documents_that_are_not_causal(ranks: Any, method: str) -> None:
    prove(ranks, make_run("not causal", {"cp": 2, "cp_method": method}))


def changed(mesh: Mesh, layouts: list[Layout], places: list[int]) -> list[list[list[int]]]:
    """For each layout and changed token of a sequence whose documents begin at 0, 3, 4 and 11: where logits change."""
    documents = torch.tensor([[0] * 3 + [1] + [2] * 7 + [3] * 5])
    tokens = torch.arange(16)[None]
    found = []
    for layout in layouts:
        model = build(MODELS["window"], dtype=torch.float64)
        initialise_(model, seed=3)
        over = context.apply(model, mesh, method=layout.cp_method, order=layout.cp_order)
        share = Share(layout, mesh.coords["cp"], 16, mesh.device)
        over.documents = documents
        row = []
        for place in places:
            outs = []
            for token in (place, 36):
                one = share.of(tokens.where(torch.arange(16) != place, token), tokens, documents)
                with torch.no_grad():
                    outs.append(model(one.tokens, positions=one.positions, length=one.length))
            differs = torch.zeros(16, dtype=torch.int64)
            differs[one.places] = (outs[0] != outs[1]).any(-1)[0].long()
            mesh.group("cp").all_reduce(differs, reason="test", phase="step")
            row.append(differs.nonzero().flatten().tolist())
        found.append(row)
    return found


def test_a_token_changes_what_is_behind_it_in_its_document_and_nothing_else(ranks: Any) -> None:
    """The whole model, by every method in every order; its window and two blocks together reach 5 tokens."""
    layouts = [Layout(dp=1, cp=2, cp_method=method, cp_order=order) for method in METHODS for order in ORDERS]  # type: ignore[arg-type]
    places, ends = [0, 3, 4, 8, 10, 11], [3, 4, 11, 16]
    for found in ranks.run(2, changed, layouts, places, axes={"cp": 2}):
        for layout, rows in zip(layouts, found, strict=True):
            for place, row in zip(places, rows, strict=True):
                end = min(next(end for end in ends if end > place), place + 5)
                assert row == list(range(place, end)), (layout.cp_method, layout.cp_order, place)


@pytest.mark.parametrize(
    "layout",
    [
        {"cp": 2, "tp": 2},
        {"cp": 2, "tp": 2, "sp": True, "recompute": "full"},
        {"cp": 2, "dp": 2, "zero": 3, "recompute": "full", "recompute_every": 2},
        {"cp": 2, "zero": 1, "recompute": "selective", "recompute_keep": ["attention"]},
        {"cp": 2, "dp": 2, "zero": 2, "recompute": "selective"},
    ],
    ids=str,
)
def test_context_ranks_beside_others(ranks: Any, layout: dict[str, Any]) -> None:
    prove(ranks, make_run("gpt2, dropout" if layout.get("recompute") == "full" else "window", layout))


def test_context_ranks_without_a_sequence(ranks: Any) -> None:
    """In the second micro-batch they compute something of another length, which has no documents."""
    prove(ranks, make_run("llama", {"cp": 2, "dp": 2, "zero": 3}, sequences=5))


def test_context_ranks_score_what_one_does(ranks: Any) -> None:
    run = make_run("window", {"cp": 2}, sequences=5)
    for found in on_ranks(ranks, run, scored):
        assert found.loss == pytest.approx(alone(run).losses[0], rel=1e-12)


# -- the most that is held -------------------------------------------------------------------------------------------


def fullest(mesh: Mesh, run: RunSpec) -> int:
    trainer, data = Trainer(run, mesh), proof_data(run)

    def step() -> None:
        trainer.update(1, trainer.accumulate(data, 0))

    step()
    return peak(trainer, step).total


def long_run(model: ModelSpec, layout: Layout, attention: Any = "sdpa", seq_len: int = 128) -> RunSpec:
    return RunSpec(
        model=model, data=Data(seq_len=seq_len, packing="documents"), batch=Batch(sequences=3, micro=3), layout=layout,
        device="cpu", checkpoint=Checkpoint(every=0), attention=attention,
    )  # fmt: skip


DEEP = ModelSpec(family="llama", vocab=64, hidden=32, layers=4, heads=4, kv_heads=2, ffn=64, max_seq=128)
NARROW = ModelSpec(family="llama", vocab=16, hidden=16, layers=1, heads=4, kv_heads=4, ffn=16, max_seq=256)
WIDE = ModelSpec(family="gpt2", vocab=64, hidden=32, layers=4, heads=4, max_seq=128)


@pytest.mark.parametrize("model", [DEEP, WIDE], ids=["llama", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_the_peak_is_what_is_predicted(ranks: Any, attention: str, model: ModelSpec) -> None:
    """Long sequences of a narrow model, so that the masks are a good part of it."""
    run = long_run(model, Layout(dp=1, zero_join=0), attention)
    (found,) = on_ranks(ranks, run, fullest)
    assert found == pytest.approx(memory(run, run.layout, 0).total, rel=0.05)


@pytest.mark.parametrize("method", METHODS)
def test_the_peak_of_context_ranks_is_what_is_predicted(ranks: Any, method: str) -> None:
    """Masks are made for a call at a time, and documents of whole sequences are on every rank."""
    run = long_run(NARROW, Layout(dp=1, cp=2, cp_method=method, zero_join=0), seq_len=256)  # type: ignore[arg-type]
    for rank, found in enumerate(on_ranks(ranks, run, fullest)):
        assert found == pytest.approx(memory(run, run.layout, rank).total, rel=0.05)
