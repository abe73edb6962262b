"""What autograd keeps: the measuring itself, and prediction against measurement, tensor by tensor."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.model.build import build
from meshwright.model.dropout import DropoutKey
from meshwright.parallel.recompute import Recompute
from meshwright.predict import activations
from meshwright.predict.activations import Saved
from meshwright.spec.layout import Layout, Operators
from meshwright.spec.model import ModelSpec, RopeScaling
from meshwright.verify.activations import Kept, SavedBytes, compare, measure

LLAMA = ModelSpec(family="llama", vocab=33, hidden=16, layers=2, heads=4, kv_heads=2, ffn=24, max_seq=32)
GPT2 = ModelSpec(family="gpt2", vocab=33, hidden=16, layers=2, heads=4, max_seq=32)
DYNAMIC = RopeScaling(kind="dynamic", factor=2.0, original_max_seq=4)
SPECS = {
    "llama": LLAMA,
    "tied": LLAMA.model_copy(update={"tied": True}),
    "one kv head": LLAMA.model_copy(update={"kv_heads": 1}),
    "no groups": LLAMA.model_copy(update={"kv_heads": 4}),
    "wide heads, qk norm": LLAMA.model_copy(update={"head_dim": 10, "qk_norm": True}),
    "biases": LLAMA.model_copy(update={"qkv_bias": True, "out_bias": True, "mlp_bias": True}),
    "window": LLAMA.model_copy(update={"window": 3}),
    "wide window": LLAMA.model_copy(update={"window": 8}),
    "not causal": LLAMA.model_copy(update={"causal": False}),
    "beyond max_seq": LLAMA.model_copy(update={"max_seq": 4}),
    "at max_seq": LLAMA.model_copy(update={"max_seq": 8}),
    "dynamic rotary": LLAMA.model_copy(update={"rope_scaling": DYNAMIC}),
    "gpt2": GPT2,
    "gpt2 untied, narrow": GPT2.model_copy(update={"tied": False, "ffn": 10}),
    "gpt2 one head": GPT2.model_copy(update={"heads": 1}),
    "gpt2 dropout": GPT2.model_copy(update={"embd_dropout": 0.1, "resid_dropout": 0.2}),
    "gpt2 attention dropout": GPT2.model_copy(update={"attn_dropout": 0.1}),
}
NONE = Layout()
EVERYTHING: tuple[Operators, ...] = ("linear", "attention", "softmax", "activation")
RECOMPUTED = {
    "full": Layout(recompute="full"),
    "full, every 2": Layout(recompute="full", recompute_every=2),  # a whole region, and one that is left over
    "full, every 3": Layout(recompute="full", recompute_every=3),
    "selective": Layout(recompute="selective"),
    **{
        f"keep {', '.join(words)}": Layout(recompute="selective", recompute_keep=words)
        for words in (
            ("attention",),
            ("softmax",),
            ("activation",),
            ("linear", "attention"),
            ("softmax", "activation"),
            EVERYTHING,
        )
    },
}


def step(
    spec: ModelSpec,
    batch: int,
    seq: int,
    dtype: torch.dtype,
    attention: str,
    loss: str,
    layout: Layout = NONE,
    dropout: str = "counter",
    packed: bool = False,
) -> SavedBytes:
    model = build(spec, attention=attention, loss=loss, dropout=dropout, dtype=dtype).train()  # type: ignore[arg-type]
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)  # what is kept does not depend on it, and drawing takes as long as a step
    if layout.recompute != "none":
        every = layout.region(spec.layers)
        Recompute(model.blocks, every=every, keep=layout.kept_operators, rng=dropout == "torch")
    tokens = torch.randint(spec.vocab, (batch, seq))
    key = DropoutKey(0, 0, torch.arange(batch))
    documents = torch.randint(2, (batch, seq)).cumsum(-1) if packed else None
    if spec.family == "llama":
        model.rotary(seq)  # the table has grown as long as it gets
    inputs = [tokens] if documents is None else [tokens, documents]
    return measure(model, lambda: model(tokens, tokens, documents=documents, dropout=key).backward(), inputs=inputs)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "float64": torch.float64}


def assert_agrees(
    spec: ModelSpec,
    batch: int,
    seq: int,
    dtype: torch.dtype,
    attention: str,
    loss: str,
    layout: Layout = NONE,
    dropout: str = "counter",
    packed: bool = False,
) -> None:
    measured = step(spec, batch, seq, dtype, attention, loss, layout, dropout, packed)
    foretold = activations.saved(
        spec, batch=batch, seq=seq, dtype_bytes=dtype.itemsize, attention=attention, loss=loss, dropout=dropout,
        layout=layout, packed=packed,
    )  # type: ignore[arg-type]  # fmt: skip
    assert compare(foretold, measured) == [], (batch, seq, layout)
    assert activations.total(foretold) == measured.total


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_prediction_is_the_measurement(spec: ModelSpec, attention: str, loss: str, dtype: torch.dtype) -> None:
    if spec.attn_dropout and attention == "sdpa":
        attention = "explicit"  # the other is refused
    for batch, seq in ((3, 8), (1, 8), (2, 1), (1, 1)):
        assert_agrees(spec, batch, seq, dtype, attention, loss)


# Each model with two of the three dtypes, in turn: dtype and model have little to do with each other here.
TURNS = [
    pytest.param(SPECS[name], attention, DTYPES[kind], i // 3 + j, id=f"{name}-{attention}-{kind}")
    for i, name in enumerate(SPECS)
    for j, (attention, kind) in enumerate(zip(("sdpa", "explicit"), (2 * list(DTYPES))[i % 3 :], strict=False))
]


@pytest.mark.parametrize(("spec", "attention", "dtype", "turn"), TURNS)
def test_prediction_is_the_measurement_with_recompute(
    spec: ModelSpec, attention: str, dtype: torch.dtype, turn: int
) -> None:
    if spec.attn_dropout and attention == "sdpa":
        attention = "explicit"
    assert_agrees_with_recompute(spec, attention, dtype, "counter", turn)


def assert_agrees_with_recompute(spec: ModelSpec, attention: str, dtype: torch.dtype, dropout: str, turn: int) -> None:
    """Of every layout in one shape; and three layouts in another shape each, in `turn` in another one."""
    spec = spec.model_copy(update={"layers": 3})
    chosen = [RECOMPUTED[name] for name in ("full, every 2", "selective", f"keep {', '.join(EVERYTHING)}")]
    for layout in chosen if dtype == torch.float64 else RECOMPUTED.values():
        assert_agrees(spec, 3, 8, dtype, attention, "full", layout, dropout)
    for place, layout in enumerate(chosen):
        batch, seq = ((1, 16), (2, 1), (1, 1))[(place + turn) % 3]
        assert_agrees(spec, batch, seq, dtype, attention, "full", layout, dropout)
    assert_agrees(spec, 3, 8, dtype, attention, "chunked", chosen[0], dropout)


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_prediction_is_the_measurement_with_documents(spec: ModelSpec, attention: str) -> None:
    """A mask and rows of the rotary table for each sequence, kept once for all layers; with recompute too."""
    if spec.rope_scaling is not None:
        spec = spec.model_copy(update={"rope_scaling": None})
    fused_drops = spec.attn_dropout > 0 and attention == "sdpa"
    for layout in (NONE, RECOMPUTED["full"], RECOMPUTED["full, every 2"], RECOMPUTED["selective"]):
        for batch, seq in ((3, 8), (1, 8), (2, 1)):
            how = "torch" if fused_drops else "counter"
            assert_agrees(spec, batch, seq, torch.float32, attention, "full", layout, how, packed=True)


DROPPING = {
    "all": GPT2.model_copy(update={"embd_dropout": 0.1, "attn_dropout": 0.2, "resid_dropout": 0.3}),
    "attention": GPT2.model_copy(update={"attn_dropout": 0.2}),
    "attention, one head": GPT2.model_copy(update={"attn_dropout": 0.2, "heads": 1}),
    "not causal": GPT2.model_copy(update={"attn_dropout": 0.2, "causal": False}),
    "residual": GPT2.model_copy(update={"resid_dropout": 0.3}),
}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("spec", DROPPING.values(), ids=DROPPING)
def test_torchs_dropout_keeps_what_is_predicted(spec: ModelSpec, attention: str, dtype: torch.dtype) -> None:
    for batch, seq in ((3, 8), (1, 8), (2, 1), (1, 1)):
        assert_agrees(spec, batch, seq, dtype, attention, "full", dropout="torch")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("spec", DROPPING.values(), ids=DROPPING)
def test_torchs_dropout_keeps_what_is_predicted_with_recompute(
    spec: ModelSpec, attention: str, dtype: torch.dtype
) -> None:
    """Also what a run is refused, to keep outputs of the fused attention that drops: on the CPU it draws no masks."""
    assert_agrees_with_recompute(spec, attention, dtype, "torch", list(DTYPES.values()).index(dtype))


def test_many_chunks_of_the_loss_keep_no_more_than_one() -> None:
    measured = step(LLAMA.model_copy(update={"max_seq": 512}), 2, 512, torch.float32, "sdpa", "chunked")
    assert measured.by_tensor()["lm_head: float32[1024, 16]"] == 1024 * 16 * 4
    assert not any("1024, 33" in name for name in measured.by_tensor())


class Twice(nn.Module):
    """Saves its input twice, a slice of a larger tensor, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2.0
        wide = torch.cat((y, y))  # [2n, 4]; only a slice of it is saved
        return self.inner(y) * y * wide[: len(y)]


def test_a_storage_counts_once_whole_and_where_it_was_first_saved() -> None:
    model, x = Twice(), torch.randn(3, 4, requires_grad=True)
    measured = measure(model, lambda: model(x).sum())
    assert sorted((k.where, k.bytes) for k in measured.kept) == [
        ("", 48),  # inner(y)
        ("", 48),  # inner(y) · y
        ("", 96),  # wide, whole though half of it is saved
        ("inner", 48),  # y, saved again outside
    ]


def test_parameters_buffers_and_inputs_do_not_count() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("scale", torch.ones(4))
    x = torch.randn(3, 4)
    assert measure(model, lambda: (model(x) * model.scale).sum(), inputs=(x,)).total == 0
    assert measure(model, lambda: (model(x) * model.scale).sum()).total == 48


def test_the_fullest_moment_counts_and_not_the_sum_over_passes() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)

    def passes() -> None:
        for rows in (1, 3, 2):
            model(x[:rows] * 2.0).sum().backward()

    assert measure(model, passes).by_tensor() == {": float32[3, 4]": 48}


def test_hooks_are_gone_afterwards_even_when_the_model_raises() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))
    with pytest.raises(RuntimeError):
        measure(model, lambda: model(torch.randn(3, 4)))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_differences_name_module_and_tensor() -> None:
    measured = SavedBytes((Kept("mlp", "float32[2, 8]", 64), Kept("norm", "float32[4]", 16)))
    foretold = [Saved("mlp", "gate", 64), Saved("mlp", "up", 80), Saved("norm", "input", 16)]
    (difference,) = compare(foretold, measured)
    assert (difference.where, difference.predicted, difference.measured) == ("mlp", 144, 64)
    assert difference.only_predicted == ("up, 80 bytes",)
    assert difference.only_measured == ()
    (difference,) = compare(foretold[2:], measured)
    assert difference.only_measured == ("float32[2, 8], 64 bytes",)
