"""Tensor and sequence parallelism: parts of tensors, and what their ranks send, counted by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from meshwright.predict.params import count, tensors, units
from meshwright.predict.states import checkpoint_copy, partial_sums, states
from meshwright.predict.tensor import reissued, tokens_computed
from meshwright.predict.traffic import total_wire, traffic
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import LOSS_ROWS, Batch, Data, RunSpec
from meshwright.spec.traffic import TrafficRow

# Sizes that divide by 4 where they must, a vocabulary that does not, fewer key-value heads than ranks.
LLAMA = ModelSpec(
    family="llama", vocab=101, hidden=24, layers=3, heads=4, kv_heads=2, head_dim=10, ffn=28, max_seq=64,
    qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True,
)  # fmt: skip
GPT2 = ModelSpec(family="gpt2", vocab=101, hidden=24, layers=3, heads=4, max_seq=64)
SPECS = {"llama": LLAMA, "tied": LLAMA.model_copy(update={"tied": True}), "gpt2": GPT2}


def run_of(model: ModelSpec = LLAMA, **fields: Any) -> RunSpec:
    fields.setdefault("batch", Batch(sequences=2, micro=2))
    fields.setdefault("data", Data(seq_len=16))
    return RunSpec(model=model, **fields)


def test_parts_of_a_llama_block() -> None:
    shapes = {t.name: t.local_shape for t in tensors(LLAMA, Layout(dp=1, tp=4))}
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (26, 24)
    found = {
        name.removeprefix("model.layers.1."): shape
        for name, shape in shapes.items()
        if name.startswith("model.layers.1.")
    }
    assert found == {
        "self_attn.q_proj.weight": (10, 24), "self_attn.q_proj.bias": (10,),
        "self_attn.k_proj.weight": (10, 24), "self_attn.k_proj.bias": (10,),
        "self_attn.v_proj.weight": (10, 24), "self_attn.v_proj.bias": (10,),
        "self_attn.o_proj.weight": (24, 10), "self_attn.o_proj.bias": (24,),
        "self_attn.q_norm.weight": (10,), "self_attn.k_norm.weight": (10,),
        "mlp.gate_proj.weight": (7, 24), "mlp.gate_proj.bias": (7,),
        "mlp.up_proj.weight": (7, 24), "mlp.up_proj.bias": (7,),
        "mlp.down_proj.weight": (24, 7), "mlp.down_proj.bias": (24,),
        "input_layernorm.weight": (24,), "post_attention_layernorm.weight": (24,),
    }  # fmt: skip


def test_parts_of_a_gpt2_block() -> None:
    shapes = {t.name: t.local_shape for t in tensors(GPT2, Layout(dp=1, tp=2))}
    assert shapes["transformer.wte.weight"] == (51, 24)
    assert shapes["transformer.wpe.weight"] == (64, 24)
    block = {name.removeprefix("transformer.h.0."): s for name, s in shapes.items() if "h.0." in name}
    assert block == {
        "ln_1.weight": (24,), "ln_1.bias": (24,), "ln_2.weight": (24,), "ln_2.bias": (24,),
        "attn.c_attn.weight": (24, 36), "attn.c_attn.bias": (36,),
        "attn.c_proj.weight": (12, 24), "attn.c_proj.bias": (24,),
        "mlp.c_fc.weight": (24, 48), "mlp.c_fc.bias": (48,),
        "mlp.c_proj.weight": (48, 24), "mlp.c_proj.bias": (24,),
    }  # fmt: skip


def test_states_are_of_the_parts_with_what_fills_them_up() -> None:
    # GPT-2's block by hand: matrices by halves, of the biases those of columns, of the rest nothing.
    block = 12 * 24 * 24 // 2 + (3 + 4) * 24 // 2 + 6 * 24
    elements = 51 * 24 + 64 * 24 + 3 * block + 2 * 24
    held = states(run_of(GPT2), Layout(dp=1, tp=2))
    assert held["parameters"] == held["gradients"] == 4 * elements
    assert held["adam moments"] == 8 * elements
    two = states(run_of(GPT2), Layout(dp=2, tp=2, zero=3))
    assert two["parameters"] == 4 * elements // 2  # every unit's size is even


def test_units_are_joined_by_what_a_rank_holds() -> None:
    least = 3000  # more than half a block, less than a whole one
    assert [*units(LLAMA, least)] == ["embedding..blocks.0", "blocks.1", "blocks.2..head"]
    assert [*units(LLAMA, least, Layout(tp=2))] == ["embedding..blocks.0", "blocks.1..head"]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=1, tp=2),
        Layout(dp=1, tp=4, sp=True),
        Layout(dp=3, tp=4),
        Layout(dp=4, tp=2, zero=2, zero_shard=2),
        Layout(dp=3, tp=4, zero=3, sp=True, order=("dp", "cp", "tp", "pp")),
    ],
    ids=str,
)
def test_a_checkpoint_is_written_once(spec: ModelSpec, layout: Layout) -> None:
    """Copies and what fills up are left out, whatever ranks hold them."""
    run = run_of(spec)
    assert sum(checkpoint_copy(run, layout, rank) for rank in range(layout.world)) == 3 * 4 * count(spec)


def test_who_writes_what_several_hold() -> None:
    layout = Layout(dp=1, tp=4)
    first, second, third, last = (checkpoint_copy(run_of(), layout, rank) for rank in range(4))
    kv = 2 * (10 * 24 + 10) * 3  # k and v of every block, which rank 0 writes and rank 1, its copy, does not
    whole = 24 + 3 * (2 * 24 + 2 * 10 + 2 * 24)  # norms, row biases
    assert first - second == 3 * 4 * (kv + whole)
    assert third == second + 3 * 4 * kv
    assert third - last == 3 * 4 * (kv + 2 * 3 * 24)  # 3 of the 104 rows are none
    # At a stage that shards nobody's part changes.
    assert [checkpoint_copy(run_of(), layout.model_copy(update={"zero": 1}), rank) for rank in range(4)] == [
        first, second, third, last
    ]  # fmt: skip


# -- traffic ------------------------------------------------------------------------------------------------------


def kinds(rows: Iterable[TrafficRow], micro: int | None = 0) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Count and payload over the tensor ranks, by phase, operation and reason."""
    return {
        (row.key.phase, row.key.operation, row.key.reason): (row.count, row.payload)
        for row in rows
        if row.key.axis in ("tp", "tp.inner") and row.key.micro == micro
    }


HIDDEN = 2 * 16 * 24 * 4
LOSS = {("forward", "all_reduce", "tp.loss"): (2, 3 * 2 * 16 * 4)}


def test_rows_of_tensor_parallelism() -> None:
    found = kinds(traffic(run_of(GPT2), Layout(dp=1, tp=2)))
    assert found == LOSS | {
        ("forward", "all_reduce", "tp.embed"): (1, HIDDEN),
        ("forward", "all_reduce", "tp.attn"): (3, 3 * HIDDEN),
        ("forward", "all_reduce", "tp.mlp"): (3, 3 * HIDDEN),
        ("backward", "all_reduce", "tp.head"): (1, HIDDEN),
        ("backward", "all_reduce", "tp.mlp"): (3, 3 * HIDDEN),
        ("backward", "all_reduce", "tp.attn"): (3, 3 * HIDDEN),
    }


def test_rows_of_sequence_parallelism() -> None:
    rows = traffic(run_of(GPT2), Layout(dp=1, tp=2, sp=True))
    half = {
        ("forward", "all_gather"): (3, 3 * HIDDEN),
        ("forward", "reduce_scatter"): (3, 3 * HIDDEN),
        ("backward", "all_gather"): (6, 6 * HIDDEN),
        ("backward", "reduce_scatter"): (3, 3 * HIDDEN),
    }
    assert kinds(rows) == LOSS | {
        **{(*kind, reason): counts for kind, counts in half.items() for reason in ("tp.attn", "tp.mlp")},
        ("forward", "reduce_scatter", "tp.embed"): (1, HIDDEN),
        ("backward", "all_gather", "tp.embed"): (1, HIDDEN),
        ("forward", "all_gather", "tp.head"): (1, HIDDEN),
        ("backward", "all_gather", "tp.head"): (1, HIDDEN),
        ("backward", "reduce_scatter", "tp.head"): (1, HIDDEN),
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_sends_what_megatron_says(ranks: int) -> None:
    """Four all-reduces of the hidden states, forward and backward (Shoeybi et al. 2019, section 3): 8·B·T·D·bytes·
    (t−1)/t sent by a rank; with sequence parallelism the same, and the saved input gathered once more in each half."""
    more = LLAMA.model_copy(update={"layers": 4})
    for sp, expected in ((False, 8), (True, 10)):
        layout = Layout(dp=1, tp=ranks, sp=sp)
        three, four = (
            total_wire(row for row in traffic(run_of(spec), layout) if row.key.micro is not None)
            for spec in (LLAMA, more)
        )
        assert four - three == expected * HIDDEN * (ranks - 1) / ranks


def test_a_chunked_loss_reduces_chunk_by_chunk_and_gathers_its_input_once() -> None:
    tokens = 2 * LOSS_ROWS + 2 * 44
    run = run_of(GPT2.model_copy(update={"max_seq": 512}), data=Data(seq_len=tokens // 2), loss="chunked")
    found = kinds(traffic(run, Layout(dp=1, tp=2, sp=True)))
    assert found["forward", "all_reduce", "tp.loss"] == (2 * 3, 3 * tokens * 4)
    assert ("backward", "all_gather", "tp.head") not in found
    assert found["backward", "reduce_scatter", "tp.head"] == (1, tokens * 24 * 4)
    half = RunSpec.model_validate(run.model_dump() | {"precision": "bf16"})
    assert kinds(traffic(half, Layout(dp=1, tp=2)))["forward", "all_reduce", "tp.loss"] == (6, 3 * tokens * 4)


@pytest.mark.parametrize(
    ("fields", "attn", "mlp"),
    [
        ({"recompute": "none"}, 0, 0),
        ({"recompute": "full"}, 3, 0),
        ({"recompute": "full", "recompute_every": 2}, 3, 1),
        ({"recompute": "full", "recompute_every": 3}, 3, 2),
        ({"recompute": "selective"}, 0, 0),
        ({"recompute": "selective", "recompute_keep": ("attention", "activation")}, 3, 0),
        ({"recompute": "selective", "recompute_keep": ("linear", "softmax")}, 0, 0),
    ],
)
def test_recompute_sends_again_what_it_computes_again(fields: dict[str, Any], attn: int, mlp: int) -> None:
    again = {"tp.attn": attn, "tp.mlp": mlp}
    for sp in (False, True):
        layout = Layout(dp=1, tp=2, sp=sp, **fields)
        found = {kind: n for kind, (n, _) in kinds(traffic(run_of(LLAMA), layout)).items() if kind[0] == "recompute"}
        gathers = 3 if attn else 0
        expected = {("recompute", "reduce_scatter" if sp else "all_reduce", why): n for why, n in again.items() if n}
        if sp and gathers:
            expected |= {("recompute", "all_gather", why): gathers for why in again}
        assert found == expected
    # A mask behind the last product is saved, so this one comes again too.
    dropping = GPT2.model_copy(update={"resid_dropout": 0.1})
    assert reissued(dropping, Layout(tp=2, **fields))["mlp"] == attn


def test_what_is_sent_follows_the_data_coordinates_micro_batches() -> None:
    run = run_of(batch=Batch(sequences=5, micro=2))
    layout = Layout(dp=2, tp=2)  # three sequences and two
    assert [tokens_computed(run, layout, rank) for rank in range(4)] == [[32, 16]] * 2 + [[32, 0]] * 2
    rows = [traffic(run, layout, rank) for rank in range(4)]
    assert rows[0] == rows[1] != rows[2] == rows[3]
    assert kinds(rows[0], 1)["forward", "all_reduce", "tp.attn"] == (3, 3 * HIDDEN // 2)
    assert kinds(rows[2], 1) == {}
    # At stage 3 every rank has a part in the others' gathers: one token, or one of each part.
    assert tokens_computed(run, Layout(dp=2, tp=2, zero=3), 3) == [32, 1]
    assert tokens_computed(run, Layout(dp=2, tp=2, sp=True, zero=3), 3) == [32, 2]
    assert tokens_computed(run, Layout(dp=2, tp=2, zero=3, zero_shard=1), 3) == [32, 0]
    swapped = Layout(dp=2, tp=2, order=("dp", "tp", "cp", "pp"))
    assert [tokens_computed(run, swapped, rank)[1] for rank in range(4)] == [16, 0, 16, 0]


def test_sums_after_backward() -> None:
    """With sequence parallelism what is whole saw its part of the sequence; key-value heads are summed over copies."""
    norms = 3 * 2 * 10
    whole = norms + 24 + 3 * (2 * 24 + 2 * 24)  # layer norms, biases of rows
    kv = 3 * 2 * (10 * 24 + 10)
    assert partial_sums(run_of(), Layout(dp=1, tp=2), 0) == {"tp": norms}
    assert partial_sums(run_of(), Layout(dp=1, tp=4), 0) == {"tp": norms, "tp.inner": kv}
    assert partial_sums(run_of(), Layout(dp=1, tp=4, sp=True), 0) == {"tp": whole, "tp.inner": kv}
    assert partial_sums(run_of(GPT2), Layout(dp=1, tp=4), 0) == {}
    positions = 64 * 24
    rest = 2 * 24 + 3 * 6 * 24
    assert partial_sums(run_of(GPT2), Layout(dp=1, tp=4, sp=True), 0) == {"tp": positions + rest}
    rows = [r for r in traffic(run_of(), Layout(dp=1, tp=4, sp=True)) if r.key.reason == "tp.partial"]
    assert [(r.key.axis, r.key.phase, r.count, r.payload, r.wire) for r in rows] == [
        ("tp.inner", "step", 1, 4 * kv, 4 * kv),
        ("tp", "step", 1, 4 * whole, 4 * whole * 2 * 3 / 4),
    ]


@pytest.mark.parametrize(("layout", "groups"), [(Layout(dp=3, tp=2, sp=True, zero=2), 1),
                                                (Layout(dp=4, tp=4, sp=True, zero=1, zero_shard=2), 2)])  # fmt: skip
def test_the_shards_have_the_sums_of_their_pieces(layout: Layout, groups: int) -> None:
    """Together those of one replica have all of it, each another part."""
    run = run_of()
    all_of_it = partial_sums(run, Layout(dp=1, tp=layout.tp, sp=True), 0)
    by_data_rank = [partial_sums(run, layout, layout.rank_at({"dp": dp})) for dp in range(layout.data_ranks)]
    for axis, elements in all_of_it.items():
        assert sum(found.get(axis, 0) for found in by_data_rank) == groups * elements
    assert len({tuple(found.items()) for found in by_data_rank}) > 1
    assert partial_sums(run, layout, layout.rank_at({"dp": 1, "tp": 1})) == by_data_rank[1]


@pytest.mark.parametrize(
    ("layout", "metrics", "norm"),
    [
        (Layout(dp=2), "dp", None),
        (Layout(dp=2, zero=1), "dp", "dp"),
        (Layout(dp=1, zero=1), None, None),
        (Layout(dp=1, tp=2), "tp", "tp"),
        (Layout(dp=2, tp=2), "dp+tp", "dp+tp"),
        (Layout(dp=2, tp=2, zero=1), "dp+tp", "dp+tp"),
        (Layout(dp=1, tp=2, zero=3), "tp", "tp"),
    ],
    ids=str,
)
def test_who_agrees_on_the_step(layout: Layout, metrics: str | None, norm: str | None) -> None:
    found = {row.key.reason: (row.key.axis, row.payload) for row in traffic(run_of(), layout)}
    assert found.get("step.metrics") == (metrics and (metrics, 24))
    assert found.get("step.norm") == (norm and (norm, 8))


def test_data_ranks_exchange_parts_only() -> None:
    def reduced(layout: Layout) -> int:
        return sum(row.payload for row in traffic(run_of(), layout) if row.key.reason.startswith("zero."))

    parts = sum(t.local_numel for t in tensors(LLAMA, Layout(tp=4)))
    assert reduced(Layout(dp=2, tp=4)) == 4 * parts < reduced(Layout(dp=2)) / 2
