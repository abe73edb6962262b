"""Sampling: what the model is shown, what is drawn, and that it is drawn again."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.comm.mesh import Mesh
from meshwright.model.build import build
from meshwright.model.init import initialise_
from meshwright.spec.context import grain
from meshwright.spec.errors import RunError
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import Data, RunSpec
from meshwright.train.sample import generate
from meshwright.train.trainer import Trainer


class Recorder(nn.Module):
    """Likes the token after the last one it sees; remembers what it was shown and how."""

    def __init__(self, vocab: int = 5, max_seq: int = 3, scale: float = 1.0) -> None:
        super().__init__()
        self.spec = SimpleNamespace(max_seq=max_seq)
        self.scale = nn.Parameter(torch.tensor(scale))
        self.vocab = vocab
        self.seen: list[list[int]] = []
        self.modes: set[bool] = set()

    def forward(self, tokens: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        self.seen.append(tokens[0].tolist())
        self.modes.add(self.training)
        return self.scale * nn.functional.one_hot((tokens + 1) % self.vocab, self.vocab)


def test_the_likeliest_and_the_window() -> None:
    model = Recorder()
    assert generate(model, [1, 2], 4, temperature=0, seed=1) == [1, 2, 3, 4, 0, 1]
    assert model.seen == [[1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 0]]


def test_a_prompt_longer_than_the_model() -> None:
    model = Recorder()
    assert generate(model, [0, 0, 0, 1, 2], 1, temperature=0, seed=1) == [0, 0, 0, 1, 2, 3]
    assert model.seen == [[0, 1, 2]]


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_restored(training: bool) -> None:
    model = Recorder().train(training)
    generate(model, [1], 2, temperature=1, seed=1)
    assert (model.training, model.modes) == (training, {False})
    assert torch.is_grad_enabled()


def test_frequencies_follow_softmax() -> None:
    model = Recorder(max_seq=1, scale=2.0)
    ids = generate(model, [0], 4000, temperature=2.0, seed=3)
    follows = sum(b == (a + 1) % 5 for a, b in pairwise(ids)) / 4000
    e = torch.e
    assert follows == pytest.approx(e / (e + 4), abs=0.03)


def test_small_temperatures_do_not_overflow() -> None:
    assert generate(Recorder(), [0], 3, temperature=1e-300, seed=1) == [0, 1, 2, 3]


@pytest.mark.parametrize("preset", ["gpt2-tiny", "llama-tiny"])
def test_a_real_model_draws_the_same_again(preset: str) -> None:
    spec = ModelSpec(**{**PRESETS[preset].model_dump(), "layers": 1, "max_seq": 8})
    model = build(spec)
    initialise_(model, 1)
    first = generate(model, [1, 2, 3], 12, temperature=0.8, seed=1)
    torch.manual_seed(99)  # the global generator has no part in it
    assert generate(model, [1, 2, 3], 12, temperature=0.8, seed=1) == first
    assert generate(model, [1, 2, 3], 12, temperature=0.8, seed=2) != first
    assert len(first) == 15 and first[:3] == [1, 2, 3] and all(0 <= token < spec.vocab for token in first)


def test_refused() -> None:
    with pytest.raises(ValueError, match="prompt of 0 tokens"):
        generate(Recorder(), [], 1, temperature=1, seed=1)
    with pytest.raises(RunError, match="not finite"):
        generate(Recorder(scale=float("nan")), [1], 1, temperature=1, seed=1)


def sampled(mesh: Mesh, run: RunSpec) -> list[int]:
    trainer = Trainer(run, mesh)
    options = {"temperature": 0.8, "seed": 7, "multiple": grain(run.layout), "logits": trainer.logits}
    return generate(trainer.model, [3, 1], 9, **options)


@pytest.mark.parametrize(
    "layout",
    [{"cp": 2}, {"cp": 2, "cp_order": "striped", "zero": 3}, {"cp": 2, "cp_method": "ulysses", "tp": 2, "sp": True}],
    ids=str,
)
def test_ranks_that_share_the_sequence_draw_what_one_would(ranks: Any, layout: dict[str, Any]) -> None:
    """Also where the model has seen all that it can, and where it is given more than there is."""
    model = ModelSpec(family="gpt2", vocab=37, hidden=16, layers=2, heads=4, max_seq=8)
    run = RunSpec(model=model, data=Data(seq_len=8), layout=Layout(dp=1, **layout), precision="float64")
    plain = build(model, dtype=torch.float64)
    initialise_(plain, run.seed)
    axes = {"cp": 2, "tp": run.layout.tp}
    found = ranks.run(run.layout.world, sampled, run, axes=axes)
    assert found == [generate(plain, [3, 1], 9, temperature=0.8, seed=7)] * run.layout.world
