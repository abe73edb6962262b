"""Between Hugging Face's config.json and ModelSpec, for gpt2, llama, mistral, qwen2 and qwen3.

Whatever would change what the model computes is understood or refused. Everything else (token ids, cache, names,
generation settings) is passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec, RopeScaling

# transformers' values for keys that a config.json leaves out, by model type.
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
    "mlp_bias": False, "attention_dropout": 0.0, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
_QWEN: dict[str, Any] = _LLAMA | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    "sliding_window": 4096,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
        "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
    },
    "llama": _LLAMA,
    "mistral": _LLAMA | {
        "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
}  # fmt: skip
# GPT-2's own names, and the common ones that transformers also reads.
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
# Values with which a key changes nothing, for keys that would otherwise change the computation.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0, None),
    "hidden_act": ("silu", "swish"),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False, None),
    "quantization_config": (None,),
}


def load(path: str | Path) -> ModelSpec:
    """The spec of the model whose config.json, or folder with one, is at `path`. Raises UserError."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); give the path of a config.json") from None
    except ValueError as error:
        raise UserError(f"{file}: is not JSON ({error}); give the path of a Hugging Face config.json") from None
    return from_config(config, str(file))


def from_config(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """The spec for the contents of a config.json. `where` names it in a UserError, raised for what is unsupported."""
    if not isinstance(config, Mapping):
        raise UserError(f"{where}: is not a mapping of keys to values; give a Hugging Face config.json")
    kind = config.get("model_type")
    if kind not in _DEFAULTS:
        raise UserError(f"{where}: model_type={kind!r} is not supported; supported are {', '.join(_DEFAULTS)}")
    if kind == "gpt2":
        config = {_GPT2_ALIASES.get(key, key): value for key, value in config.items()}
    full = _DEFAULTS[kind] | dict(config)
    for key, neutral in _NEUTRAL.items():
        if key in full and full[key] not in neutral:
            raise UserError(f"{where}: {key}={full[key]!r} is not supported for {kind}; supported is {neutral[0]!r}")
    layer_types = full.get("layer_types") or []
    wanted = "sliding_attention" if kind == "mistral" and full["sliding_window"] else "full_attention"
    if any(layer_type != wanted for layer_type in layer_types):
        raise UserError(f"{where}: layer_types other than {wanted} are not supported; leave layer_types out")
    try:
        return _gpt2(full) if kind == "gpt2" else _llama(kind, full, where)
    except ValidationError as error:
        first = error.errors()[0]
        names = "".join(f"{part}: " for part in first["loc"])
        raise UserError(f"{where}: {names}{first['msg'].removeprefix('Value error, ')}") from None


def _gpt2(config: dict[str, Any]) -> ModelSpec:
    return ModelSpec(
        family="gpt2",
        vocab=config["vocab_size"],
        hidden=config["n_embd"],
        layers=config["n_layer"],
        heads=config["n_head"],
        ffn=config["n_inner"],
        max_seq=config["n_positions"],
        norm_eps=config["layer_norm_epsilon"],
        tied=config["tie_word_embeddings"],
        causal=config.get("is_causal", True),
        embd_dropout=config["embd_pdrop"],
        attn_dropout=config["attn_pdrop"],
        resid_dropout=config["resid_pdrop"],
    )


def _llama(kind: str, config: dict[str, Any], where: str) -> ModelSpec:
    attention_bias = kind in ("llama", "qwen3") and config["attention_bias"]
    theta, scaling = _rope(config, where)
    return ModelSpec(
        family="llama",
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        ffn=config["intermediate_size"],
        max_seq=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        tied=config["tie_word_embeddings"],
        causal=config.get("is_causal", True),
        qkv_bias=kind == "qwen2" or attention_bias,
        out_bias=attention_bias,
        mlp_bias=kind == "llama" and config["mlp_bias"],
        qk_norm=kind == "qwen3",
        window=config["sliding_window"] if kind == "mistral" else None,
        rope_theta=theta,
        rope_scaling=scaling,
    )


# The keys of each rule beside rope_type and rope_theta; `factor` is needed by all.
_ROPE_KEYS = {
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
        "mscale_all_dim", "truncate",
    },
}  # fmt: skip


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise UserError(f"{where}: rope_parameters={given!r} is not a mapping; give rope_type and its parameters")
    rope = dict(given)
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if rope.pop("partial_rotary_factor", None) not in (None, 1):
        raise UserError(f"{where}: rotary embedding of a part of each head is not supported")
    if kind == "default":
        if rope:
            extra = ", ".join(sorted(rope))
            raise UserError(f"{where}: rope_parameters have no rope_type for {extra}; give it, or leave them out")
        return theta, None
    if kind not in _ROPE_KEYS:
        raise UserError(f"{where}: rope_type={kind!r} is not supported; supported are default, {', '.join(_ROPE_KEYS)}")
    unknown = sorted(rope.keys() - _ROPE_KEYS[kind])
    if unknown or "factor" not in rope:
        raise UserError(
            f"{where}: rope_type={kind!r} {'has no ' + ', '.join(unknown) if unknown else 'needs factor'}; "
            f"its parameters are {', '.join(sorted(_ROPE_KEYS[kind]))}"
        )
    return theta, _scaling(kind, rope, config, where)


def _scaling(kind: str, rope: dict[str, Any], config: Mapping[str, Any], where: str) -> RopeScaling:
    longest = config["max_position_embeddings"]
    original = rope.pop("original_max_position_embeddings", None)
    if kind == "dynamic" and original not in (None, longest):
        # transformers stretches beyond max_position_embeddings whatever this key says.
        raise UserError(
            f"{where}: rope_type='dynamic' with original_max_position_embeddings={original} is not supported; "
            f"leave it out or use max_position_embeddings={longest}"
        )
    if kind == "yarn":
        if rope.pop("truncate", None) not in (None, True):
            raise UserError(f"{where}: rope_type='yarn' with truncate=false is not supported")
        _settle_attention_factor(rope)
    # transformers prefers a value beside the rotary parameters to the one inside.
    original = None if kind == "linear" else config.get("original_max_position_embeddings") or original or longest
    return RopeScaling(kind=kind, original_max_seq=original, **rope)


def _settle_attention_factor(rope: dict[str, Any]) -> None:
    """DeepSeek's two scales of YaRN, where both are given, come to one factor on cos and sin."""
    mscale, all_dim = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
    if rope.get("attention_factor") is None and mscale and all_dim:
        log = 0.1 * math.log(rope["factor"])
        rope["attention_factor"] = (mscale * log + 1) / (all_dim * log + 1)


def to_config(spec: ModelSpec) -> dict[str, Any]:
    """A config.json's contents from which transformers builds the same model: the inverse of `from_config`.

    Raises UserError where no model type of transformers computes what the spec says. With `dynamic` scaling
    max_position_embeddings is the length before stretching, as transformers has it, and the spec's max_seq is lost.
    """
    causal = {} if spec.causal else {"is_causal": False}
    if spec.family == "gpt2":
        return {
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": spec.vocab,
            "n_positions": spec.max_seq, "n_embd": spec.hidden, "n_layer": spec.layers, "n_head": spec.heads,
            "n_inner": spec.ffn, "activation_function": "gelu_new", "layer_norm_epsilon": spec.norm_eps,
            "embd_pdrop": spec.embd_dropout, "attn_pdrop": spec.attn_dropout, "resid_pdrop": spec.resid_dropout,
            "tie_word_embeddings": spec.is_tied, **causal,
        }  # fmt: skip
    kind, extra = _kind(spec)
    scaling = spec.rope_scaling
    dynamic = scaling is not None and scaling.kind == "dynamic"
    return {
        "model_type": kind, "architectures": [f"{kind.capitalize()}ForCausalLM"], "vocab_size": spec.vocab,
        "hidden_size": spec.hidden, "intermediate_size": spec.ffn, "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads, "num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_width,
        "max_position_embeddings": scaling.original_max_seq if scaling and dynamic else spec.max_seq,
        "rms_norm_eps": spec.norm_eps, "tie_word_embeddings": spec.is_tied, "hidden_act": "silu",
        "rope_theta": spec.rope_theta, "rope_parameters": _rope_parameters(spec), **extra, **causal,
    }  # fmt: skip


def _kind(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """The model type that has the spec's features, and its keys for them."""
    biases = (spec.qkv_bias, spec.out_bias, spec.mlp_bias)
    if spec.qk_norm and spec.window is None and not spec.mlp_bias and spec.qkv_bias == spec.out_bias:
        return "qwen3", {"attention_bias": spec.qkv_bias}
    if not spec.qk_norm and spec.window is None and spec.qkv_bias == spec.out_bias:
        return "llama", {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}
    if not spec.qk_norm and spec.window is None and biases == (True, False, False):
        return "qwen2", {}
    if not spec.qk_norm and not any(biases):
        return "mistral", {"sliding_window": spec.window}
    raise UserError("model: no model type of Hugging Face has this combination of window, qk_norm and biases")


def _rope_parameters(spec: ModelSpec) -> dict[str, Any]:
    if spec.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": spec.rope_theta}
    fields = spec.rope_scaling.model_dump(exclude_none=True, exclude={"kind", "original_max_seq"})
    if spec.rope_scaling.kind in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = spec.rope_scaling.original_max_seq
    return {"rope_type": spec.rope_scaling.kind, "rope_theta": spec.rope_theta, **fields}
