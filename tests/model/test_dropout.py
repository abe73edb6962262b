import hashlib
import math
from collections.abc import Callable

import pytest
import torch

from meshwright.model.base import LanguageModel
from meshwright.model.build import build
from meshwright.model.dropout import Dropout, DropoutKey, dropped, seed_torch
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec


@pytest.fixture
def dropping(tiny: dict[str, ModelSpec]) -> ModelSpec:
    return tiny["gpt2"].model_copy(update={"embd_dropout": 0.1, "attn_dropout": 0.2, "resid_dropout": 0.3})


def key(rows: range, seed: int = 1, step: int = 5) -> DropoutKey:
    return DropoutKey(seed, step, torch.tensor(rows))


SHAPE = torch.Size((6, 4, 50, 50))


def test_splits_see_the_same_mask() -> None:
    whole = dropped(key(range(6)), 3, SHAPE, 0.3)
    for rows in (range(0, 1), range(2, 5), range(5, 6)):
        part = dropped(key(rows), 3, torch.Size((len(rows), *SHAPE[1:])), 0.3)
        assert torch.equal(part, whole[rows.start : rows.stop])


@pytest.mark.parametrize("shape", [(6, 12, 50), (6, 12, 7, 30), (2, 12, 200_000)], ids=str)
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_a_part_sees_its_slice_of_the_mask(shape: tuple[int, ...], parts: int) -> None:
    """Parts of a sequence [B, T/t, D], and of heads [B, H/t, T, T]."""
    whole = dropped(key(range(shape[0])), 3, torch.Size(shape), 0.3)
    for number, expected in enumerate(whole.chunk(parts, dim=1)):
        assert torch.equal(dropped(key(range(shape[0])), 3, expected.shape, 0.3, (number, parts)), expected)


@pytest.mark.parametrize("parts", [1, 2])
def test_tokens_of_longer_sequences_see_their_elements_of_the_mask(parts: int) -> None:
    """Wherever they stand, and where such tokens are cut once more, [B, T/cp/t, D]."""
    whole = dropped(key(range(2, 5)), 3, torch.Size((3, 12, 50)), 0.3)
    places = torch.tensor([0, 1, 2, 9, 10, 11])
    mine = DropoutKey(1, 5, torch.arange(2, 5), places, 12)
    for number, expected in enumerate(whole[:, places].chunk(parts, dim=1)):
        assert torch.equal(dropped(mine, 3, expected.shape, 0.3, (number, parts)), expected)


def test_a_dropout_of_a_part_drops_as_that_of_the_whole() -> None:
    module, x = Dropout(0.3, 4), torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0))
    whole = module(x, key(range(2, 5)))
    for number, (mine, expected) in enumerate(zip(x.chunk(4, dim=1), whole.chunk(4, dim=1), strict=True)):
        module.part = (number, 4)
        assert torch.equal(module(mine, key(range(2, 5))), expected)
    assert torch.equal(module.eval()(x, None), x)


def test_masks_are_those_of_earlier_versions() -> None:
    """A checkpoint's run goes on with the same masks; long and short runs, one row and many, and no element at all."""
    seen = hashlib.blake2b(digest_size=8)
    for shape in ((3, 5, 7), (2, 4, 50, 50), (1, 1, 1), (2, 3), (5, 1, 300_000), (0, 3, 4), (2, 1000, 64)):
        mask = dropped(DropoutKey(7, 11, torch.arange(2, 2 + shape[0])), 5, torch.Size(shape), 0.3)
        seen.update(mask.numpy().tobytes())
    assert seen.hexdigest() == "4c807bd2d79acd93"


def test_probability_to_the_last_of_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 2³² hashes exactly p · 2³² drop: the share of a range of p is its length, however small p is."""
    shape, few = torch.Size((1, 1, 1 << 22)), key(range(1))
    hashes = {p: dropped(few, 3, shape, p).sum().item() for p in (2**-32, 2**-20, 2**-20 + 2**-32, 1 - 2**-20)}
    assert hashes[2**-32] <= 1 and 0 <= hashes[2**-20] <= hashes[2**-20 + 2**-32] <= 20
    assert 0 < (1 << 22) - hashes[1 - 2**-20] <= 20
    # The threshold itself: with a hash that is each number in turn, the lowest p · 2³² of them.
    bounds = []
    monkeypatch.setattr("torch.lt", lambda h, below, out: bounds.append(below) or out.fill_(False))
    for p in (2**-32, 0.1, 0.3, 1 - 2**-32, 1 - 2**-50):
        dropped(few, 3, torch.Size((1, 1, 1)), p)
    assert [bound + 2**31 for bound in bounds] == [1, 429496730, 1288490189, 2**32 - 1, 2**32 - 1]


def test_logits_and_gradients_of_splits_are_those_of_the_whole(
    dropping: ModelSpec, make: Callable[..., LanguageModel], batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    tokens, targets = batch
    model = make(dropping, attention="explicit")
    whole = model(tokens, dropout=key(range(3)))
    for row in range(3):
        alone = model(tokens[row : row + 1], dropout=key(range(row, row + 1)))
        assert (alone[0] - whole[row]).abs().max() < 1e-12  # products of other shapes round differently
        assert (alone[0] - model(tokens[row : row + 1], dropout=key(range(9, 10)))[0]).abs().max() > 1e-3
    gradients = torch.autograd.grad(model(tokens, targets, dropout=key(range(3))), list(model.parameters()))
    for row in range(3):
        model(tokens[row : row + 1], targets[row : row + 1], dropout=key(range(row, row + 1))).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).abs().max() < 1e-10


def test_rate_and_independence() -> None:
    n = SHAPE.numel()
    masks = {
        "base": dropped(key(range(6)), 3, SHAPE, 0.3),
        "step": dropped(key(range(6), step=6), 3, SHAPE, 0.3),
        "seed": dropped(key(range(6), seed=2), 3, SHAPE, 0.3),
        "place": dropped(key(range(6)), 4, SHAPE, 0.3),
        "rows": dropped(key(range(6, 12)), 3, SHAPE, 0.3),
    }
    base = masks["base"].double()
    for name, mask in masks.items():
        assert abs(mask.double().mean() - 0.3) < 4 * math.sqrt(0.21 / n)
        if name != "base":
            assert abs((mask * base).mean() - 0.09) < 4 * math.sqrt(0.09 * 0.91 / n), name
    for dim in range(4):  # neighbours along every dimension
        a, b = base.narrow(dim, 1, SHAPE[dim] - 1), base.narrow(dim, 0, SHAPE[dim] - 1)
        assert abs((a * b).mean() - 0.09) < 4 * math.sqrt(0.09 * 0.91 / a.numel())


def test_both_halves_of_a_key_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs whose 64-bit keys differ in either half only have masks of their own."""
    shape = torch.Size((4, 1, 4000))
    keys = torch.tensor([[(high << 32) + low] for high in (0x243F6A88, 0x03707344) for low in (0x13198A2E, 0x299F31D0)])
    monkeypatch.setattr("meshwright.model.dropout.mix64_", lambda z: z.copy_(keys))
    masks = dropped(key(range(4)), 3, shape, 0.3).flatten(1).double()
    for a in range(4):
        for b in range(a):
            together = (masks[a] * masks[b]).mean()
            assert abs(together - 0.09) < 5 * math.sqrt(0.09 * 0.91 / shape[-1]), (a, b)


def test_every_place_of_a_model_has_its_own_mask(dropping: ModelSpec) -> None:
    places = [module.place for module in build(dropping, attention="explicit").modules() if isinstance(module, Dropout)]
    assert len(set(places)) == len(places) == 1 + 3 * dropping.layers


@pytest.mark.parametrize("field", ["embd_dropout", "attn_dropout", "resid_dropout"])
def test_each_place_drops(field: str, tiny: dict[str, ModelSpec], make: Callable[..., LanguageModel]) -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    model = make(tiny["gpt2"].model_copy(update={field: 0.5}), attention="explicit")
    assert (model(tokens, dropout=key(range(2))) - model.eval()(tokens)).abs().max() > 1e-3


def test_mask_is_all_that_backward_keeps() -> None:
    x = torch.randn(6, 4, 50, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = Dropout(0.3, 0)(x, key(range(6)))
    assert [(t.dtype, t.shape) for t in kept] == [(torch.bool, x.shape)]
    mask = dropped(key(range(6)), 0, x.shape, 0.3)
    assert torch.allclose(y, torch.where(mask, 0.0, x / 0.7))


def test_training_needs_a_key_and_evaluation_never_drops(
    dropping: ModelSpec, make: Callable[..., LanguageModel]
) -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    model = make(dropping, attention="explicit")
    with pytest.raises(ValueError, match="DropoutKey"):
        model(tokens)
    model.eval()
    assert torch.equal(model(tokens), model(tokens, dropout=key(range(2))))


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("field", ["embd_dropout", "attn_dropout", "resid_dropout"])
def test_torchs_own_drops_in_each_place_and_never_in_evaluation(
    field: str, attention: str, tiny: dict[str, ModelSpec], make: Callable[..., LanguageModel]
) -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    model = make(tiny["gpt2"].model_copy(update={field: 0.5}), attention=attention, dropout="torch").train()
    seed_torch(1, 2, 0, 0)
    dropped_once, then = model(tokens), model(tokens)
    seed_torch(1, 2, 0, 0)
    assert torch.equal(model(tokens), dropped_once) and not torch.equal(then, dropped_once)
    plain = make(tiny["gpt2"], attention=attention).eval()(tokens)
    assert (dropped_once - plain).abs().max() > 1e-3
    assert torch.equal(model.eval()(tokens), plain)


def test_generators_are_set_by_each_of_seed_step_rank_and_micro_batch() -> None:
    drawn = set()
    for where in ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (11, 1, 1, 1)):
        seed_torch(*where)
        drawn.add(torch.rand(()).item())
    assert len(drawn) == 6


def test_sdpa_refuses_dropout_of_attention_weights(dropping: ModelSpec) -> None:
    with pytest.raises(UserError, match="attention=explicit"):
        build(dropping)
