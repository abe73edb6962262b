"""Context ranks held against the plain model on whole sequences: gradients, states, bytes, activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.model.loss import IGNORE
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec, RopeScaling
from meshwright.spec.run import Data, RunSpec
from meshwright.train.trainer import Totals, Trainer
from meshwright.verify.small import small_run
from meshwright.verify.unequal import UnequalData
from verify.proofs import on_ranks, prove, small_proof

LLAMA = ModelSpec(family="llama", vocab=37, hidden=24, layers=2, heads=4, kv_heads=2, ffn=40, max_seq=32)
GPT2 = ModelSpec(family="gpt2", vocab=37, hidden=24, layers=2, heads=4, max_seq=32)
MODELS = {
    "llama": LLAMA,
    "window": LLAMA.model_copy(update={"window": 5, "qk_norm": True}),
    "not causal": LLAMA.model_copy(update={"causal": False, "tied": True}),
    # Longer than it was trained at: the table is that of the whole sequence, not of a part of it.
    "dynamic": LLAMA.model_copy(
        update={"rope_scaling": RopeScaling(kind="dynamic", factor=2.0, original_max_seq=8), "max_seq": 32}
    ),
    "gpt2, dropout": GPT2.model_copy(update={"embd_dropout": 0.2, "resid_dropout": 0.3}),
}
LOOPS = ("dp", "cp", "tp", "pp")


def make_run(model: str, sequences: int, layout: dict[str, Any], **options: Any) -> RunSpec:
    return small_proof(MODELS[model], Data(seq_len=16), sequences, layout, **options)


def prove_exactly(ranks: Any, run: RunSpec) -> None:
    """What is kept for backward to the byte too; and the ranks have sent each other something."""
    report = prove(ranks, run)
    assert all(check.expected == check.found for check in report.activations), report.activation_differences
    assert any("over cp, cp." in check.what or "over cp." in check.what for check in report.traffic)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"cp": 2, "cp_method": "gather", "dp": 2, "zero": 2, "order": LOOPS}),
    ("llama", {"cp": 2, "cp_method": "rsa", "cp_order": "striped", "zero": 1}),
    ("llama", {"cp": 2, "dp": 2, "zero": 3, "zero_shard": 2, "cp_order": "contiguous"}),
    ("llama", {"cp": 4, "cp_method": "ulysses", "zero": 1}),
    ("llama", {"cp": 4, "cp_method": "usp", "cp_ulysses": 2, "zero": 3}),
    ("llama", {"cp": 2, "tp": 2, "sp": True, "zero": 1}),
    ("llama", {"cp": 2, "tp": 2, "cp_method": "ulysses"}),
    ("window", {"cp": 4, "zero": 2}),
    ("window", {"cp": 2, "cp_method": "ulysses", "cp_order": "contiguous"}),
    ("not causal", {"cp": 2, "cp_method": "rsa", "dp": 2}),
    ("not causal", {"cp": 4, "cp_order": "striped"}),
    ("dynamic", {"cp": 2, "cp_order": "contiguous"}),
    ("gpt2, dropout", {"cp": 2, "dp": 2, "zero": 1}),
    ("gpt2, dropout", {"cp": 2, "tp": 2, "sp": True, "zero": 3, "order": LOOPS}),
    ("gpt2, dropout", {"cp": 2, "cp_method": "gather", "cp_order": "striped", "recompute": "full"}),
    ("llama", {"cp": 2, "recompute": "selective", "recompute_keep": ("linear",), "zero": 3}),
    ("llama", {"cp": 2, "cp_method": "rsa", "recompute": "selective", "recompute_keep": ("softmax", "activation")}),
    ("llama", {"cp": 4, "cp_method": "usp", "cp_ulysses": 2, "recompute": "selective",
               "recompute_keep": ("linear", "attention")}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "layout"), CASES, ids=str)
def test_layouts(ranks: Any, model: str, layout: dict[str, Any]) -> None:
    prove_exactly(ranks, make_run(model, 5, layout))


def test_a_chunked_loss(ranks: Any) -> None:
    prove_exactly(ranks, make_run("llama", 5, {"cp": 2, "zero": 1}, loss="chunked"))


@pytest.mark.parametrize("layout", [{"zero": 3}, {"zero": 0}, {"dp": 2, "tp": 2, "sp": True, "zero": 3}], ids=str)
def test_ranks_without_a_sequence(ranks: Any, layout: dict[str, Any]) -> None:
    """At ZeRO 3 the context ranks of a place without one compute the shortest sequence that they can share."""
    prove_exactly(ranks, make_run("gpt2, dropout", 1, {"dp": 2, "cp": 2, **layout}))


class OnePart(UnequalData):
    """Valid targets in the first quarter of each sequence only, and at its end: one rank of two has none in zigzag."""

    def batch(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = super().batch(ids)
        targets[:, self.seq_len // 4 : -self.seq_len // 4] = IGNORE
        return tokens, targets


class Silent(UnequalData):
    def batch(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = super().batch(ids)
        return tokens, torch.full_like(targets, IGNORE)


def figures(mesh: Mesh, run: RunSpec, kind: type[UnequalData]) -> tuple[Totals, Totals, bool]:
    """A step's, those of an evaluation, and whether anything is not finite."""
    trainer = Trainer(run, mesh)
    data = kind(run.model.vocab, run.data.seq_len, run.seed)
    scored = trainer.evaluate(data, torch.arange(5))
    totals = trainer.accumulate(data, 0)
    trainer.update(0, totals)
    trainer.sharded.settle()
    return totals, scored, all(bool(unit.master.isfinite().all()) for unit in trainer.sharded.units)


@pytest.mark.parametrize("kind", [OnePart, Silent])
def test_a_part_or_a_batch_without_a_valid_token(ranks: Any, kind: type[UnequalData]) -> None:
    run = make_run("llama", 5, {"cp": 2, "zero": 1})
    (alone,) = ranks.run(1, figures, make_run("llama", 5, {}), kind)
    for totals, scored, finite in on_ranks(ranks, run, figures, kind):
        assert finite
        for mine, right in ((totals, alone[0]), (scored, alone[1])):
            assert (mine.tokens, mine.loss) == (right.tokens, pytest.approx(right.loss, rel=1e-12, abs=0))
        assert totals.gradient_norm == pytest.approx(alone[0].gradient_norm, rel=1e-10, abs=0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "layout"),
    [
        (8, None, {"cp": 4, "cp_method": "ulysses"}),
        (6, 2, {"cp": 6, "cp_method": "ulysses", "cp_order": "contiguous"}),
        (16, 8, {"cp": 4, "cp_method": "usp", "cp_ulysses": 2, "tp": 8, "sp": True}),
        (12, 1, {"cp": 3, "cp_method": "ulysses", "tp": 2}),
        (8, 4, {"cp": 5}),
    ],
    ids=str,
)
def test_context_ranks_share_the_small_model(heads: int, kv_heads: int | None, layout: dict[str, Any]) -> None:
    """What they can share of the large one."""
    model = ModelSpec(
        family="llama", vocab=64, hidden=8 * heads, layers=3, heads=heads, kv_heads=kv_heads, ffn=96, max_seq=960
    )
    small = small_run(RunSpec(model=model, layout=Layout(dp=1, **layout), data=Data(seq_len=960)))
    assert small.layout.cp == layout["cp"] and small.data.seq_len >= small.layout.cp
