"""The plain model against transformers: the same weights, copied by name, give the same logits at every position."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.model.build import build
from meshwright.spec.huggingface import from_config, to_config
from meshwright.spec.model import ModelSpec

LLAMA = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 97, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}


def llama(model_type: str = "llama", scaling: dict | None = None, **changes: object) -> dict:
    rope = {"rope_parameters": {"rope_theta": 10000.0, **scaling}} if scaling else {}
    return {"model_type": model_type, **LLAMA, **rope, **changes}


CONFIGS = {
    "gpt2": GPT2,
    "gpt2-untied-inner": GPT2 | {"tie_word_embeddings": False, "n_inner": 80},
    "llama": llama(),
    "llama-tied-biases": llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-head-dim": llama(head_dim=20, num_key_value_heads=8, rope_theta=500.0),
    "linear": llama(scaling={"rope_type": "linear", "factor": 2.5}),
    "llama3": llama(
        scaling={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    ),
    "dynamic-within": llama(scaling={"rope_type": "dynamic", "factor": 2.0}),
    "dynamic-beyond": llama(scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=24),
    "yarn": llama(
        head_dim=32,  # with 2048 trained positions the ramp has both its ends inside the 16 pairs
        scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
        max_position_embeddings=8192,
    ),
    "yarn-all-keys": llama(
        head_dim=32,
        scaling={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16,
            "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.4,
        },
    ),
    "yarn-attention-factor": llama(
        scaling={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.5,
        }
    ),
    "qwen2": llama("qwen2"),
    "qwen3": llama("qwen3", head_dim=24),
    "qwen3-biases": llama("qwen3", head_dim=16, attention_bias=True),
    "mistral": llama("mistral", sliding_window=None),
    "mistral-window": llama("mistral", sliding_window=5),
}  # fmt: skip


def reference(config: dict) -> torch.nn.Module:
    """A model of transformers, with random weights large enough that nothing is near its neutral value."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.08 * torch.randn_like(parameter))
    return model


def copy(source: torch.nn.Module, spec: ModelSpec, **options: object) -> torch.nn.Module:
    model = build(spec, **options).eval()
    ours, theirs = dict(model.named_parameters()), dict(source.named_parameters())
    assert {n: p.shape for n, p in ours.items()} == {n: p.shape for n, p in theirs.items()}
    model.load_state_dict(source.state_dict())
    return model


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits(name: str, attention: str) -> None:
    source = reference(CONFIGS[name])
    spec = from_config(CONFIGS[name])
    if attention == "sdpa":
        spec = spec.model_copy(update={"attn_dropout": 0.0})
    tokens = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(1))
    logits = copy(source, spec, attention=attention)(tokens)
    expected = source(tokens).logits
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < 1e-5
    assert (copy(source, from_config(to_config(spec)), attention=attention)(tokens) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_logits_not_causal(name: str) -> None:
    config = CONFIGS[name] | {"is_causal": False}
    source = reference(config)
    tokens = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(1))
    expected = source(tokens).logits
    assert (expected - reference(CONFIGS[name])(tokens).logits).abs().max() > 0.01
    for spec in (from_config(config), from_config(to_config(from_config(config)))):
        spec = spec.model_copy(update={"attn_dropout": 0.0})
        for attention in ("sdpa", "explicit"):
            assert (copy(source, spec, attention=attention)(tokens) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama", "yarn"])
@torch.no_grad()
def test_logits_at_given_positions(name: str) -> None:
    source = reference(CONFIGS[name])
    tokens = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.stack((torch.arange(12) + 7, torch.arange(12) * 2))
    expected = source(tokens, position_ids=positions, attention_mask=torch.ones(2, 12)).logits
    spec = from_config(CONFIGS[name]).model_copy(update={"attn_dropout": 0.0})
    assert (copy(source, spec)(tokens, positions=positions) - expected).abs().max() < 1e-5


def test_gradients() -> None:
    """The custom backward formulas (RMSNorm) and all the rest, in float64."""
    source = reference(CONFIGS["qwen3-biases"]).double()
    model = copy(source, from_config(CONFIGS["qwen3-biases"]), dtype=torch.float64)
    tokens = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(1))
    targets = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(2))
    logits = source(tokens).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    model(tokens, targets).backward()
    theirs = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        # transformers takes norms and softmax in float32 even here
        error = (parameter.grad - theirs[name].grad).norm() / theirs[name].grad.norm()
        assert error < 1e-5, name
