"""The answer: figures of the best layouts, what would make a run fit, and why a layout is not the first."""

import pytest
from tests.predict.plan.cases import GPT2, LLAMA, cluster, run

from meshwright.predict.cost.step import step_time
from meshwright.predict.memory import memory
from meshwright.predict.modes import largest
from meshwright.predict.plan.answer import best_with, plan
from meshwright.predict.plan.asked import fields
from meshwright.predict.plan.explain import memory_lines, time_lines, why_not
from meshwright.predict.plan.scale import fewest_devices, fits, resized
from meshwright.predict.plan.space import run_of
from meshwright.spec.devices import cluster as named
from meshwright.spec.errors import UserError


def test_the_choices_have_the_predictors_figures() -> None:
    found = plan(run(GPT2), cluster(), top=6)
    assert len(found.choices) == 6
    for choice in found.choices:
        asked = run_of(found.run, choice.layout, choice.micro)
        assert choice.time.seconds == pytest.approx(step_time(asked, choice.layout, found.cluster).seconds)
        assert sum(choice.time.lines.values()) == pytest.approx(choice.time.seconds)
        assert choice.memory.total == largest(asked, choice.layout, "cuda").total
        assert choice.memory == memory(asked, choice.layout, choice.memory.rank, "cuda")
        assert sum(choice.held.values()) == choice.memory.total
        assert 0 < choice.time.utilisation <= 1 and choice.time.low < choice.time.seconds < choice.time.high
    assert found.chosen.layout == found.best.layout and found.chosen.batch.micro == found.best.micro
    assert "layouts that fit" in found.why


def test_days_are_tokens_over_their_rate() -> None:
    best = plan(run(), cluster()).best
    assert best.days(86400 * best.time.tokens_per_second) == pytest.approx(1)


def test_what_is_given_is_held() -> None:
    found = plan(run(), cluster(), only={"tp": 2, "pp": 2}, top=4)
    assert {(choice.layout.tp, choice.layout.pp) for choice in found.choices} == {(2, 2)}
    choice = best_with(run(), cluster(), {"tp": 2, "pp": 2})
    assert choice is not None and choice.layout == found.best.layout


def test_where_nothing_fits_each_change_would_do() -> None:
    model = LLAMA.model_copy(update={"hidden": 512, "ffn": 2048, "vocab": 32000})
    on = cluster(1, 2, memory=2_500_000_000)
    asked = run(model, 2048, 8)
    found = plan(asked, on)
    assert not found.choices and found.nearest is not None and not found.nearest.fits
    assert found.nearest.needed > found.nearest.capacity
    options = {change.option.split()[-1 if change.option.endswith("GB") else 0]: change for change in found.changes}
    assert "GB" in options
    for change in found.changes:
        if change.option == "loss=chunked":
            assert fits(asked.model_copy(update={"loss": "chunked"}), on)
        if change.option.startswith("--seq"):
            seq = int(change.option.split()[1])
            assert fits(run(model, seq, 8), on) and not fits(run(model, 2 * seq, 8), on)
        if change.option.endswith("devices"):
            devices = int(change.option.split()[0])
            assert fits(asked, resized(on, devices)) and not fits(asked, resized(on, devices - 2))
        if change.option.endswith("GB"):
            enough = found.nearest.needed + 10**6
            assert fits(asked, cluster(1, 2, memory=enough)) and not fits(
                asked, cluster(1, 2, memory=enough - 2 * 10**6)
            )


def test_the_fewest_devices_hold_it_and_no_fewer() -> None:
    asked = run(LLAMA.model_copy(update={"hidden": 512, "ffn": 2048}), 256, 64)
    on = cluster(1, 4, memory=2_100_000_000)
    devices = fewest_devices(asked, on)
    assert devices is not None and devices > 1
    assert fits(asked, resized(on, devices))
    before = devices - 1 if devices <= 4 else devices - 4
    assert not fits(asked, resized(on, before))
    assert fewest_devices(asked, cluster(1, 4, memory=10**11)) == 1


@pytest.mark.parametrize("devices", [1, 3, 4, 8, 40, 4096])
def test_a_resized_cluster_is_one(devices: int) -> None:
    on = resized(named("2x4xh100"), devices)
    assert type(on).model_validate(on.model_dump()).devices >= devices
    assert on.devices - devices < on.per_node


def test_why_a_layout_is_not_first() -> None:
    found = plan(run(GPT2), cluster(network=1e8))
    assert why_not(found.best, found.best) == "it is the first"
    far = best_with(run(GPT2), cluster(network=1e8), {"tp": 8})
    assert far is not None
    words = why_not(far, found.best)
    assert "sums over tensor ranks" in words and "longer" in words
    lines = {line.name: line for line in time_lines(far, found.best)}
    assert sum(line.more for line in lines.values()) == pytest.approx(far.time.seconds - found.best.time.seconds)
    assert {line.name for line in memory_lines(far, found.best)} >= {"states", "activations", "logits"}


def test_fields_as_they_are_typed() -> None:
    found = fields("tp=2, schedule=gpipe,sp=true,zero_shard=null", "--with", run(), cluster())
    assert found == {"tp": 2, "pp_schedule": "gpipe", "sp": True, "zero_shard": None}
    with pytest.raises(UserError, match="tp=3"):
        fields("tp=3", "--explain", run(), cluster())
    with pytest.raises(UserError, match="did you mean zero"):
        fields("zer=3", "--explain", run(), cluster())
    with pytest.raises(UserError, match="no layout on 8 devices"):
        fields("micro=7", "--explain", run(), cluster())
