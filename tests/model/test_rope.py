import math

import pytest
import torch

from meshwright.model.build import build
from meshwright.model.rope import Rotary, rope_frequencies, rotate
from meshwright.spec.model import ModelSpec, RopeScaling
from meshwright.spec.presets import PRESETS

CPU = torch.device("cpu")


def spec(scaling: RopeScaling | None = None, **fields: object) -> ModelSpec:
    base = {"vocab": 61, "hidden": 128, "layers": 1, "heads": 1, "ffn": 8, "max_seq": 64, "rope_scaling": scaling}
    return ModelSpec(family="llama", **{**base, **fields})


def test_rotation_is_multiplication_by_a_complex_number() -> None:
    rotary = Rotary(spec(), dtype=torch.float64, device=CPU)
    x = torch.randn(2, 5, 3, 128, dtype=torch.float64)
    turned = rotate(x, *rotary(5))
    angles = torch.arange(5.0, dtype=torch.float64)[:, None] * 10000 ** (-torch.arange(64.0).double() / 64)
    expected = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    assert torch.allclose(torch.complex(*turned.chunk(2, -1)), expected, atol=1e-12)


def test_far_positions_are_exact_in_float32() -> None:
    """Angles formed in float32 are off by 4e-3 at position 10⁵."""
    rotary = Rotary(PRESETS["llama3-405b"], dtype=torch.float32, device=CPU)
    cos, _ = rotary(100_001)
    frequencies, _ = rope_frequencies(PRESETS["llama3-405b"], 100_001)
    for pair in (0, 1, 20, 63):
        assert cos[100_000, 0, pair].item() == pytest.approx(math.cos(100_000 * frequencies[pair].item()), abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_table_is_computed_anew_and_never_cast(dtype: torch.dtype) -> None:
    at_least_32 = torch.promote_types(dtype, torch.float32)
    direct = Rotary(spec(), dtype=dtype, device=CPU)
    assert direct.cos.dtype == at_least_32
    for start in (torch.bfloat16, torch.float64):
        model = build(spec(), dtype=start).to(dtype)
        assert model.lm_head.weight.dtype == dtype
        assert torch.equal(model.rotary.cos, direct.cos) and torch.equal(model.rotary.sin, direct.sin)
    moved = build(spec(), dtype=dtype, device="meta").to_empty(device="cpu")
    assert torch.equal(moved.rotary.sin, direct.sin)
    assert not any("rotary" in name for name in moved.state_dict())


def test_sequences_longer_than_the_table() -> None:
    rotary = Rotary(spec(), dtype=torch.float64, device=CPU)
    longer = Rotary(spec(max_seq=200), dtype=torch.float64, device=CPU)
    assert torch.equal(rotary(200)[0], longer(200)[0])
    assert torch.equal(rotary.cos, longer.cos)  # grown once, not at each step


def test_dynamic_depends_on_the_longest_position() -> None:
    scaling = RopeScaling(kind="dynamic", factor=2.0, original_max_seq=16)
    rotary = Rotary(spec(scaling), dtype=torch.float64, device=CPU)
    plain = Rotary(spec(), dtype=torch.float64, device=CPU)
    assert torch.equal(rotary(16)[0], plain(16)[0])
    assert not torch.equal(rotary(17)[0][:16], plain(16)[0])
    assert torch.equal(rotary(None, torch.tensor([0, 5, 40]))[0], rotary(41)[0][[0, 5, 40]])
    assert torch.equal(rotary(41, torch.tensor([0, 5]))[0], rotary(41)[0][[0, 5]])  # of a longer sequence
    # NTK-aware: at s times the trained length the slowest pair is slowed by factor · s − (factor − 1).
    slowed = rope_frequencies(spec(scaling), 48)[0] / rope_frequencies(spec(), 48)[0]
    assert slowed[0] == 1 and slowed[-1] == pytest.approx(1 / (2 * 3 - 1))


def test_llama3_bands() -> None:
    """Of the 64 pairs of Llama 3.1: short wavelengths kept, long ones divided by 8, between 1 and 8 in the middle."""
    scaled, plain = (
        rope_frequencies(PRESETS["llama3-405b"].model_copy(update=change), 10)[0]
        for change in ({}, {"rope_scaling": None})
    )
    slowed, wavelength = plain / scaled, 2 * math.pi / plain
    assert torch.allclose(slowed[wavelength < 8192 / 4], torch.ones(1, dtype=torch.float64))
    assert torch.allclose(slowed[wavelength > 8192], torch.full((1,), 8.0, dtype=torch.float64))
    middle = slowed[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert len(middle) > 2 and (middle > 1).all() and (middle < 8).all() and (middle.diff() > 0).all()


def test_backward_keeps_only_the_table() -> None:
    rotary = Rotary(spec(), dtype=torch.float32, device=CPU)
    x = torch.randn(2, 5, 3, 128, requires_grad=True)
    tables = {rotary.cos.data_ptr(), rotary.sin.data_ptr()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.data_ptr()), t)[1], lambda t: t):
        rotate(x, *rotary(5))
    assert set(kept) == tables
