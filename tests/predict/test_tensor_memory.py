"""Activations, peaks, FLOPs and tables of tensor and sequence parallelism."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from meshwright.cli.tables import MOST_ROWS, prediction
from meshwright.predict import activations, flops
from meshwright.predict.memory import memory
from meshwright.predict.modes import modes
from meshwright.predict.peak import loss_workspace, moments
from meshwright.predict.reductions import kept
from meshwright.predict.report import predict
from meshwright.predict.traffic import traffic
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import Batch, Checkpoint, Data, RunSpec
from meshwright.spec.traffic import lent_to_sum

LLAMA = ModelSpec(
    family="llama", vocab=101, hidden=24, layers=3, heads=4, kv_heads=2, head_dim=10, ffn=28, max_seq=64, qk_norm=True
)
GPT2 = ModelSpec(family="gpt2", vocab=101, hidden=24, layers=3, heads=4, max_seq=64, embd_dropout=0.1)
ONE, TP, SP = Layout(dp=1), Layout(dp=1, tp=4), Layout(dp=1, tp=4, sp=True)
B, T, D = 2, 16, 24


def rows(spec: ModelSpec, layout: Layout, within: str, **fields: Any) -> dict[tuple[str, str], int]:
    found = activations.saved(spec, layout, batch=B, seq=T, **fields)
    return {(r.where.removeprefix(within), r.what): r.bytes for r in found if r.where.startswith(within)}


@pytest.mark.parametrize(("layout", "part"), [(TP, 1), (SP, 4)], ids=["tensor", "tensor and sequence"])
def test_a_llama_layer(layout: Layout, part: int) -> None:
    """A rank has one of four heads, and holds one of two key-value heads with its neighbour."""
    stream, head, ffn = B * T * D * 4 // part, B * T * 10 * 4, B * T * 7 * 4
    statistic = B * T * 4
    assert rows(LLAMA, layout, "model.layers.1.") == {
        ("input_layernorm", "residual stream"): stream,
        ("input_layernorm", "inverse root mean square"): statistic // part,
        ("self_attn.q_proj", "normed input of q, k, v"): stream,
        ("self_attn.q_norm", "q before its norm"): head,
        ("self_attn.q_norm", "inverse root mean square"): statistic,
        ("self_attn.k_norm", "k before its norm"): head,
        ("self_attn.k_norm", "inverse root mean square"): statistic,
        ("self_attn.core", "q"): head,
        ("self_attn.core", "k"): head,
        ("self_attn.core", "v"): head,
        ("self_attn.core", "output"): head,
        ("self_attn.core", "log-sum of each softmax row"): statistic,
        ("post_attention_layernorm", "residual stream"): stream,
        ("post_attention_layernorm", "inverse root mean square"): statistic // part,
        ("mlp.gate_proj", "normed input of gate, up"): stream,
        ("mlp", "gate"): ffn,
        ("mlp", "silu(gate)"): ffn,
        ("mlp", "up"): ffn,
        ("mlp.down_proj", "silu(gate) · up"): ffn,
    }


@pytest.mark.parametrize(("layout", "part"), [(TP, 1), (SP, 4)], ids=["tensor", "tensor and sequence"])
@pytest.mark.parametrize("dtype_bytes", [2, 8])
def test_outside_of_layers(layout: Layout, part: int, dtype_bytes: int) -> None:
    wide = max(dtype_bytes, 4)
    found = activations.saved(GPT2, layout, batch=B, seq=T, dtype_bytes=dtype_bytes)
    outside = [(r.where, r.bytes) for r in found if "transformer.h." not in r.where]
    assert outside == [
        ("transformer.wte", B * T * 8), ("transformer.wte", B * T),
        ("transformer.wpe", T * 8),
        ("dropout", B * T * D // part),
        ("transformer.ln_f", B * T * D * dtype_bytes // part),
        *[("transformer.ln_f", B * T * dtype_bytes // part)] * 2,
        ("lm_head", B * T * D * dtype_bytes // part),
        ("lm_head", B * T * 26 * wide), ("lm_head", B * T * 8), ("lm_head", B * T),
    ]  # fmt: skip


@pytest.mark.parametrize("layout", [TP, SP], ids=["tensor", "tensor and sequence"])
def test_a_chunked_loss_keeps_the_gradient_of_the_whole_sequence(layout: Layout) -> None:
    """It is reduced in backward only; that of the head is of this rank's words."""
    found = activations.saved(LLAMA, layout, batch=B, seq=T, loss="chunked")
    assert [r.bytes for r in found if r.where == "lm_head"] == [B * T * D * 4, 26 * D * 4]


def test_the_loss_is_the_heads_in_every_layout() -> None:
    for layout in (ONE, TP):
        assert "" not in {r.where for r in activations.saved(LLAMA, layout, batch=B, seq=T)}


def test_parts_of_the_sequence_are_of_the_stream_only() -> None:
    """With sequence parallelism the stream falls by t, and what is dealt out by heads or units stays as it is."""
    tensor, sequence = (
        {(r.where, r.what): r.bytes for r in activations.saved(GPT2, way, batch=B, seq=T)} for way in (TP, SP)
    )
    fall = {name for name, size in tensor.items() if sequence[name] != size}
    assert all(tensor[name] == 4 * sequence[name] for name in fall)
    assert {where.rpartition(".")[2] for where, _ in fall} == {
        "ln_1", "ln_2", "c_attn", "c_fc", "ln_f", "lm_head", "dropout"
    }  # fmt: skip


# -- peaks --------------------------------------------------------------------------------------------------------

LARGE = RunSpec(
    model=PRESETS["llama3-8b"],
    precision="bf16",
    data=Data(seq_len=4096),
    batch=Batch(sequences=8, micro=2),
    checkpoint=Checkpoint(every=0),
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_way_to_split_holds_less(device: str) -> None:
    plain, tensor, sequence = (memory(LARGE, way, 0, device) for way in (ONE, TP, SP))  # type: ignore[arg-type]
    assert sequence.total < tensor.total < plain.total
    assert sequence.categories["activations"] < 0.3 * plain.categories["activations"]
    assert tensor.states < 0.26 * plain.states  # norms alone are whole
    more = memory(LARGE, Layout(dp=1, tp=8, sp=True), 0, device).total  # type: ignore[arg-type]
    assert more < sequence.total


def test_ranks_hold_by_their_data_coordinate() -> None:
    run = RunSpec(batch=Batch(sequences=3, micro=4), layout=Layout(dp=2, tp=2))
    assert [memory(run, run.layout, rank).sequences for rank in range(4)] == [2, 2, 1, 1]
    swapped = run.layout.model_copy(update={"order": ("dp", "tp", "cp", "pp")})
    assert [memory(run, swapped, rank).sequences for rank in range(4)] == [2, 1, 2, 1]
    assert predict(run).memory.rank == 0
    assert predict(run).memory.total == max(memory(run, run.layout, rank).total for rank in range(4))


def test_the_worst_rank_is_found_among_all() -> None:
    """Also where a rank with a smaller part writes more of a checkpoint."""
    for layout in (Layout(dp=3, tp=2, zero=1, sp=True), Layout(dp=2, tp=4, order=("dp", "cp", "tp", "pp"))):
        run = RunSpec(batch=Batch(sequences=4, micro=4), layout=layout, device="cpu")
        found = predict(run).memory
        assert found.total >= max(memory(run, layout, rank).total for rank in range(layout.world)) - 64


def test_the_loss_of_tensor_ranks_needs_one_copy_of_their_logits_less() -> None:
    def at(size: int, loss: str = "full") -> int:
        return sum(loss_workspace(LLAMA, tokens=1000, dtype_bytes=size, loss=loss, tp=4).values())  # type: ignore[arg-type]

    logits = 1000 * 26
    assert (at(4), at(8), at(2)) == (logits * 4, logits * 8, logits * (4 + 2))
    assert at(4, "chunked") == 1000 * D * 4 + 256 * 26 * 4


def test_sequence_parallelism_gathers_again_in_backward() -> None:
    """Beside the gradients of q, k, v: the input twice, as parts and in order, its gradient, and this rank's sum."""
    run = RunSpec(model=LLAMA, data=Data(seq_len=T), batch=Batch(sequences=B, micro=B))
    whole, heads = B * T * D * 4, B * T * 3 * 10 * 4

    def last_attention(layout: Layout, sequences: int) -> dict[str, int]:
        found = [m for m in moments(run, layout, sequences, cpu=False) if m.what == "attention of block 2"]
        return found[-1].lines

    assert last_attention(TP, B)["temporaries"] == 2 * whole + heads
    assert last_attention(SP, B)["temporaries"] == 3 * whole + 2 * whole // 4 + heads
    assert last_attention(SP, B)["fresh gradients"] == D * 30 * 4
    assert last_attention(SP, 1)["temporaries"] == (2 * whole + 2 * whole // 4 + heads) // 2  # in order at once


def test_only_the_cpu_keeps_a_buffer_for_what_is_scattered() -> None:
    run = RunSpec(model=LLAMA, data=Data(seq_len=T), batch=Batch(sequences=B, micro=B))
    assert kept(run, SP, [[1000]]) == 1000
    assert memory(run, SP, 0, "cpu").categories["reductions"] == B * T * D * 4
    assert memory(run, TP, 0, "cpu").categories["reductions"] == lent_to_sum(TP.tp, B * T * D * 4)
    assert memory(run, TP, 0, "cuda").categories["reductions"] == 0
    assert memory(run, SP, 0, "cuda").categories["reductions"] == 0


def test_ways_to_recompute_are_those_of_the_layout() -> None:
    found = modes(LARGE, SP)
    assert {mode.layout.tp for mode in found} == {4} and all(mode.layout.sp for mode in found)
    none, full, every, selective, more = found
    assert every.kept < full.kept < selective.kept < more.kept < none.kept
    plain = [mode.recompute_share for mode in modes(LARGE, ONE)]
    assert [mode.recompute_share for mode in found] == pytest.approx(plain, rel=0.01)


# -- FLOPs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_ranks_together_compute_what_one_does(tp: int, recompute: str, attention: str, loss: str) -> None:
    """But for what each does: here the words behind the vocabulary's end, and with four ranks k and v once more."""
    spec = LLAMA.model_copy(update={"kv_heads": max(tp, 2), "vocab": -(-LLAMA.vocab // tp) * tp})
    fields: dict[str, Any] = {"batch": 3, "seq": 8, "attention": attention, "loss": loss}
    filled_up = flops.counted(spec, **fields, layout=Layout(recompute=recompute))  # type: ignore[arg-type]
    one = flops.counted(LLAMA, **fields, layout=Layout(tp=tp, recompute=recompute))  # type: ignore[arg-type]
    assert one.times(tp) == filled_up
    plain = flops.counted(LLAMA, **fields)
    again = 2 * 24 * D * 10 * 3 * 2 * (max(tp, 2) - 2)  # a forward of k and v of every layer, for two heads more
    words = 2 * 24 * D * (spec.vocab - LLAMA.vocab)
    assert filled_up.forward + filled_up.backward == plain.total + 3 * (again + words)


def test_executed_is_all_ranks() -> None:
    plain, split = (predict(RunSpec(layout=way)).flops for way in (Layout(dp=2), Layout(dp=2, tp=2, sp=True)))
    assert split == plain  # all divides


# -- what is shown ------------------------------------------------------------------------------------------------


def shown(run: RunSpec, **options: bool) -> list[list[str]]:
    out = io.StringIO()
    console = Console(file=out, width=200)
    for part in prediction(run, predict(run), **options):
        console.print(part)
    return [line.split() for line in out.getvalue().splitlines()]


def test_json_says_what_a_rank_holds() -> None:
    run = RunSpec(model=LLAMA, layout=Layout(dp=2, tp=4, zero_join=0), data=Data(seq_len=16))
    data = json.loads(json.dumps(predict(run).to_dict()))
    assert data["ranks"] == 8
    assert sum(data["parameters"]["units"].values()) == data["parameters"]["total"]
    assert data["parameters"]["local"]["head"] == 26 * D + D
    assert 4 * sum(data["parameters"]["local"].values()) == data["memory"]["categories"]["parameters"]
    assert data["wire_per_step"] == sum(row.wire for row in traffic(run, run.layout, 0))
    plain = predict(RunSpec(layout=Layout(dp=2))).parameters
    assert plain.local == plain.units


def test_many_micro_batches_share_a_line() -> None:
    run = RunSpec(layout=Layout(dp=1, tp=2), batch=Batch(sequences=10, micro=2))
    assert len(predict(run).traffic) > MOST_ROWS
    attn = ["all_reduce", "tp", "tp.attn", "forward,"]
    assert [x[4:8] for x in shown(run) if x[:4] == attn] == [["micro-batches", "0", "to", "4"]]
    assert [x[8] for x in shown(run) if x[:4] == attn] == ["20"]  # five micro-batches of four layers
    every = [x for x in shown(run, every_unit=True) if x[:4] == attn]
    assert [x[4:7] for x in every] == [["micro-batch", str(micro), "4"] for micro in range(5)]
    few = run.model_copy(update={"batch": Batch(sequences=2, micro=2)})
    assert [x[4:7] for x in shown(few) if x[:4] == attn] == [["micro-batch", "0", "4"]]


def test_tables_say_what_is_split() -> None:
    lines = [" ".join(line) for line in shown(RunSpec(layout=Layout(dp=2, tp=2, sp=True, zero_join=0)))]
    assert "layout dp=2 × tp=2, sp, zero_join=0: 4 ranks, fp32" in lines
    assert "unit parameters a rank holds" in lines
    assert "blocks.0 to blocks.3, each 284,480 142,400" in lines
    assert "Traffic of a step on rank 0" in lines
    plain = [" ".join(line) for line in shown(RunSpec())]
    assert "unit parameters" in plain and "Traffic of a step" in plain
