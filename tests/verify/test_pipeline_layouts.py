"""Pipelines held against the plain model on one device in float64, alone and with every other axis; traffic, states and
activations exact."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwright.parallel.flat import Unit
from meshwright.parallel.partial import PartialSums
from meshwright.parallel.pipeline import Pipeline
from meshwright.parallel.zero import Sharded
from meshwright.predict.stages import schedule_of
from meshwright.schedule.actions import Action
from meshwright.schedule.files import write
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Data, RunSpec
from meshwright.train.passes import TrainingPasses
from meshwright.verify.judge import judge
from verify.proofs import STEPS, alone, evidence, on_ranks, prove, prove_each, small_proof

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
def test_schedules(ranks, layout):
    prove_each(ranks, [run_of(model, layout) for model in MODELS.values()])


@pytest.mark.parametrize("layout", [{"pp": 2}, INTERLEAVED], ids=["1f1b", "interleaved"])
def test_data_ranks_reduce_each_stage(ranks, layout):
    """Both tied copies get both parts of the gradient, and stay one. Data ranks have unequal parts, the second none of
    the last micro-batch."""
    prove_each(ranks, [run_of(TIED, {**layout, "dp": 2, "zero": zero}, sequences=6 + zero % 2) for zero in range(4)])


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2, "dp": 2, "zero": 3, "zero_gather": "step", "zero_ahead": 2},
        {"pp": 2, "dp": 3, "zero": 3, "order": ("pp", "dp", "cp", "tp")},
        {"pp": 2, "dp": 4, "zero": 2, "zero_shard": 2},
        {"pp": 2, "tp": 2, "zero": 1},
        {"pp": 2, "cp": 2, "order": ("tp", "cp", "pp", "dp")},
        {**INTERLEAVED, "cp": 2, "cp_method": "ulysses", "cp_order": "contiguous", "zero": 2},
    ],
    ids=str,
)
def test_beside_other_axes(ranks, layout):
    prove_each(ranks, [run_of(MODELS[model], layout) for model in ("llama", "llama, tied")])


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama, tied", {"pp": 2, "tp": 2, "sp": True, "dp": 2, "zero": 3}),
        ("llama", {"pp": 2, "tp": 2, "sp": True, "cp": 2, "zero": 3}),
    ],
    ids=str,
)
def test_beside_two_other_axes(ranks, model, layout):
    prove(ranks, run_of(MODELS[model], layout))


@pytest.mark.parametrize("schedule", [{"pp": 2, "pp_schedule": "gpipe"}, {"pp": 2}, INTERLEAVED], ids=str)
def test_recompute(ranks, schedule):
    recomputed = [
        {"recompute": "full"},
        {"recompute": "full", "recompute_every": 2},
        {"recompute": "selective", "recompute_keep": ("linear", "attention")},
    ]
    prove_each(ranks, [run_of(TIED, schedule | recompute) for recompute in recomputed])


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


# -- planted faults ---------------------------------------------------------------------------------------------------


def never_summed(mesh):
    """The two copies of a tied table keep their own gradients."""
    return mock.patch.object(PartialSums, "sums", lambda self, units: units)


def counted_by_both(mesh):
    """Both copies enter the norm."""
    counted = Unit.counted
    return mock.patch.object(
        Unit, "counted", lambda self, shard: [shard] if "tied" in self.name else counted(self, shard)
    )


def last_micro_batch_only(mesh):
    """A stage starts its gradients anew in every micro-batch."""
    backward = Sharded.backward

    def wrong(self, index, *, last):
        for unit in self.units:
            if unit.gradients is not None:
                unit.gradients.zero_()
        backward(self, index, last=last)

    return mock.patch.object(Sharded, "backward", wrong)


def another_micro_batchs_targets(mesh):
    """The last stage takes what comes for another micro-batch than it is of."""
    forward = TrainingPasses.forward
    last = mesh.coords["pp"] == mesh.sizes["pp"] - 1
    return mock.patch.object(
        TrainingPasses,
        "forward",
        lambda self, stage, micro, hidden: forward(self, stage, micro ^ 1 if last else micro, hidden),
    )


def a_message_too_many(mesh):
    end = Pipeline._end

    def wrong(self):
        end(self)
        self.mesh.ledger.record("send", "pp", "pp.activations", "forward", 0, 2, 64)

    return mock.patch.object(Pipeline, "_end", wrong)


def outputs_kept(mesh):
    """Stages keep their outputs, as if they were asked for."""
    forward = Pipeline._forward

    def wrong(self, stage, micro, passes):
        forward(self, stage, micro, passes)
        self.mesh.kept = [*getattr(self.mesh, "kept", []), self._flights[stage, micro].output]

    return mock.patch.object(Pipeline, "_forward", wrong)


FAULTS = {
    never_summed: "gradient differs after step 1",
    counted_by_both: "gradient norm",
    last_micro_batch_only: "gradient differs after step 1",
    another_micro_batchs_targets: "gradient differs after step 1",
    a_message_too_many: "traffic: send over pp, pp.activations",
    outputs_kept: "holds beside what it declares",
}


def faulty(mesh, run, fault):
    with globals()[fault](mesh):
        return evidence(mesh, run)


@pytest.mark.parametrize(("fault", "words"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_planted_faults_are_found_and_named(ranks, fault, words):
    run = run_of(TIED, {"pp": 2, "pp_schedule": "gpipe"}, sequences=8)
    report = judge(run, STEPS, on_ranks(ranks, run, faulty, fault.__name__), alone(run))
    assert not report.passed
    assert any(words in finding for finding in report.findings), report.findings
