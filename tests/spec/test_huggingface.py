import json
from pathlib import Path

import pytest

from meshwright.spec.errors import UserError
from meshwright.spec.huggingface import from_config, load, to_config
from meshwright.spec.model import ModelSpec, RopeScaling
from meshwright.spec.presets import PRESETS

# The parts of published config.json files that matter here, as written by transformers of their time.
LLAMA31 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 16384, "initializer_range": 0.02,
    "intermediate_size": 53248, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 128, "num_hidden_layers": 126, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 128256,
}  # fmt: skip
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 3584,
    "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2",
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "use_mrope": False,
    "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36,
    "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
    "n_positions": 1024, "resid_pdrop": 0.1, "vocab_size": 50257,
}  # fmt: skip
MISTRAL = {
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "vocab_size": 32000,
}  # fmt: skip


def computed(spec: ModelSpec) -> dict:
    """What the spec comes to, whether a default is written or left out."""
    settled = {"kv_heads": spec.num_kv_heads, "head_dim": spec.head_width, "ffn": spec.ffn_width, "tied": spec.is_tied}
    return spec.model_dump() | settled


@pytest.mark.parametrize(
    ("config", "preset"), [(LLAMA31, "llama3-405b"), (QWEN25, "qwen2.5-7b"), (QWEN3, "qwen3-8b")], ids=str
)
def test_published_configurations_are_the_presets(config: dict, preset: str) -> None:
    assert computed(from_config(config)) == computed(PRESETS[preset])


def test_gpt2() -> None:
    spec = from_config(GPT2)
    dropout = {"embd_dropout": 0.1, "attn_dropout": 0.1, "resid_dropout": 0.1}
    assert computed(spec) == computed(PRESETS["gpt2"]) | dropout
    # transformers also reads the common names
    assert from_config({"model_type": "gpt2", "hidden_size": 96, "num_attention_heads": 3}).hidden == 96


def test_mistral_window() -> None:
    assert from_config(MISTRAL).window == 4096
    assert from_config(MISTRAL | {"sliding_window": None}).window is None
    assert from_config(QWEN25).window is None  # names one, but does not use it
    assert from_config(LLAMA31 | {"sliding_window": 4096}).window is None  # llama has none


def test_keys_left_out_take_transformers_defaults() -> None:
    transformers = pytest.importorskip("transformers")
    for kind in ("gpt2", "llama", "mistral", "qwen2", "qwen3"):
        full = transformers.AutoConfig.for_model(kind).to_dict()
        assert computed(from_config({"model_type": kind})) == computed(from_config(full)), kind


ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_seq=8192)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": ROPE | {"rope_theta": 5e5}},
        {"rope_scaling": ROPE, "rope_theta": 5e5},
        {"rope_scaling": {"type": "yarn"} | {k: v for k, v in ROPE.items() if k != "rope_type"}, "rope_theta": 5e5},
        {"rope_scaling": ROPE | {"beta_fast": None, "truncate": True}, "rope_theta": 5e5},
    ],
)
def test_old_and_new_rope_keys(keys: dict) -> None:
    spec = from_config({"model_type": "llama", **keys})
    assert (spec.rope_theta, spec.rope_scaling) == (5e5, YARN)


def test_rope_defaults() -> None:
    plain = from_config({"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})
    assert (plain.rope_theta, plain.rope_scaling) == (7.0, None)
    dynamic = from_config({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert dynamic.rope_scaling == RopeScaling(kind="dynamic", factor=2.0, original_max_seq=2048)
    scales = {"mscale": 1.0, "mscale_all_dim": 0.5}
    yarn = from_config({"model_type": "llama", "rope_parameters": ROPE | scales}).rope_scaling
    assert yarn is not None and yarn.attention_factor == pytest.approx(1.1386294 / 1.0693147)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type=None is not supported; supported are gpt2, llama"),
        ({"model_type": "gemma3"}, "model_type='gemma3'"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act='gelu' is not supported for llama"),
        ({"model_type": "llama", "attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=True"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function='relu'"),
        ({"model_type": "gpt2", "scale_attn_weights": False}, "scale_attn_weights=False"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention=True"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "longrope", "factor": 2}}, "rope_type='longrope'"),
        ({"model_type": "llama", "rope_parameters": {"partial_rotary_factor": 0.5}}, "part of each head"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "linear"}}, "needs factor"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 2, "beta": 1}}, "has no beta"),
        ({"model_type": "llama", "rope_parameters": {"factor": 2}}, "no rope_type for factor"),
        ({"model_type": "llama", "rope_parameters": {"full_attention": {}}}, "no rope_type for full_attention"),
        ({"model_type": "llama", "rope_parameters": ROPE | {"truncate": False}}, "truncate=false"),
        ({"model_type": "llama", "rope_scaling": "linear"}, "is not a mapping"),
        (
            {
                "model_type": "llama",
                "rope_scaling": {"type": "dynamic", "factor": 2, "original_max_position_embeddings": 9},
            },
            "original_max_position_embeddings=9",
        ),
        ({"model_type": "llama", "num_key_value_heads": 5}, "kv_heads=5 does not divide heads=32; use one of"),
        ({"model_type": "llama", "hidden_size": "wide"}, "hidden: "),
        ([1, 2], "not a mapping"),
    ],
)
def test_what_would_change_the_computation_is_refused(config: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        from_config(config, "there/config.json")
    assert str(error.value).startswith("there/config.json: ") and message in str(error.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_round_trip_of_presets(preset: str) -> None:
    spec = PRESETS[preset]
    assert computed(from_config(json.loads(json.dumps(to_config(spec))))) == computed(spec)


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 7},
        {"qk_norm": True, "qkv_bias": True, "out_bias": True},
        {"qkv_bias": True},
        {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
        {"causal": False},
        {"tied": True, "rope_scaling": YARN},
        {"rope_scaling": RopeScaling(kind="linear", factor=2.0)},
        {"rope_scaling": RopeScaling(kind="dynamic", factor=2.0, original_max_seq=2048)},
    ],
)
def test_round_trip_of_features(changes: dict) -> None:
    spec = PRESETS["llama-tiny"].model_copy(update=changes)
    assert computed(from_config(to_config(spec))) == computed(spec)


@pytest.mark.parametrize(
    "changes", [{"qk_norm": True, "window": 7}, {"out_bias": True}, {"window": 7, "mlp_bias": True}]
)
def test_specs_without_counterpart_are_refused(changes: dict) -> None:
    with pytest.raises(UserError, match="no model type"):
        to_config(PRESETS["llama-tiny"].model_copy(update=changes))


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(UserError, match="cannot be read"):
        load(file)
    file.write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        load(tmp_path)
    file.write_text(json.dumps(QWEN3))
    assert load(file) == load(tmp_path) == from_config(QWEN3)
