"""Megatron-LM's plan by name: what is cut how, what is summed over whom, and which degrees are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.cuts import Cut
from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.load import load_run
from meshwright.spec.model import ModelSpec
from meshwright.spec.splitting import Split, check, cut_of, found, plan, summed

LLAMA = ModelSpec(family="llama", vocab=101, hidden=48, layers=2, heads=12, kv_heads=4, ffn=24, max_seq=32)
GPT2 = ModelSpec(family="gpt2", vocab=101, hidden=48, layers=2, heads=12, max_seq=32)


def refused(spec: ModelSpec, seq_len: int = 24, **layout: object) -> str:
    with pytest.raises(ValueError) as caught:
        check(spec, Layout(dp=1, **layout), seq_len)
    return str(caught.value)


def test_blocks_are_named_with_a_star():
    splits = plan(LLAMA)
    assert found(splits, "model.layers.11.self_attn.k_proj") is splits["model.layers.*.self_attn.k_proj"]
    assert found(splits, "model.layers.0") is None
    assert found(splits, "model.layers.0.self_attn.k_proj.weight") is None
    assert found(splits, "model.layers2.self_attn.k_proj") is None
    assert found(splits, "lm_head") == Split("vocabulary")


def test_a_number_that_is_written_out_comes_before_the_star():
    first, others = Split("columns"), Split("rows")
    assert found({"mlp.0": first, "mlp.*": others}, "mlp.0") is first
    assert found({"mlp.0": first, "mlp.*": others}, "mlp.2") is others
    assert found({"0": first}, "0") is first
    assert found({"mlp.0": first}, "mlp.2") is None


def cut(name: str, shape: tuple[int, ...], outputs: int, tp: int, rank: int = 0, spec: ModelSpec = LLAMA) -> Cut | None:
    return cut_of(plan(spec)[name], shape, outputs, tp, rank)


def test_matrices_are_cut_along_outputs_inputs_or_words():
    block = "model.layers.*"
    assert cut(f"{block}.self_attn.q_proj", (48, 48), 0, 2, 1) == Cut("tp", 0, (48,), 2, index=1)
    assert cut(f"{block}.self_attn.o_proj", (48, 48), 0, 2, 1) == Cut("tp", 1, (48,), 2, index=1)
    assert cut(f"{block}.mlp.up_proj", (24, 48), 0, 2) == Cut("tp", 0, (24,), 2)
    assert cut(f"{block}.mlp.down_proj", (48, 24), 0, 2) == Cut("tp", 1, (24,), 2)
    assert cut("lm_head", (101, 48), 0, 4, 3) == Cut("tp", 0, (101,), 4, index=3)
    # GPT-2 stores its matrices the other way around, and q, k and v in one.
    block = "transformer.h.*"
    assert cut(f"{block}.attn.c_attn", (48, 144), 1, 2, 1, GPT2) == Cut("tp", 1, (48, 48, 48), 2, index=1)
    assert cut(f"{block}.attn.c_proj", (48, 48), 1, 2, 1, GPT2) == Cut("tp", 0, (48,), 2, index=1)


def test_biases_are_cut_with_columns_and_whole_with_rows():
    assert cut("transformer.h.*.attn.c_attn", (144,), 1, 3, 2, GPT2) == Cut("tp", 0, (48, 48, 48), 3, index=2)
    assert cut("transformer.h.*.attn.c_proj", (48,), 1, 3, 2, GPT2) is None
    assert cut("model.layers.*.mlp.up_proj", (24,), 0, 3, 2) == Cut("tp", 0, (24,), 3, index=2)
    assert cut("model.layers.*.mlp.down_proj", (48,), 0, 3, 2) is None


def test_key_value_heads_fewer_than_ranks_are_held_by_neighbours():
    name = "model.layers.*.self_attn.k_proj"
    assert [cut(name, (16, 48), 0, 12, rank) for rank in (0, 2, 3, 11)] == [
        Cut("tp", 0, (16,), 4, index=0, copies=3, copy=0),
        Cut("tp", 0, (16,), 4, index=0, copies=3, copy=2),
        Cut("tp", 0, (16,), 4, index=1, copies=3, copy=0),
        Cut("tp", 0, (16,), 4, index=3, copies=3, copy=2),
    ]


@pytest.mark.parametrize(
    "name", ["transformer.wpe", "dropout", "transformer.h.*.attn.core.dropout", "transformer.h.*.mlp_dropout"]
)
def test_what_is_whole(name):
    assert cut(name, (32, 48), 0, 2, 0, GPT2.model_copy(update={"attn_dropout": 0.1})) is None
    assert cut_of(Split("columns"), (8, 8), 0, 1) is None  # one rank cuts nothing


@pytest.mark.parametrize(
    ("split", "cut_", "sp", "over"),
    [
        (None, None, False, None),  # a norm: every rank has seen all
        (None, None, True, "tp"),  # its part of the sequence only
        (Split("rows"), None, False, None),  # a row bias
        (Split("rows"), None, True, "tp"),
        (Split("positions"), None, False, None),
        (Split("positions"), None, True, "tp"),
        (Split("heads"), None, False, "tp"),  # a norm of single heads has seen this rank's heads only
        (Split("heads"), None, True, "tp"),
        (Split("columns"), Cut("tp", 0, (8,), 4), False, None),
        (Split("columns"), Cut("tp", 0, (8,), 4), True, None),
        (Split("columns"), Cut("tp", 0, (8,), 2, copies=2), False, "tp.inner"),
        (Split("columns"), Cut("tp", 0, (8,), 2, copies=2), True, "tp.inner"),
        (Split("columns"), Cut("tp", 0, (8,), 1, copies=4), False, "tp"),  # one head, which all ranks hold
    ],
)
def test_over_whom_gradients_are_summed(split, cut_, sp, over):
    assert summed(split, (8, 8), cut_, sp) == over


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_heads_that_do_not_divide():
    assert refused(LLAMA, tp=5) == "layout.tp=5 does not divide 12 heads; use 1, 2, 4 or 12"
    assert refused(LLAMA, tp=24) == "layout.tp=24 does not divide 12 heads; use 1, 2, 4 or 12"


def test_key_value_heads_that_neither_divide_nor_are_divided():
    assert refused(LLAMA, tp=3) == "layout.tp=3 does not divide 4 key-value heads; use 1, 2, 4 or 12"
    assert refused(LLAMA, tp=6) == "layout.tp=6 does not divide 4 key-value heads; use 1, 2, 4 or 12"


def test_a_feed_forward_width_that_does_not_divide():
    odd = LLAMA.model_copy(update={"ffn": 26})
    assert refused(odd, tp=4) == "layout.tp=4 does not divide the feed-forward width 26; use 1 or 2"
    assert refused(odd.model_copy(update={"ffn": 25}), tp=2).endswith("the feed-forward width 25; use 1")


def test_a_sequence_that_does_not_divide():
    assert refused(LLAMA, 26, tp=4, sp=True) == (
        "layout.sp=true cuts sequences into tp=4 equal parts, and 26 tokens do not divide; "
        "use data.seq_len=28, sp=false or tp=2"
    )
    # No degree that would do, and 1 goes with no sp.
    assert refused(LLAMA, 25, tp=4, sp=True).endswith("use data.seq_len=28 or sp=false")


def test_learned_positions_are_not_exceeded_by_what_is_offered():
    assert refused(GPT2.model_copy(update={"max_seq": 31}), 31, tp=4, sp=True).endswith(
        "use data.seq_len=28 or sp=false"
    )
    assert refused(GPT2.model_copy(update={"max_seq": 3}), 3, tp=4, sp=True).endswith("use sp=false or tp=3")


def test_degrees_that_are_offered_divide_the_sequence_too():
    assert refused(LLAMA, 22, tp=5, sp=True) == "layout.tp=5 does not divide 12 heads; use 2"
    assert refused(LLAMA, 23, tp=5, sp=True) == "layout.tp=5 does not divide 12 heads; use 1 with sp=false"


@given(
    heads=st.integers(1, 12),
    kv=st.integers(1, 12),
    ffn=st.integers(1, 24),
    tp=st.integers(1, 13),
    sp=st.booleans(),
    seq_len=st.integers(1, 26),
)
def test_what_is_offered_is_accepted(heads, kv, ffn, tp, sp, seq_len):
    if heads % kv or (sp and tp == 1):
        return
    spec = LLAMA.model_copy(update={"heads": heads, "kv_heads": kv, "ffn": ffn, "hidden": 4 * heads})
    layout = Layout(dp=1, tp=tp, sp=sp)
    try:
        check(spec, layout, seq_len)
    except ValueError as error:
        offered = str(error).rpartition("; use ")[2]
    else:
        # Accepted: whole heads and units for everyone.
        assert heads % tp == 0 and ffn % tp == 0 and (kv % tp == 0 or tp % kv == 0)
        assert not sp or seq_len % tp == 0
        return
    for word in offered.replace(" or ", ", ").split(", "):
        if word.startswith("data.seq_len="):
            check(spec, layout, int(word.removeprefix("data.seq_len=")))
        elif word == "sp=false":
            check(spec, layout.model_copy(update={"sp": False}), seq_len)
        elif word == "1 with sp=false":
            check(spec, Layout(dp=1), seq_len)
        else:
            check(spec, Layout(dp=1, tp=int(word.removeprefix("tp=")), sp=sp), seq_len)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["layout.tp=3"], "layout.tp=3: layout.tp=3 does not divide 4 heads; use 1, 2 or 4"),
        (["model={heads: 6, kv_heads: 3, hidden: 96}", "layout.tp=2"], "3 key-value heads; use 1, 3 or 6"),
        (["model.ffn=42", "layout.tp=4"], "does not divide the feed-forward width 42; use 1 or 2"),
        (["layout={tp: 2, sp: true}", "data.seq_len=33"], "33 tokens do not divide; use data.seq_len=34 or sp=false"),
        (["layout.sp=true"], "sp=true goes beside tensor ranks; use tp=2 or more, or sp=false"),
        (["layout.tp=2", "compile=block"], "compile=block does not go with tp above 1; use compile=none, or tp=1"),
        (
            ["model={preset: gpt2-tiny, resid_dropout: 0.1}", "layout.tp=2", "dropout=torch"],
            "dropout=torch does not go with tp above 1",
        ),
    ],
    ids=lambda v: v[:30] if isinstance(v, str) else " ".join(v),
)
def test_refused_before_a_process_starts(overrides, words):
    with pytest.raises(UserError) as caught:
        load_run(None, overrides)
    assert str(caught.value).startswith("command line: ") and words in str(caught.value)


def test_a_layout_that_fits_is_loaded():
    run = load_run(None, ["layout={tp: 4, sp: true, dp: 2}", "data.seq_len=32"])
    assert run.layout.world == 8
