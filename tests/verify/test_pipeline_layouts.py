"""Pipelines held against the plain model on one device in float64, alone and with every other axis; traffic, states and
activations exact."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwright.predict.stages import schedule_of
from meshwright.schedule.actions import Action
from meshwright.schedule.files import write
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Data, RunSpec
from verify.proofs import prove, small_proof

UNTIED = ModelSpec(
    family="llama", vocab=37, hidden=16, layers=4, heads=4, kv_heads=2, ffn=24, max_seq=32, qk_norm=True, qkv_bias=True
)
TIED = ModelSpec(
    family="gpt2", vocab=37, hidden=16, layers=4, heads=4, max_seq=32, tied=True, embd_dropout=0.1, resid_dropout=0.1
)
MODELS = {"llama": UNTIED, "gpt2, tied": TIED, "llama, tied": UNTIED.model_copy(update={"tied": True})}
INTERLEAVED = {"pp": 2, "pp_schedule": "interleaved", "pp_chunks": 2}


def run_of(model: ModelSpec, layout: dict[str, Any], sequences: int = 7, **options: Any) -> RunSpec:
    """Micro-batches of two sequences, the last one of one."""
    packing = options.pop("packing", "none")
    return small_proof(model, Data(seq_len=16, packing=packing), sequences, layout, **options)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2, "pp_schedule": "naive"},
        {"pp": 2, "pp_schedule": "gpipe"},
        {"pp": 2},
        INTERLEAVED,
        {"pp": 4},
        {"pp": 3, "pp_split": (1, 1, 2)},
    ],
    ids=str,
)
def test_schedules(ranks, model, layout):
    prove(ranks, run_of(MODELS[model], layout))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", [{"pp": 2}, INTERLEAVED], ids=["1f1b", "interleaved"])
def test_data_ranks_reduce_each_stage(ranks, zero, layout):
    """Both tied copies get both parts of the gradient, and stay one. Data ranks have unequal parts, the second none of
    the last micro-batch."""
    prove(ranks, run_of(TIED, {**layout, "dp": 2, "zero": zero}, sequences=6 + zero % 2))


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2, "dp": 2, "zero": 3, "zero_gather": "step", "zero_ahead": 2},
        {"pp": 2, "dp": 3, "zero": 3, "order": ("pp", "dp", "cp", "tp")},
        {"pp": 2, "dp": 4, "zero": 2, "zero_shard": 2},
        {"pp": 2, "tp": 2, "zero": 1},
        {"pp": 2, "tp": 2, "sp": True, "dp": 2, "zero": 3},
        {"pp": 2, "cp": 2, "order": ("tp", "cp", "pp", "dp")},
        {**INTERLEAVED, "cp": 2, "cp_method": "ulysses", "cp_order": "contiguous", "zero": 2},
        {"pp": 2, "tp": 2, "sp": True, "cp": 2, "zero": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["llama", "llama, tied"])
def test_beside_other_axes(ranks, model, layout):
    prove(ranks, run_of(MODELS[model], layout))


@pytest.mark.parametrize("schedule", [{"pp": 2, "pp_schedule": "gpipe"}, {"pp": 2}, INTERLEAVED], ids=str)
@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute": "full"},
        {"recompute": "full", "recompute_every": 2},
        {"recompute": "selective", "recompute_keep": ("linear", "attention")},
    ],
    ids=str,
)
def test_recompute(ranks, schedule, recompute):
    prove(ranks, run_of(TIED, schedule | recompute))


@pytest.mark.parametrize("options", [{"loss": "chunked"}, {"packing": "documents"}, {"attention": "explicit"}], ids=str)
def test_options_of_the_model(ranks, options):
    prove(ranks, run_of(UNTIED, {"pp": 2, "dp": 2, "zero": 1}, **options))


def test_documents_over_context_ranks(ranks):
    """In flight are micro-batches of other documents."""
    prove(ranks, run_of(UNTIED, {"pp": 2, "cp": 2}, packing="documents"))


def test_a_micro_batch_for_nobody(ranks):
    """Fewer sequences than data ranks: one of two pipelines has nothing to do, and at ZeRO 3 it gathers."""
    for zero in (1, 3):
        prove(ranks, run_of(TIED, {"pp": 2, "dp": 2, "zero": zero}, sequences=1))


def test_a_schedule_of_ones_own(ranks, tmp_path):
    """1F1B, but the last rank takes its micro-batches backward in another order than the first sends them."""
    run = run_of(UNTIED, {"pp": 2, "pp_schedule": "gpipe"}, sequences=8)
    schedule = schedule_of(run, run.layout)
    swap = {0: 1, 1: 0}
    ranks_ = tuple(
        tuple(
            action._replace(micro=swap.get(action.micro, action.micro))
            if action.kind in ("backward", "send_gradients", "recv_gradients")
            else action
            for action in actions
        )
        for actions in schedule.ranks
    )
    assert Action("backward", 0, 1) in ranks_[0]
    path = tmp_path / "mine.json"
    write(type(schedule)("mine", schedule.stages, schedule.micros, ranks_), path)
    prove(ranks, run_of(UNTIED, {"pp": 2, "pp_schedule": str(path)}, sequences=8))
    for wrong, words in (
        ({"sequences": 6}, "has 4 micro-batches, .* makes 3; use batch.sequences=8"),
        ({"layout": {"pp": 4}}, "has 2 stages on 2 ranks; use pp=2 and pp_chunks=1"),
    ):
        other = run_of(
            UNTIED, {"pp": 2, "pp_schedule": str(path)} | wrong.pop("layout", {}), **{"sequences": 8} | wrong
        )
        with pytest.raises(UserError, match=words):
            schedule_of(other, other.layout)


AXES = st.sampled_from([(pp, tp, cp, dp) for pp in (2, 4) for tp in (1, 2) for cp in (1, 2) for dp in (1, 2)])


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(axes=AXES, data=st.data())
def test_any_layout_is_proven_or_refused_in_words(ranks, axes, data):
    pp, tp, cp, dp = axes
    draw = data.draw
    layout: dict[str, Any] = {"pp": pp, "tp": tp, "cp": cp, "dp": dp}
    if pp * tp * cp * dp > 8:
        return
    layout |= draw(st.sampled_from([{}, {"pp_schedule": "gpipe"}, {"pp_schedule": "interleaved", "pp_chunks": 2}]))
    layout |= {"zero": draw(st.sampled_from([0, 1, 2, 3])), "sp": draw(st.booleans())}
    layout |= draw(st.sampled_from([{}, {"recompute": "full"}, {"recompute": "selective"}]))
    layout["order"] = tuple(draw(st.permutations(["tp", "cp", "dp", "pp"])))
    model = MODELS[draw(st.sampled_from(sorted(MODELS)))]
    try:
        run = run_of(model, layout, sequences=draw(st.sampled_from([3, 5, 8])))
        schedule_of(run, run.layout)
    except (ValidationError, UserError) as refused:
        assert "use " in str(refused)
        return
    prove(ranks, run)
