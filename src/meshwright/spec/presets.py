"""Named models. Sizes are those of the published configurations; parameter counts are tested."""

from __future__ import annotations

from meshwright.spec.model import ModelSpec, RopeScaling

_LLAMA31 = RopeScaling(kind="llama3", factor=8.0, original_max_seq=8192, low_freq_factor=1.0, high_freq_factor=4.0)


def _gpt2(layers: int, hidden: int, heads: int, max_seq: int = 1024, vocab: int = 50257) -> ModelSpec:
    return ModelSpec(family="gpt2", vocab=vocab, hidden=hidden, layers=layers, heads=heads, max_seq=max_seq)


def _llama2(layers: int, hidden: int, heads: int, ffn: int, kv_heads: int | None = None) -> ModelSpec:
    return ModelSpec(
        family="llama",
        vocab=32000,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        max_seq=4096,
    )


def _llama3(layers: int, hidden: int, heads: int, ffn: int, scaled: bool = False) -> ModelSpec:
    return ModelSpec(
        family="llama", vocab=128256, hidden=hidden, layers=layers, heads=heads, kv_heads=8, ffn=ffn,
        max_seq=131072 if scaled else 8192, rope_theta=500000.0, rope_scaling=_LLAMA31 if scaled else None,
    )  # fmt: skip


PRESETS: dict[str, ModelSpec] = {
    "llama-tiny": ModelSpec(
        family="llama", vocab=256, hidden=160, layers=4, heads=4, kv_heads=2, ffn=432, max_seq=2048
    ),
    "gpt2-tiny": ModelSpec(family="gpt2", vocab=256, hidden=192, layers=4, heads=6, max_seq=1024),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt3-175b": _gpt2(96, 12288, 96, max_seq=2048),
    "llama2-7b": _llama2(32, 4096, 32, 11008),
    "llama2-13b": _llama2(40, 5120, 40, 13824),
    "llama2-70b": _llama2(80, 8192, 64, 28672, kv_heads=8),
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3-405b": _llama3(126, 16384, 128, 53248, scaled=True),
    "qwen2.5-7b": ModelSpec(
        family="llama", vocab=152064, hidden=3584, layers=28, heads=28, kv_heads=4, ffn=18944, max_seq=32768,
        norm_eps=1e-6, qkv_bias=True, rope_theta=1000000.0,
    ),
    "qwen3-8b": ModelSpec(
        family="llama", vocab=151936, hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, ffn=12288,
        max_seq=40960, norm_eps=1e-6, qk_norm=True, rope_theta=1000000.0,
    ),
}  # fmt: skip
