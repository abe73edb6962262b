"""Documents packed into one sequence against each document alone, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from meshwright.model.base import LanguageModel
from meshwright.model.documents import positions_inside
from meshwright.model.loss import IGNORE
from meshwright.spec.model import ModelSpec

Make = Callable[..., LanguageModel]

LENGTHS = ((12,), (1, 4, 2, 5), (7, 1, 1, 3))


def ids() -> torch.Tensor:
    rows = [torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) for lengths in LENGTHS]
    return torch.stack(rows)


def alone(tokens: torch.Tensor, targets: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets [1, n] of each document."""
    return [
        (t[None], wanted[None])
        for row, lengths in enumerate(LENGTHS)
        for t, wanted in zip(tokens[row].split(lengths), targets[row].split(lengths), strict=True)
    ]


def test_positions_begin_anew_in_each_document() -> None:
    assert positions_inside(torch.tensor([[0, 0, 0, 1, 1, 4, 5, 5], [2] * 8])).tolist() == [
        [0, 1, 2, 0, 1, 0, 0, 1],
        list(range(8)),
    ]


@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_documents_compute_what_each_does_alone(
    attention: str, loss: str, spec: ModelSpec, make: Make, batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Logits, loss and every gradient; windows, grouped heads, and attention that is not causal among the models."""
    spec = spec.model_copy(update={"rope_scaling": None})
    packed, single = make(spec, attention=attention, loss=loss), make(spec, attention=attention, loss=loss)
    tokens, targets = batch
    parts = alone(tokens, targets)
    expected = torch.cat([single(t)[0] for t, _ in parts])
    assert (packed(tokens, documents=ids()).flatten(0, 1) - expected).abs().max() < 1e-12
    found, right = packed(tokens, targets, documents=ids()), sum(single(*part) for part in parts)
    assert abs(found - right) < 1e-11 * right
    found.backward()
    right.backward()
    for (name, a), b in zip(packed.named_parameters(), single.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-11 * max(b.grad.norm(), 1), name


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@torch.no_grad()
def test_a_token_changes_what_is_behind_it_in_its_document(attention: str, tiny: dict[str, ModelSpec], make: Make):
    tokens = torch.randint(61, (3, 12), generator=torch.Generator().manual_seed(2))
    for family, causal in (("gpt2", True), ("llama", True), ("open", False)):
        model = make(tiny[family], attention=attention)
        before = model(tokens, documents=ids())
        for place in range(12):
            changed = tokens.clone()
            changed[:, place] = (changed[:, place] + 1) % 61
            reached = (model(changed, documents=ids()) - before).abs().amax(-1) > 1e-12
            own = ids() == ids()[:, place : place + 1]
            assert torch.equal(reached, own & (torch.arange(12) >= place) if causal else own), (family, place)


def test_a_sequence_that_is_one_document(spec: ModelSpec, make: Make, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = make(spec.model_copy(update={"rope_scaling": None}))
    whole = model(batch[0], documents=torch.zeros(3, 12, dtype=torch.int64))
    assert (whole - model(batch[0])).abs().max() < 1e-12


def test_sequences_longer_than_the_rotary_table(tiny: dict[str, ModelSpec], make: Make) -> None:
    tokens = torch.arange(50)[None]
    documents = (torch.arange(50) >= 45).long()[None]
    model = make(tiny["llama"])
    assert (model(tokens, documents=documents)[:, 45:] - model(tokens[:, 45:])).abs().max() < 1e-12


def test_dynamic_rotary_scaling_is_refused(tiny: dict[str, ModelSpec], make: Make) -> None:
    with pytest.raises(ValueError, match="dynamic rope_scaling"):
        make(tiny["qwen"])(torch.zeros(3, 12, dtype=torch.int64), documents=ids())


def test_only_ignored_targets(tiny: dict[str, ModelSpec], make: Make) -> None:
    tokens = torch.zeros(3, 12, dtype=torch.int64)
    assert make(tiny["gpt2"])(tokens, torch.full_like(tokens, IGNORE), documents=ids()) == 0
