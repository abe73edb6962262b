import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.model.base import LanguageModel
from meshwright.model.build import build
from meshwright.model.init import Init, fill_, initial, initialise_, mix64_, signed
from meshwright.spec.model import ModelSpec
from meshwright.spec.presets import PRESETS

NORMAL = Init("normal", 0.02)


def filled(count: int, dtype: torch.dtype = torch.float64, **where: object) -> torch.Tensor:
    flat = torch.full((count,), torch.nan, dtype=dtype)
    fill_(flat, NORMAL, **{"seed": 1, "name": "w", "start": 0, **where})
    return flat


def test_splitmix64_as_published() -> None:
    """Outputs of the reference implementation for seed 1234567."""
    step = signed(0x9E3779B97F4A7C15)
    state = torch.tensor([1234567]) + step * torch.arange(1, 4)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [word % 2**64 for word in mix64_(state).tolist()] == expected


@settings(max_examples=30)
@given(st.integers(0, 70_000), st.integers(0, 70_000), st.integers(0, 70_000))
def test_any_split_gives_the_same_bits(a: int, b: int, c: int) -> None:
    """Ranges that cross the chunks of 2¹⁵ that filling works in; far-off starts too."""
    offset = 2**40
    cuts = sorted((a, b, c))
    whole = filled(cuts[-1], start=offset)
    parts = [filled(high - low, start=offset + low) for low, high in zip([0, *cuts], cuts, strict=False)]
    assert torch.equal(torch.cat(parts), whole)


def test_views_and_dtypes_are_filled_in_place() -> None:
    whole = filled(100)
    flat = torch.zeros(120)
    fill_(flat[10:110], NORMAL, seed=1, name="w", start=0)
    assert torch.equal(flat[10:110], whole.float()) and not flat[:10].any() and not flat[110:].any()
    assert torch.equal(filled(100, torch.bfloat16), whole.to(torch.bfloat16))


def test_exact_values_never_change() -> None:
    """A checkpoint of weights is not needed to repeat a run: the values of a seed are fixed for good.

    Written out in whole numbers: 12 quarters of 3 SplitMix64 words, of the stream keyed by a hash of seed and name.
    """
    import hashlib

    def word(state: int) -> int:
        z = state % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    key = int.from_bytes(hashlib.blake2b(b"1:w", digest_size=8).digest(), "little")
    for element, value in enumerate(filled(5).tolist()):
        words = [word(key + (3 * element + j) * 0x9E3779B97F4A7C15) for j in (1, 2, 3)]
        total = sum(w >> shift & 0xFFFF for w in words for shift in (0, 16, 32, 48))
        assert value == (total - 393210) * (0.02 / math.sqrt(2**32 - 1))


def test_distribution() -> None:
    n = 1_000_000
    z = filled(n) / 0.02
    assert abs(z.mean()) < 4 / math.sqrt(n)
    assert abs(z.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((z**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((z**4).mean() - 3 + 0.1) < 4 * math.sqrt(96 / n)  # Irwin–Hall: excess kurtosis −6/(5·12)
    for k in (0.5, 1.0, 2.0, 3.0):  # and the body is the normal one's
        assert (z.abs() > k).double().mean() == pytest.approx(math.erfc(k / math.sqrt(2)), abs=5e-3)
    assert z.abs().max() < 6
    for lag in (1, 2, 3, 192):
        assert abs((z[:-lag] * z[lag:]).mean()) < 4 / math.sqrt(n)


def test_seeds_and_names_are_independent() -> None:
    base = filled(100_000)
    for other in (filled(100_000, seed=2), filled(100_000, name="v"), filled(100_000, start=100_000)):
        correlation = (base * other).mean() / 0.02**2
        assert abs(correlation) < 4 / math.sqrt(100_000)


def test_all_tensors_of_a_model_differ(spec: ModelSpec) -> None:
    model = build(spec)
    initialise_(model, seed=1)
    starts = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            starts.setdefault(tuple(parameter.flatten()[:8].tolist()), []).append(name)
    assert all(len(names) == 1 for names in starts.values())


def test_rules(tiny: dict[str, ModelSpec]) -> None:
    """Normal 0.02, projections into the residual stream 0.02/√(2L), biases 0, norms 1."""
    residual = 0.02 / math.sqrt(4)
    for family in ("gpt2", "qwen"):
        model = build(tiny[family], device="meta")
        inits = initial(model)
        assert list(inits) == [name for name, _ in model.named_parameters()]
        for name, init in inits.items():
            if name.endswith("bias"):
                assert init == Init("zeros"), name
            elif "ln_" in name or "norm" in name:
                assert init == Init("ones"), name
            elif name.endswith(("attn.c_proj.weight", "mlp.c_proj.weight", "o_proj.weight", "down_proj.weight")):
                assert init == Init("normal", residual), name
            else:
                assert init == Init("normal", 0.02), name
        assert "lm_head.weight" not in inits  # tied: under the embedding's name


def test_first_loss_is_near_uniform(make: Callable[..., LanguageModel]) -> None:
    for preset in ("llama-tiny", "gpt2-tiny"):
        model = build(PRESETS[preset])
        initialise_(model, seed=1)
        tokens = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert model(tokens, tokens.roll(1)).item() / tokens.numel() == pytest.approx(math.log(256), abs=0.2)
