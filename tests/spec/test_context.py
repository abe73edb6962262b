"""Lengths, heads and options that context ranks cannot share are refused with what would do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.context import check, grain
from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.load import load_run
from meshwright.spec.model import ModelSpec
from meshwright.spec.sequence import positions

LLAMA = ModelSpec(family="llama", vocab=37, hidden=48, layers=2, heads=12, kv_heads=6, ffn=48, max_seq=64)
GPT2 = ModelSpec(family="gpt2", vocab=37, hidden=48, layers=2, heads=12, max_seq=31)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["layout.cp=4", "data.seq_len=2999"], "needs sequences that 8 divides, and 2999 tokens do not divide; use "
         "data.seq_len=3000 or fewer context ranks"),
        (["layout.cp=4", "data.seq_len=12"], "use data.seq_len=16, layout.cp_order=contiguous or striped or fewer"),
        (["layout={cp: 3, cp_order: striped}", "data.seq_len=13"], "use data.seq_len=15 or fewer context ranks"),
        (["layout={cp: 2, tp: 4, sp: true}", "data.seq_len=12"], "and sp over tp=4 needs sequences that 8 divides"),
        (["layout={cp: 3, cp_method: ulysses}", "data.seq_len=24"],
         "layout.cp=3 with cp_method=ulysses does not divide the 4 heads; use cp=2, cp=4 or cp_method=ring"),
        (["layout={cp: 2, tp: 4, cp_method: ulysses}"], "the 1 heads that each of tp=4 has; use cp_method=ring"),
        (["layout={cp: 16, cp_method: usp, cp_ulysses: 8}"], "layout.cp_ulysses=8 does not divide the 4 heads; use "
         "cp_ulysses=2, cp_ulysses=4 or cp_method=ring"),
        (["layout={cp: 4, cp_method: ulysses}", "model={heads: 8, kv_heads: 8}", "layout.tp=4"],
         "does not divide the 2 heads that each of tp=4 has; use cp=2 or cp_method=ring"),
        (["layout.cp=2", "compile=block"], "compile=block does not go with cp above 1; use compile=none, or cp=1"),
        (["layout.cp=2", "attention=explicit"], "attention=explicit does not go with cp above 1"),
        (["layout.cp=2", "model={preset: gpt2-tiny, resid_dropout: 0.1}", "dropout=torch"],
         "who holds which part; use dropout=counter"),
        (["layout.cp=2", "model={preset: gpt2-tiny, attn_dropout: 0.1}", "attention=explicit"],
         "model.attn_dropout=0.1 does not go with cp above 1"),
    ],
    ids=lambda v: v[-30:] if isinstance(v, str) else " ".join(v),
)  # fmt: skip
def test_refused_before_a_process_starts(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_run(None, overrides)
    assert str(caught.value).startswith("command line: ") and words in str(caught.value)


def test_learned_positions_are_not_exceeded_by_what_is_offered() -> None:
    """Of 31, and exactly as many as are asked for; none where the model has fewer. Others have no such end."""
    exactly, few = (GPT2.model_copy(update={"max_seq": most}) for most in (32, 7))
    longer = LLAMA.model_copy(update={"max_seq": 31})
    for spec, length, words in (
        (GPT2, 29, "use data.seq_len=24 or fewer context ranks"),
        (exactly, 29, "use data.seq_len=32 or fewer context ranks"),
        (few, 5, "use fewer context ranks"),
        (longer, 29, "use data.seq_len=32 or fewer context ranks"),
    ):
        with pytest.raises(ValueError, match=words):
            check(spec, Layout(dp=1, cp=4), length)


def test_key_value_heads_are_those_that_a_tensor_rank_has() -> None:
    """Six over two are three each; over six, one each; two over four, one that two ranks hold."""
    layout = Layout(dp=1, cp=2, tp=2, cp_method="ulysses")
    with pytest.raises(ValueError, match=r"cp=2 with .* does not divide the 3 key-value heads that each of tp=2 has"):
        check(LLAMA, layout, 24)
    for tp, kv_heads in ((2, 4), (6, 6), (4, 2)):
        ways = layout.model_copy(update={"tp": tp, "cp": 12 // tp})
        check(LLAMA.model_copy(update={"kv_heads": kv_heads}), ways.model_copy(update={"cp_order": "contiguous"}), 24)


@given(
    cp=st.sampled_from([1, 2, 3, 4, 6]),
    tp=st.sampled_from([1, 2, 3]),
    sp=st.booleans(),
    method=st.sampled_from(["ring", "ulysses", "usp"]),
    order=st.sampled_from(["contiguous", "zigzag", "striped"]),
    seq=st.integers(1, 40),
)
def test_what_is_accepted_can_be_shared(cp: int, tp: int, sp: bool, method: str, order: str, seq: int) -> None:
    """All ranks have as many tokens, also of sp's parts, and whole heads."""
    if cp == 1 or (sp and tp == 1):
        return
    if method == "usp" and cp < 4:
        return
    inner = {"cp_ulysses": 2} if method == "usp" else {}
    layout = Layout(dp=1, cp=cp, tp=tp, sp=sp, cp_method=method, cp_order=order, **inner)
    try:
        check(LLAMA, layout, seq)
    except ValueError as error:
        n, kv_heads = layout.head_ranks, -(-LLAMA.num_kv_heads // tp)
        assert seq % grain(layout) or (12 // tp) % n or (kv_heads % n and n % kv_heads), error
        return
    held = [len(positions(seq, cp, rank, order)) for rank in range(cp)]
    assert len(set(held)) == 1 and held[0] % (tp if sp else 1) == 0
    n, kv_heads = layout.head_ranks, -(-LLAMA.num_kv_heads // tp)
    assert (12 // tp) % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)


def test_a_layout_that_fits_is_loaded() -> None:
    run = load_run(None, ["layout={cp: 4, cp_method: usp, cp_ulysses: 2, tp: 2, sp: true, dp: 2}", "data.seq_len=32"])
    assert run.layout.world == 16 and grain(run.layout) == 8
