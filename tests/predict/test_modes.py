"""The ways to recompute side by side: the numbers of runs that use them, and what fits."""

import json
from typing import Any

import pytest

from meshwright.predict.memory import memory
from meshwright.predict.modes import COMPARED, fit, largest_micro, modes
from meshwright.predict.report import predict
from meshwright.spec.layout import Layout
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import Batch, Data, RunSpec

LARGE = RunSpec(
    model=PRESETS["llama3-8b"],
    precision="bf16",
    data=Data(seq_len=4096),
    batch=Batch(sequences=130, micro=2),
    layout=Layout(dp=64, zero=3),
)
RUNS = {
    "large": LARGE,
    "large, stage 0": LARGE.model_copy(update={"layout": Layout(dp=64)}),
    "gpt2, uneven parts": RunSpec(
        model=PRESETS["gpt2"],
        attention="explicit",
        batch=Batch(sequences=3, micro=8),
        layout=Layout(dp=2, zero=1),
        device="cpu",
    ),
    "fewer sequences than ranks": RunSpec(batch=Batch(sequences=3, micro=4), layout=Layout(dp=5, zero=2)),
    "another way": RunSpec(layout=Layout(dp=2, recompute="selective", recompute_keep=("softmax",))),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_mode_has_the_numbers_of_a_run_that_uses_it(run: RunSpec) -> None:
    found = modes(run, run.layout, capacity=10**9)
    ways = [mode.layout for mode in found]
    assert [{name: getattr(way, name) for name in fields} for way, fields in zip(ways, COMPARED, strict=False)] == list(
        COMPARED
    )
    assert [mode.layout for mode in found if mode.this_run] == [run.layout]
    for mode in found:
        foretold = predict(run.model_copy(update={"layout": mode.layout}))
        assert (mode.peak, mode.states) == (foretold.memory.total, foretold.memory.states)
        assert mode.recompute_share == foretold.flops.executed_per_step.recompute_share
        assert mode.fit == fit(run, mode.layout, 10**9)
        assert mode.fit.fits == (mode.peak <= 10**9)
    assert json.loads(json.dumps([mode.to_dict() for mode in found]))[1]["recompute"] == "full"


def test_modes_trade_memory_for_computation() -> None:
    none, full, every, selective, more = modes(LARGE, LARGE.layout)
    assert every.kept < full.kept < selective.kept < more.kept < none.kept
    assert full.peak < selective.peak < more.peak < none.peak
    assert 1 / 3 > every.recompute_share > full.recompute_share > selective.recompute_share > more.recompute_share == 0
    assert (none.every, every.every) == (1, 6)
    assert {mode.states for mode in (none, full, every, selective, more)} == {none.states}
    assert none.fit is None


def held(run: RunSpec, micro: int) -> int:
    sequences = max(run.batch.sequences, micro * run.layout.data_ranks)
    return memory(run.model_copy(update={"batch": Batch(sequences=sequences, micro=micro)}), run.layout, 0).total


@pytest.mark.parametrize("fields", COMPARED, ids=lambda fields: ", ".join(map(str, fields.values())))
@pytest.mark.parametrize("sequences", [1, 64])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_largest_micro_batch_is_the_largest_that_fits(fields: dict[str, Any], sequences: int, stage: int) -> None:
    run = RunSpec(batch=Batch(sequences=sequences, micro=2), layout=Layout(dp=2, zero=stage, **fields), device="cpu")
    by_micro = {micro: held(run, micro) for micro in range(1, 64)}
    for capacity in (25 * 10**6, 80 * 10**6, by_micro[31], by_micro[32], by_micro[33] - 1):
        by_trial = max((micro for micro, size in by_micro.items() if size <= capacity), default=0)
        assert by_trial < 63
        assert largest_micro(run, run.layout, capacity) == by_trial


def test_nothing_fits_where_the_states_do_not() -> None:
    run = RUNS["large, stage 0"]
    states = predict(run).memory.states
    assert fit(run, run.layout, states).largest_micro == 0
    assert not fit(run, run.layout, states).fits
