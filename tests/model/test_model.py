"""What holds for every plain model, whatever its family."""

from collections.abc import Callable

import pytest
import torch

from meshwright.model.base import LanguageModel
from meshwright.model.build import build
from meshwright.spec.model import ModelSpec
from meshwright.spec.presets import PRESETS

Make = Callable[..., LanguageModel]
Batch = tuple[torch.Tensor, torch.Tensor]

COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "llama-tiny": 1_220_000,
    "gpt2-tiny": 2_025_600,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_parameter_counts(preset: str) -> None:
    model = build(PRESETS[preset], device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[preset]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert len(model.blocks) == PRESETS[preset].layers


def test_attention_written_out_equals_fused(spec: ModelSpec, make: Make, batch: Batch) -> None:
    fused, explicit = make(spec), make(spec, attention="explicit")
    assert torch.allclose(fused(batch[0]), explicit(batch[0]), rtol=0, atol=1e-12)
    for model in (fused, explicit):
        model(*batch).backward()
    for (name, a), b in zip(fused.named_parameters(), explicit.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-11 * max(b.grad.norm(), 1), name


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@torch.no_grad()
def test_what_a_token_reaches(attention: str, spec: ModelSpec, make: Make) -> None:
    """A changed token changes the logits of exactly the positions that see it."""
    model = make(spec, attention=attention)
    tokens = torch.randint(61, (1, 12), generator=torch.Generator().manual_seed(2))
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 61
    reached = (model(tokens) - model(changed)).abs().amax(-1)[0] > 1e-9
    if not spec.causal:
        first, last = 0, 12
    else:  # each block carries a token window − 1 further
        first, last = 4, 12 if spec.window is None else 4 + spec.layers * (spec.window - 1) + 1
    assert reached.tolist() == [first <= i < last for i in range(12)]


@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_one_token(attention: str, loss: str, spec: ModelSpec, make: Make) -> None:
    model = make(spec, attention=attention, loss=loss)
    token = torch.tensor([[7]])
    assert model(token).shape == (1, 1, 61)
    model(token, token).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_float64_throughout(spec: ModelSpec, make: Make, batch: Batch) -> None:
    """Derivatives by central differences: anything that rounds to float32 on the way spoils them."""
    for attention, loss in (("sdpa", "chunked"), ("explicit", "full")):
        model = make(spec, attention=attention, loss=loss)
        total = model(*batch)
        assert total.dtype == torch.float64 and total.dim() == 0
        parameters = list(model.parameters())
        direction = [torch.randn(p.shape, generator=torch.Generator().manual_seed(7)).double() for p in parameters]
        gradients = torch.autograd.grad(total, parameters)
        slope = sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))
        step = 1e-5
        with torch.no_grad():
            torch._foreach_add_(parameters, direction, alpha=step)
            high = model(*batch)
            torch._foreach_add_(parameters, direction, alpha=-2 * step)
            low = model(*batch)
        assert abs((high - low) / (2 * step) - slope) < 1e-6 * abs(slope)


def test_micro_batches_add_up(spec: ModelSpec, make: Make, batch: Batch) -> None:
    model = make(spec)
    tokens, targets = batch
    parts = model(tokens[:1], targets[:1]) + model(tokens[1:], targets[1:])
    assert (model(tokens, targets) - parts).abs() < 1e-11


def test_given_positions(tiny: dict[str, ModelSpec], make: Make, batch: Batch) -> None:
    tokens, _ = batch
    for family in ("gpt2", "llama", "qwen"):
        model = make(tiny[family])
        default = model(tokens)
        assert torch.equal(model(tokens, positions=torch.arange(12)), default)
        assert torch.equal(model(tokens, positions=torch.arange(12).expand(3, 12)), default)
        assert (model(tokens, positions=2 * torch.arange(12)) - default).abs().max() > 1e-6
    # Rotary scores depend on distances alone.
    model = make(tiny["llama"])
    assert torch.allclose(model(tokens, positions=torch.arange(12) + 9), model(tokens), atol=1e-12)


def test_tied_head_is_one_parameter(tiny: dict[str, ModelSpec], make: Make, batch: Batch) -> None:
    for family, embedding in (("gpt2", "transformer.wte.weight"), ("qwen", "model.embed_tokens.weight")):
        model = make(tiny[family])
        names = [name for name, _ in model.named_parameters()]
        assert names[0] == embedding and "lm_head.weight" not in names
        assert model.get_parameter("lm_head.weight") is model.get_parameter(embedding)
        meta = build(tiny[family], device="meta").to_empty(device="cpu")
        assert meta.get_parameter("lm_head.weight") is meta.get_parameter(embedding)
        cast = make(tiny[family]).to(torch.float32)
        assert cast.get_parameter("lm_head.weight") is cast.get_parameter(embedding)
    untied = make(tiny["llama"])
    assert untied.get_parameter("lm_head.weight") is not untied.get_parameter("model.embed_tokens.weight")


def test_meta_model_filled_later_is_the_same(spec: ModelSpec, make: Make, batch: Batch) -> None:
    direct = make(spec)
    late = build(spec, dtype=torch.float64, device="meta")
    for name, parameter in direct.named_parameters():  # as a strategy would: parameter by parameter
        owner = late.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(parameter.detach().clone()))
    late.tie()
    late.rebuild_buffers("cpu")
    assert torch.equal(late(*batch), direct(*batch))
    empty = build(spec, dtype=torch.float64, device="meta").to_empty(device="cpu")
    empty.load_state_dict(direct.state_dict())
    assert torch.equal(empty(*batch), direct(*batch))


def test_too_many_learned_positions(tiny: dict[str, ModelSpec], make: Make) -> None:
    with pytest.raises(ValueError, match="41 tokens are more than the model's 40"):
        make(tiny["gpt2"])(torch.zeros(1, 41, dtype=torch.int64))
