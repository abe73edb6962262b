"""FLOPs foretold, against what torch counts in the plain model and against published formulas."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from meshwright.comm.mesh import Mesh
from meshwright.model.build import build
from meshwright.model.dropout import DropoutKey
from meshwright.model.init import initialise_
from meshwright.parallel.recompute import Recompute
from meshwright.predict import flops
from meshwright.predict.params import count, embedding_count
from meshwright.predict.peaks import peak
from meshwright.predict.report import predict
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import Batch, Data, RunSpec
from meshwright.train.trainer import Trainer
from meshwright.verify.unequal import proof_data

LLAMA = ModelSpec(family="llama", vocab=33, hidden=16, layers=2, heads=4, kv_heads=2, ffn=24, max_seq=32)
GPT2 = ModelSpec(family="gpt2", vocab=33, hidden=16, layers=2, heads=4, max_seq=32)
SPECS = {
    "llama": LLAMA,
    "tied": LLAMA.model_copy(update={"tied": True}),
    "one kv head": LLAMA.model_copy(update={"kv_heads": 1}),
    "wide heads": LLAMA.model_copy(update={"head_dim": 10, "qk_norm": True}),
    "window": LLAMA.model_copy(update={"window": 3}),
    "three layers": LLAMA.model_copy(update={"layers": 3}),
    "gpt2": GPT2,
    "gpt2 untied, narrow": GPT2.model_copy(update={"tied": False, "ffn": 10}),
    "not causal": GPT2.model_copy(update={"causal": False}),
}

DROPPED = {
    "residual dropout": GPT2.model_copy(update={"resid_dropout": 0.1}),
    "attention dropout": GPT2.model_copy(update={"attn_dropout": 0.1}),
}


# torch's counter knows the fused kernels of GPUs; the CPU's counts by the same formulas. Nor does it know addmm_.
def _cpu_forward(query, key, value, *args, out_shape=None, **kwargs):  # type: ignore[no-untyped-def]
    return sdpa_flop_count(query, key, value)


def _cpu_backward(grad, query, key, value, *args, out_shape=None, **kwargs):  # type: ignore[no-untyped-def]
    return sdpa_backward_flop_count(grad, query, key, value)


def _addmm(total, a, b, *args, out_shape=None, **kwargs):  # type: ignore[no-untyped-def]
    return 2 * a[0] * a[1] * b[1]


UNKNOWN_TO_TORCH = {
    torch.ops.aten.addmm_: _addmm,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_backward,
}


def count_of(
    spec: ModelSpec,
    attention: str,
    loss: str,
    layout: Layout | None = None,
    batch: int = 3,
    seq: int = 8,
    dropout: str = "counter",
    documents: torch.Tensor | None = None,
) -> tuple[int, int]:
    """FLOPs that torch counts in forward and in backward."""
    model = build(spec, attention=attention, loss=loss, dropout=dropout).train()  # type: ignore[arg-type]
    model.rebuild_buffers(torch.device("cpu"))
    initialise_(model, 0)
    if layout is not None and layout.recompute != "none":
        Recompute(model.blocks, every=layout.region(spec.layers), keep=layout.kept_operators, rng=dropout == "torch")
    tokens = torch.randint(spec.vocab, (batch, seq))
    with FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH) as counter:
        value = model(tokens, tokens, documents=documents, dropout=DropoutKey(0, 0, torch.arange(batch)))
        forward = counter.get_total_flops()
        value.backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_counted_is_what_torch_counts(spec: ModelSpec, attention: str, loss: str) -> None:
    expected = flops.counted(spec, batch=3, seq=8, attention=attention, loss=loss)  # type: ignore[arg-type]
    assert count_of(spec, attention, loss) == (expected.forward, expected.backward)
    assert expected.recompute == 0


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_documents_are_whole_squares_to_one_device(attention: str) -> None:
    documents = torch.tensor([[0] * 8, [0, 1, 1, 1, 2, 2, 3, 3], [0] * 7 + [1]])
    for spec in (LLAMA, SPECS["window"], SPECS["not causal"]):
        expected = flops.counted(spec, batch=3, seq=8, attention=attention)  # type: ignore[arg-type]
        assert count_of(spec, attention, "full", documents=documents) == (expected.forward, expected.backward)


def test_documents_need_the_pairs_inside_them() -> None:
    """Three of 4 tokens and one of 20 to a window of 3: 4·3 − 9/2 and 20·3 − 9/2 pairs, over 32 tokens."""
    spec, lengths = SPECS["window"], {4: 3, 20: 1}
    products = 3 * 4 * spec.layers * spec.heads * spec.head_width
    linear = 6 * flops.linear_weights(spec)
    assert flops.model_flops(spec, seq=32, documents=lengths) == linear + products * (3 * 7.5 + 55.5) / 32
    assert flops.model_flops(spec, seq=32, documents={32: 5}) == flops.model_flops(spec, seq=32)
    whole, packed = (flops.utilisation(LLAMA, 32, 1.0, 1.0, documents) for documents in (None, lengths))
    assert linear < packed < whole


RECOMPUTED = [
    Layout(recompute="full"),
    Layout(recompute="full", recompute_every=2),
    Layout(recompute="full", recompute_every=3),
    Layout(recompute="selective"),
    Layout(recompute="selective", recompute_keep=("attention",)),
    Layout(recompute="selective", recompute_keep=("linear", "attention")),
    Layout(recompute="selective", recompute_keep=("softmax", "activation")),
]


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("spec", (SPECS | DROPPED).values(), ids=SPECS | DROPPED)
def test_counted_again_is_what_torch_counts_more(spec: ModelSpec, attention: str) -> None:
    if spec.attn_dropout:
        attention = "explicit"
    spec = spec.model_copy(update={"layers": 3})
    for layout in RECOMPUTED:
        expected = flops.counted(spec, batch=3, seq=8, attention=attention, layout=layout)  # type: ignore[arg-type]
        counted = count_of(spec, attention, "full", layout)
        assert counted == (expected.forward, expected.backward + expected.recompute), layout
        assert expected.total == sum(counted)


def test_a_whole_forward_once_more_would_be_a_third_and_recompute_takes_less() -> None:
    """Llama 3 8B at 8,192 tokens: without head, attention and last products the rest comes to about a quarter."""
    spec = PRESETS["llama3-8b"]

    def share(**options: Any) -> float:
        layout = Layout(recompute=options.pop("recompute", "full"), **options)
        return flops.counted(spec, batch=1, seq=8192, attention="explicit", layout=layout).recompute_share

    plain = flops.counted(spec, batch=1, seq=8192, attention="explicit")
    assert plain.forward / plain.total == pytest.approx(1 / 3, rel=1e-12)
    assert share(recompute="selective", recompute_keep=("linear", "attention")) == 0
    assert share(recompute="selective") < 0.08 < 0.2 < share() < share(recompute_every="sqrt") < 1 / 3
    # Region by region one product less: down's of each block, or of every sixth.
    down = 2 * 8192 * spec.hidden * spec.ffn_width
    assert share(recompute_every="sqrt") - share() == pytest.approx((32 - 6) * down / plain.total)


def test_the_fused_attention_that_drops_is_written_out_on_the_cpu() -> None:
    model = SPECS["gpt2"].model_copy(update={"attn_dropout": 0.1})
    run = RunSpec(model=model, data=Data(seq_len=8), batch=Batch(sequences=3), dropout="torch", device="cpu")
    for layout in (Layout(), *RECOMPUTED):
        if "attention" in layout.recompute_keep and layout.recompute == "selective":
            continue  # refused
        run = RunSpec.model_validate(run.model_dump() | {"layout": layout})
        total = sum(count_of(model, "sdpa", "full", layout, dropout="torch"))
        assert predict(run).flops.executed_per_step.total == total, layout
        assert predict(run, device="cuda").flops.executed_per_step.total > total


def test_counted_is_the_published_formula_for_gpt() -> None:
    # Narayanan et al. 2021 (arXiv 2104.04473), eq. 3: 96 B s l h² (1 + s/6h + V/16lh) with every forward computed
    # twice, so four passes over the blocks and three over the head; without that 72 B s l h² (1 + s/6h + V/12lh).
    b, s, spec = 5, 1024, PRESETS["gpt2"]
    h, n, v = spec.hidden, spec.layers, spec.vocab
    assert flops.counted(spec, batch=b, seq=s, attention="explicit").total == pytest.approx(
        72 * b * s * n * h * h * (1 + s / (6 * h) + v / (12 * n * h)), rel=1e-12
    )


def test_gpt3_takes_what_its_paper_says() -> None:
    # Brown et al. 2020 (arXiv 2005.14165), table D.1: 175B, 174,600 M parameters, 300 B tokens, 3.14e23 FLOPs, six a
    # parameter and token, attention not counted.
    total = 6 * flops.linear_weights(PRESETS["gpt3-175b"]) * 300e9
    assert total == pytest.approx(3.14e23, rel=0.002)


def test_llama3_405b_takes_what_its_paper_says() -> None:
    # Grattafiori et al. 2024 (arXiv 2407.21783), section 1: 405B parameters, 15.6 T tokens, 3.8e25 FLOPs.
    assert 6 * flops.linear_weights(PRESETS["llama3-405b"]) * 15.6e12 == pytest.approx(3.8e25, rel=0.01)


@pytest.mark.parametrize("name", ["llama2-70b", "llama3-8b", "qwen3-8b"])
def test_linear_weights_are_the_matrices_but_the_embedding(name: str) -> None:
    spec = PRESETS[name]
    vectors = spec.layers * (2 * spec.hidden + 2 * spec.head_width * spec.qk_norm) + spec.hidden
    assert flops.linear_weights(spec) == count(spec) - embedding_count(spec) - vectors


def test_causal_attention_counts_half_and_a_window_what_it_shows() -> None:
    whole = flops.visible_pairs(LLAMA.model_copy(update={"causal": False}), 64)
    assert flops.visible_pairs(LLAMA, 64) == whole / 2
    assert flops.visible_pairs(LLAMA.model_copy(update={"window": 64}), 64) == whole / 2
    assert flops.visible_pairs(LLAMA.model_copy(update={"window": 1000}), 64) == whole / 2
    narrow = LLAMA.model_copy(update={"window": 8})
    exact = sum(min(i + 1, 8) for i in range(64))
    assert flops.visible_pairs(narrow, 64) == pytest.approx(exact, rel=0.02)


def test_model_flops_ignore_recomputation() -> None:
    spec, seq = LLAMA.model_copy(update={"causal": False}), 16
    assert flops.model_flops(spec, seq=seq) * seq == flops.counted(spec, batch=1, seq=seq, attention="explicit").total


def test_model_flops_of_known_sizes() -> None:
    # Llama 2 7B: 32 layers of 4·4096² + 3·4096·11008 weights, and the head 32000·4096, six FLOPs each; attention
    # 12·32·4096·4096 a token over the square, half of it causal.
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    assert flops.model_flops(PRESETS["llama2-7b"], seq=4096) == 6 * weights + 6 * 32 * 4096 * 4096


def test_utilisation() -> None:
    spec = PRESETS["llama2-7b"]
    per_token = flops.model_flops(spec, seq=4096)
    assert flops.utilisation(spec, seq=4096, tokens_per_second_per_device=1000, peak=4000 * per_token) == 0.25


@pytest.mark.parametrize(
    ("device", "dtype", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 66.9e12),
        ("NVIDIA H100 80GB HBM3", "float64", 66.9e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 PCIe", "fp32", 51.2e12),
        ("NVIDIA H100 PCIe", "float64", 51.2e12),
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA A100-PCIE-40GB", "float64", 19.5e12),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7e12),
    ],
)
def test_peaks(device: str, dtype: str, rate: float) -> None:
    found = peak(device, dtype)  # type: ignore[arg-type]
    assert found is not None and found[0] == rate and found[1]


@pytest.mark.parametrize("dtype", ["fp32", "float64"])
@pytest.mark.parametrize(
    ("device", "units", "per_clock", "clock"),
    [
        ("NVIDIA A100-SXM4-80GB", 108, 64, 1.41e9),
        ("NVIDIA H100 80GB HBM3", 132, 128, 1.98e9),
        ("NVIDIA H100 PCIe", 114, 128, 1.755e9),
    ],
)
def test_peaks_are_what_the_units_come_to(device: str, units: int, per_clock: int, clock: float, dtype: str) -> None:
    """Multiprocessors, fused multiply-adds of each a cycle (float64: on tensor cores), and the boost clock."""
    found = peak(device, dtype)  # type: ignore[arg-type]
    assert found is not None and found[0] == pytest.approx(units * per_clock * 2 * clock, rel=2e-3)


def test_no_peak_is_made_up() -> None:
    assert peak("cpu", "fp32") is None
    assert peak("Tesla V100-SXM2-16GB", "bf16") is None
    assert peak("NVIDIA L40S", "bf16") is None


def computed_on(mesh: Mesh, run: RunSpec) -> int:
    """FLOPs that torch counts on a rank in a step."""
    trainer, data = Trainer(run, mesh), proof_data(run)
    with FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH) as counter:
        trainer.accumulate(data, 0)
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    "layout",
    [
        {"cp": 4, "recompute": "full"},
        {"cp": 4, "cp_order": "contiguous"},
        {"cp": 2, "cp_method": "rsa"},
        {"cp": 4, "cp_method": "usp", "cp_ulysses": 2, "recompute": "selective"},
        {"cp": 2, "tp": 2, "cp_method": "ulysses", "cp_order": "striped"},
    ],
    ids=str,
)
def test_counted_on_context_ranks_is_what_torch_counts(ranks: Any, layout: dict[str, Any]) -> None:
    laid_out = Layout(dp=1, **layout)
    run = RunSpec(model=LLAMA, data=Data(seq_len=16), batch=Batch(sequences=3, micro=3), layout=laid_out)
    sizes: Any = {axis: laid_out.size(axis) for axis in ("tp", "cp")}
    found = ranks.run(laid_out.world, computed_on, run, axes=sizes)
    foretold = [
        flops.counted(LLAMA, batch=3, seq=16, layout=laid_out, place=place).total for place in range(laid_out.cp)
    ]
    assert found == [foretold[laid_out.coordinates(rank)["cp"]] for rank in range(laid_out.world)]
    assert predict(run).flops.executed_per_step.total == sum(found)


def test_context_ranks_leave_out_what_is_of_other_documents(ranks: Any) -> None:
    """Ring and gather leave blocks out; rsa computes the scores of all."""
    for method, less in (("ring", True), ("gather", True), ("rsa", False)):
        layout = Layout(dp=1, cp=4, cp_method=method)  # type: ignore[arg-type]
        data = Data(seq_len=16, packing="documents")
        run = RunSpec(model=LLAMA, data=data, batch=Batch(sequences=4, micro=1), layout=layout)
        found, most = ranks.run(4, computed_on, run, axes={"cp": 4}), predict(run).flops.executed_per_step.total
        assert sum(found) < most if less else sum(found) == most, method


def test_the_order_of_positions_decides_how_even_the_work_is() -> None:
    """Attention of a long causal sequence: even in zigzag; contiguous, the last rank has 2·cp − 1 times the first's."""
    spec = LLAMA.model_copy(update={"hidden": 16, "heads": 16, "kv_heads": 16, "head_dim": 64, "ffn": 2, "vocab": 2})

    def shares(order: str) -> list[int]:
        layout = Layout(dp=1, cp=4, cp_order=order)
        return [flops.counted(spec, batch=1, seq=1 << 15, layout=layout, place=place).total for place in range(4)]

    assert max(shares("zigzag")) == min(shares("zigzag"))
    uneven = shares("contiguous")
    assert uneven[3] / uneven[0] > 3.5  # whole rectangles: 4 against 1
