"""Compiled blocks under the hooks of recompute and ZeRO: the numbers of the plain ones.

Most cases compile with the backend that traces and generates nothing, which takes the same path through hooks; one
takes the real compiler.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.model.build import build
from meshwright.model.dropout import DropoutKey, seed_torch
from meshwright.model.init import fill_, initial
from meshwright.parallel.compile import compile_blocks
from meshwright.parallel.recompute import Recompute
from meshwright.parallel.zero import shard
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec

CPU = torch.device("cpu")
LLAMA = ModelSpec(family="llama", vocab=37, hidden=24, layers=3, heads=4, kv_heads=2, ffn=40, max_seq=32)
GPT2 = ModelSpec(family="gpt2", vocab=37, hidden=24, layers=3, heads=4, max_seq=32, resid_dropout=0.3, attn_dropout=0.3)


def gradients(spec, stage, every, backend, micros=2, attention="explicit", dropout="counter", borders=None):
    """Of two micro-batches of different lengths, by name. borders: where documents begin in their sequences."""
    mesh = Mesh.single(CPU)
    model = build(spec, attention=attention, dropout=dropout, dtype=torch.float64)
    starts = initial(model)
    if backend:
        compile_blocks(model.blocks, CPU, backend)
    recompute = None if every is None else Recompute(model.blocks, every=every, rng=dropout == "torch")
    sharded = shard(model, mesh, stage, recompute=recompute)
    sharded.fill(lambda piece, flat: fill_(flat, starts[piece.placement.name], seed=1, name=piece.placement.name,
                                           start=piece.start))  # fmt: skip
    model.train()
    sharded.begin()
    for micro in range(micros):
        sharded.micro(micro, last=micro == micros - 1)
        seed_torch(1, 0, mesh.rank, micro)
        generator = torch.Generator().manual_seed(10 * mesh.rank + micro)
        tokens, targets = torch.randint(spec.vocab, (2, 2, 12 + 4 * (micro % 2)), generator=generator)
        key = DropoutKey(1, micro, 2 * mesh.rank + torch.arange(2))
        documents = None if borders is None else (torch.arange(tokens.size(1)) >= borders[micro]).long()
        model(tokens, targets, documents=documents, dropout=key).backward()
        sharded.end_micro()
    list(sharded.finish())
    return {placement.name: gradient.clone() for placement, gradient in sharded.named_gradients()}


def assert_close(found, expected):
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_every_stage_and_recompute_around_traced_blocks(spec):
    expected = gradients(spec, 0, None, None)
    for stage, every in ((0, None), (2, 1), (3, None), (3, 2)):
        assert_close(gradients(spec, stage, every, "aot_eager"), expected)


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("spec", [LLAMA, GPT2.model_copy(update={"attn_dropout": 0.0})], ids=["llama", "gpt2"])
def test_documents_are_kept_apart_in_traced_blocks(spec, attention):
    """Elsewhere in each sequence and each micro-batch: the code is one, the masks and positions are not."""
    borders = torch.tensor([[[3], [12]], [[1], [15]]])
    expected = gradients(spec, 0, None, None, attention=attention, borders=borders)
    assert_close(gradients(spec, 3, 2, "aot_eager", attention=attention, borders=borders), expected)
    whole = gradients(spec, 0, None, None, attention=attention)
    assert not torch.allclose(whole[next(iter(whole))], expected[next(iter(whole))])


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_torch_draws_the_masks_that_it_would_in_plain_blocks(attention):
    expected = gradients(GPT2, 0, None, None, attention=attention, dropout="torch")
    for stage, every in ((0, None), (3, 2)):
        assert_close(gradients(GPT2, stage, every, "aot_eager", attention=attention, dropout="torch"), expected)


@pytest.mark.timeout(400)  # the compiler takes its time on a busy machine
@pytest.mark.parametrize(
    ("spec", "attention", "dropout"),
    [(LLAMA, "explicit", "counter"), (GPT2, "sdpa", "torch")],
    ids=["llama", "gpt2, torch drops"],
)
def test_the_real_compiler(spec, attention, dropout):
    spec = spec.model_copy(update={"layers": 1})  # a C++ compiler takes seconds for each
    expected = gradients(spec, 0, None, None, 1, attention, dropout)
    assert_close(gradients(spec, 3, 1, "inductor", 1, attention, dropout), expected)


def test_a_machine_without_a_compiler_is_told_so():
    with mock.patch("shutil.which", return_value=None), pytest.raises(UserError, match="needs a C\\+\\+ compiler"):
        compile_blocks([], CPU)
