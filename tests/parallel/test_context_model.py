"""Attention over `cp` in the plain model: the same loss and gradients, and with recompute what is sent again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.model.build import build
from meshwright.model.init import initialise_
from meshwright.parallel import context
from meshwright.parallel.recompute import Recompute
from meshwright.predict.context import Attention, kept, traffic
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec
from meshwright.verify.activations import measure
from parallel.sequences import mine

LLAMA = ModelSpec(family="llama", vocab=31, hidden=16, layers=3, heads=4, kv_heads=2, ffn=24, max_seq=16, qk_norm=True)
SPECS = {
    "llama": LLAMA,
    "window": LLAMA.model_copy(update={"window": 5}),
    "gpt2": ModelSpec(family="gpt2", vocab=31, hidden=16, layers=3, heads=4, max_seq=16),
}
RECOMPUTE: dict[str, dict[str, Any] | None] = {
    "none": None,
    "full": {},
    "every 2": {"every": 2},
    "linear": {"keep": ("linear",)},
    "attention": {"keep": ("attention",)},
    "both": {"keep": ("linear", "attention")},
}
METHODS = (("gather", 1), ("rsa", 1), ("ring", 1), ("ulysses", 1), ("usp", 2))
BATCH, LENGTH = 2, 16


def model(spec: ModelSpec):
    found = build(spec, dtype=torch.float64)
    initialise_(found, seed=3)
    return found


def data() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return tuple(torch.randint(31, (BATCH, LENGTH), generator=random) for _ in range(2))


def trained(mesh: Mesh, method: str, inner: int, order: str) -> dict[tuple[str, str], Any]:
    """By family and recompute: loss and gradients summed over cp, the ledger's rows, and bytes kept for backward."""
    found = {}
    for name, spec in SPECS.items():
        for how in RECOMPUTE if name == "llama" else ("none", "attention"):
            it, options = model(spec), RECOMPUTE[how]
            recompute = None if options is None else Recompute(it.blocks, **options)
            line = context.apply(it, mesh, method=method, order=order, inner=inner, recompute=recompute)
            line.micro = 7
            tokens, targets = (mine(each, mesh, order) for each in data())
            positions = mine(torch.arange(LENGTH)[None], mesh, order)[0]
            mesh.ledger.clear()
            losses = []

            def forward(it=it, tokens=tokens, targets=targets, positions=positions, losses=losses) -> torch.Tensor:
                losses.append(it(tokens, targets, positions=positions))
                return losses[0]

            stored = measure(it, forward, inputs=(tokens, targets, positions))
            losses[0].backward()
            rows = mesh.ledger.take()
            total = losses[0].detach()
            for each in (total, *(p.grad for p in it.parameters())):
                mesh.group("cp").all_reduce(each, reason="test", phase="step")
            gradients = {key: p.grad for key, p in it.named_parameters()}
            found[name, how] = total.item(), gradients, rows, stored.by_tensor()
    return found


@pytest.mark.parametrize(("method", "inner"), METHODS)
def test_the_model_is_the_plain_one_and_all_is_as_predicted(ranks, method, inner):
    """Loss and gradients, traffic by phase, and bytes that attention keeps: whether a model gives q, k and v one by one
    or as views of one, and with recompute that keeps attention, where nothing is sent again."""
    order, cp = "striped" if method in ("rsa", "usp") else "zigzag", 4 if method == "usp" else 2
    expected = {name: plain(spec) for name, spec in SPECS.items()}
    for found in ranks.run(cp, trained, method, inner, order, axes={"cp": cp}):
        for (name, how), (loss, gradients, rows, stored) in found.items():
            assert loss == pytest.approx(expected[name][0], rel=1e-12)
            for key, right in expected[name][1].items():
                assert (gradients[key] - right).norm() < 1e-10 * right.norm().clamp_min(1e-3), (name, how, key)
            it = attention(SPECS[name], method, cp, order, inner)
            again = 0 if how in ("none", "attention", "both") else SPECS[name].layers
            predicted = traffic(it, SPECS[name].layers, 7, again)
            assert sorted(map(str, rows)) == sorted(map(str, predicted)), (name, how)
            if how == "none":
                # What attention puts out is first saved by the layer behind it, where attention itself does not.
                held = [row.bytes for row in kept(it)]
                held = held[:-1] if method in ("rsa", "ulysses", "usp") else held
                assert sum(size for where, size in stored.items() if ".0." in where and ".core:" in where) == sum(held)
        more = sum(found["llama", "attention"][3].values()) - sum(found["llama", "full"][3].values())
        it = attention(LLAMA, method, cp, order, inner)
        assert more == LLAMA.layers * sum(row.bytes for row in kept(it) if row.by == "attention")


def plain(spec: ModelSpec) -> tuple[float, dict[str, torch.Tensor]]:
    it = model(spec)
    loss = it(*data())
    loss.backward()
    return loss.item(), {key: p.grad for key, p in it.named_parameters()}


def attention(spec: ModelSpec, method: str, cp: int, order: str, inner: int) -> Attention:
    return Attention(
        method, cp, order, BATCH, LENGTH, spec.heads, spec.num_kv_heads, spec.head_width, 8, inner, window=spec.window
    )


def refused(mesh: Mesh) -> list[str]:
    found = []
    for spec, options in (
        (SPECS["gpt2"].model_copy(update={"attn_dropout": 0.1}), {"method": "ring"}),
        (LLAMA, {"method": "usp", "inner": 3}),
    ):
        kind = "explicit" if spec.attn_dropout else "sdpa"
        try:
            context.apply(build(spec, attention=kind), mesh, **options)
        except UserError as exc:
            found.append(str(exc))
    return found


def test_what_cannot_be_done_is_refused_in_words(ranks):
    for found in ranks.run(2, refused, axes={"cp": 2}):
        assert found == [
            "cp: transformer.h.0.attn.core drops attention weights, which no method over cp does; use attn_dropout=0",
            "cp: usp: inner=3 does not divide cp=2",
        ]
