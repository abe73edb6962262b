from collections.abc import Callable

import pytest
import torch

from meshwright.model.base import LanguageModel
from meshwright.model.build import build
from meshwright.model.init import initialise_
from meshwright.spec.model import ModelSpec, RopeScaling

TINY = {
    "gpt2": ModelSpec(family="gpt2", vocab=61, hidden=32, layers=2, heads=4, max_seq=40),
    "llama": ModelSpec(family="llama", vocab=61, hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, max_seq=40),
    "window": ModelSpec(
        family="llama", vocab=61, hidden=32, layers=2, heads=4, kv_heads=1, ffn=48, max_seq=40, window=3
    ),
    "qwen": ModelSpec(
        family="llama", vocab=61, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=48, max_seq=40,
        qk_norm=True, qkv_bias=True, tied=True,
        rope_scaling=RopeScaling(kind="dynamic", factor=2.0, original_max_seq=8),
    ),
    "open": ModelSpec(family="llama", vocab=61, hidden=32, layers=2, heads=4, ffn=48, max_seq=40, causal=False),
}  # fmt: skip


@pytest.fixture(params=list(TINY))
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return TINY[request.param]


@pytest.fixture
def tiny() -> dict[str, ModelSpec]:
    return TINY


@pytest.fixture
def make() -> Callable[..., LanguageModel]:
    """A tiny initialised model; biases and norms are moved off their zeros and ones, so that they count."""

    def make(spec: ModelSpec, **options: object) -> LanguageModel:
        model = build(spec, **{"dtype": torch.float64, **options})
        initialise_(model, seed=3)
        with torch.no_grad():
            for i, parameter in enumerate(model.parameters()):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
                parameter.add_(0.1 * noise)
        return model

    return make


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(61, (3, 12), generator=generator)
    targets = torch.randint(61, (3, 12), generator=generator)
    targets[0, 3:7] = targets[2] = -100
    return tokens, targets
