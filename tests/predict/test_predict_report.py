"""The whole prediction of a run as data."""

import json

import pytest

from meshwright.predict.memory import memory
from meshwright.predict.report import predict
from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.run import Batch, RunSpec


def test_the_demo_run() -> None:
    prediction = predict(RunSpec())
    assert prediction.layout.world == 2
    assert prediction.parameters.total == sum(prediction.parameters.units.values()) == 1_220_000
    assert prediction.tokens_per_step == 32 * 256
    assert prediction.micro_batches == 4
    assert prediction.idle_ranks == ()
    assert prediction.wire_per_step == 4 * 1_220_000 + 24


def test_uneven_parts_report_the_rank_that_holds_most() -> None:
    run = RunSpec(batch=Batch(sequences=3, micro=4), layout=Layout(dp=2))
    prediction = predict(run)
    assert (prediction.memory.rank, prediction.memory.sequences) == (0, 2)
    assert prediction.memory.total > memory(run, prediction.layout, 1).total


def test_ranks_without_a_sequence_are_named() -> None:
    prediction = predict(RunSpec(batch=Batch(sequences=3, micro=4)), ranks=5)
    assert prediction.idle_ranks == (3, 4)
    assert (prediction.memory.rank, prediction.memory.sequences) == (0, 1)


def test_the_ranks_are_not_gone_through_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    plain = memory
    monkeypatch.setattr(
        "meshwright.predict.report.memory",
        lambda run, layout, rank, device: asked.append(rank) or plain(run, layout, rank, device),
    )
    for sequences, ranks, expected in ((7, 1000, [0, 7]), (7, 3, [0, 1]), (6, 3, [0]), (5, 3, [0, 2])):
        asked.clear()
        prediction = predict(RunSpec(batch=Batch(sequences=sequences, micro=4)), ranks=ranks)
        assert asked == expected
        assert prediction.idle_ranks == tuple(range(sequences, ranks))
    for order, second in ((("tp", "cp", "dp", "pp"), 4), (("dp", "tp", "cp", "pp"), 2)):  # data ranks 0 and 2
        asked.clear()
        predict(RunSpec(batch=Batch(sequences=5, micro=4), layout=Layout(dp=3, tp=2, order=order)))
        assert asked == [0, second]


def test_flops_are_those_of_all_tokens_whatever_the_ranks() -> None:
    one, four = (predict(RunSpec(layout=Layout(dp=n))).flops for n in (1, 4))
    assert one == four
    assert one.model_per_step == one.model_per_token * 32 * 256
    assert one.executed_per_step.total > one.model_per_step  # the fused attention's full square and recomputation


def test_json_has_totals_beside_parts() -> None:
    data = json.loads(json.dumps(predict(RunSpec()).to_dict()))
    assert data["ranks"] == 2
    assert data["layout"]["dp"] == 2
    assert data["memory"]["total"] == sum(data["memory"]["categories"].values())
    assert data["traffic"][0]["reason"] == "zero.reduce"
    assert data["wire_per_step"] == sum(row["wire"] for row in data["traffic"])
    assert data["flops"]["executed_per_step"]["total"] == sum(
        data["flops"]["executed_per_step"][k] for k in ("forward", "backward", "recompute")
    )


def test_recompute_is_executed_and_never_utilisation() -> None:
    plain = predict(RunSpec()).flops
    again = predict(RunSpec(layout=Layout(recompute="full"))).flops
    assert again.model_per_step == plain.model_per_step
    executed = again.executed_per_step
    assert (executed.forward, executed.backward) == (plain.executed_per_step.forward, plain.executed_per_step.backward)
    assert executed.total == plain.executed_per_step.total + executed.recompute
    assert 0.2 < executed.recompute_share < 1 / 3
    data = predict(RunSpec(layout=Layout(recompute="full"))).to_dict()
    assert data["flops"]["executed_per_step"]["recompute_share"] == executed.recompute_share


def test_a_layout_that_does_not_fit_the_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="is not the number of ranks, 3"):
        predict(RunSpec(layout=Layout(dp=2)), ranks=3)
