"""A step's time: what must hold of it whatever the constants are, and what each line is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwright.predict.cost.constants import STACKS
from meshwright.predict.cost.operators import strides
from meshwright.predict.cost.step import StepTime, step_time
from meshwright.predict.flops import utilisation
from meshwright.predict.params import count
from meshwright.spec.cluster import Cluster
from meshwright.spec.devices import cluster as named
from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import RunSpec

GPT = ModelSpec(family="gpt2", vocab=1024, hidden=512, layers=8, heads=8, max_seq=256)
LLAMA = ModelSpec(family="llama", vocab=1024, hidden=512, layers=8, heads=8, kv_heads=4, ffn=1024, max_seq=256)
SMALL = named("2x8xa100")


def run_of(model: ModelSpec, layout: dict[str, Any], batch: int = 16, micro: int = 1, **fields: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": model.model_dump(),
            "data": {"seq_len": fields.pop("seq", 256)},
            "batch": {"sequences": batch, "micro": micro},
            "layout": layout,
            "precision": "bf16",
        }
        | fields
    )


def predicted(layout: dict[str, Any], cluster: Cluster = SMALL, model: ModelSpec = GPT, **fields: Any) -> StepTime:
    run = run_of(model, layout, **fields)
    return step_time(run, run.layout.resolve(None), cluster)


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Those that SMALL's sixteen devices take."""
    tp, cp, pp = (draw(st.sampled_from((1, 2, 4))) for _ in range(3))
    assume(tp * cp * pp <= 16)
    dp = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if tp * cp * pp * n <= 16]))
    layout: dict[str, Any] = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "zero": draw(st.integers(0, 3))}
    layout["sp"] = tp > 1 and draw(st.booleans())
    layout["recompute"] = draw(st.sampled_from(("none", "full", "selective")))
    if pp > 1:
        layout["pp_schedule"] = draw(st.sampled_from(("1f1b", "gpipe", "naive", "interleaved")))
        if layout["pp_schedule"] == "interleaved":
            layout["pp_chunks"] = 2
    if cp > 1:
        layout["cp_method"] = draw(st.sampled_from(("ring", "gather", "ulysses")))
    layout["order"] = draw(st.permutations(("tp", "cp", "dp", "pp")))
    return layout


@given(
    layout=layouts(), model=st.sampled_from((GPT, LLAMA)), micro=st.sampled_from((1, 2)),
    stack=st.sampled_from(sorted(STACKS)),
)  # fmt: skip
def test_time_is_positive_and_told_whole(layout: dict[str, Any], model: ModelSpec, micro: int, stack: str) -> None:
    cluster = SMALL.model_copy(update={"stack": stack})
    try:
        found = predicted(layout, cluster, model, micro=micro)
    except ValidationError:  # ulysses with too few heads
        assume(False)
    assert found.seconds > 0
    assert 0 < found.utilisation <= 1
    assert found.low < found.seconds < found.high
    assert sum(found.lines.values()) == pytest.approx(found.seconds)
    assert all(time >= 0 for time in found.lines.values()), found.lines
    assert found.tokens_per_second == pytest.approx(16 * 256 / found.seconds)


@given(layout=layouts(), what=st.sampled_from(("flops", "bandwidth", 0, 1)), factor=st.sampled_from((1.1, 2.0, 50.0)))
def test_faster_is_never_slower(layout: dict[str, Any], what: str | int, factor: float) -> None:
    if isinstance(what, int):
        links = list(SMALL.links)
        links[what] = links[what].model_copy(update={"bandwidth": links[what].bandwidth * factor, "latency": 0.0})
        faster = SMALL.model_copy(update={"links": tuple(links)})
    else:
        device = SMALL.device
        change: dict[str, Any] = {"bandwidth": device.bandwidth * factor}
        if what == "flops":
            rates = {name: rate * factor for name, rate in device.flops.model_dump().items()}
            change = {"flops": type(device.flops)(**rates)}
        faster = SMALL.model_copy(update={"device": device.model_copy(update=change)})
    try:
        before = predicted(layout).seconds
    except ValidationError:
        assume(False)
    assert predicted(layout, faster).seconds <= before * (1 + 1e-9)


def test_utilisation_is_the_models_own() -> None:
    found = predicted({"dp": 8})
    rate = found.tokens_per_second / 8
    assert found.utilisation == pytest.approx(utilisation(GPT, 256, rate, SMALL.device.flops["bf16"]))


def test_axes_over_a_nodes_edge_are_charged_for_the_network() -> None:
    """Tensor ranks within the node, or four of eight in each, with as many adapters: 95 of 231 GB/s. Data ranks the
    other way round: neighbours, or each with an adapter of its own. So with context ranks."""
    for axis, line in (("tp", "tp"), ("cp", "cp")):
        big: dict[str, Any] = {"model": PRESETS["llama2-7b"], "seq": 4096}
        method = {"cp_method": "gather"} if axis == "cp" else {}
        within = predicted({axis: 8, "dp": 2, "order": ("tp", "cp", "dp", "pp"), **method}, **big)
        between = predicted({axis: 8, "dp": 2, "order": ("dp", "tp", "cp", "pp"), **method}, **big)
        assert between.lines[line] > 2 * within.lines[line], axis
        assert between.lines["zero.reduce"] < within.lines["zero.reduce"] / 2 or axis == "cp"


def test_strides_follow_the_order() -> None:
    layout = Layout(tp=2, cp=3, dp=4, pp=5, order=("dp", "tp", "pp", "cp"))
    assert strides(layout) == {"dp": 1, "tp": 4, "pp": 8, "cp": 40}


def test_recompute_costs_what_its_line_says() -> None:
    none, full = predicted({"dp": 1}), predicted({"dp": 1, "recompute": "full"})
    assert none.lines["recompute"] == 0
    forward = none.lines["compute"] / 3
    assert 0.5 * forward < full.lines["recompute"] < forward * 1.2
    assert full.lines["compute"] == pytest.approx(none.lines["compute"])


def test_the_bubble_is_the_schedules() -> None:
    """Even stages, and messages and reductions that nearly take no time: (p − 1)/(m + p − 1)."""
    spec = PRESETS["llama2-7b"]
    device = named("h100").device
    links = [link.model_copy(update={"bandwidth": 1e20, "latency": 0.0}) for link in named("1x8xh100").links]
    fast = Cluster(
        device=device, nodes=1, per_node=8, links=tuple(links),
        constants={"collective": 0.0, "send": 0.0, "host": 0.0, "host_backward": 0.0, "host_step": 0.0},
    )  # fmt: skip
    spec = spec.model_copy(update={"vocab": 8})
    found = predicted({"dp": 1, "pp": 4, "pp_split": "layers"}, fast, spec, batch=8, seq=2048)
    assert found.lines["bubble"] / (found.seconds - found.lines["optimizer"]) == pytest.approx(3 / 11, rel=0.01)


def test_more_devices_than_there_are() -> None:
    with pytest.raises(UserError, match="32 ranks on 16 devices"):
        predicted({"dp": 32}, batch=32)


def test_a_million_devices_and_a_quadrillion_parameters_do_not_overflow() -> None:
    model = ModelSpec(
        family="llama", vocab=10**6, hidden=2**18, layers=130, heads=1000, head_dim=256, ffn=10**7, max_seq=8192
    )
    assert count(model) > 1e15
    layout = {"tp": 1000, "pp": 10, "dp": 100, "zero": 3, "pp_split": "layers"}
    found = predicted(layout, named("125000x8xh100"), model, batch=10_000, seq=8192)
    assert 0 < found.utilisation < 1
    assert found.seconds > 1


def test_small_models_wait_for_the_host() -> None:
    slow = SMALL.model_copy(update={"constants": {"host": 1e-3, "host_backward": 1e-3}})
    found = predicted({"dp": 1}, slow)
    assert found.lines["host"] > 0.9 * (found.seconds - found.lines["optimizer"])
    assert found.lines["compute"] == pytest.approx(predicted({"dp": 1}).lines["compute"])


def test_what_the_stack_sends_beside_computing_is_not_charged() -> None:
    """Megatron-LM of 2021 reduces behind backward, and waits for each message; the default does neither."""
    layout = {"dp": 4, "pp": 2}
    exposed = predicted(layout, SMALL.model_copy(update={"constants": {"overlap_reduce": False}}))
    hidden = predicted(layout)
    assert exposed.lines["zero.reduce"] > hidden.lines["zero.reduce"]
    waiting = predicted(layout, SMALL.model_copy(update={"constants": {"overlap_message": False}}))
    assert waiting.lines["pp"] > 0 == pytest.approx(hidden.lines["pp"])


def test_zero_3_gathers_in_every_micro_batch_or_once() -> None:
    often = predicted({"dp": 8, "zero": 3}, batch=64)
    once = predicted({"dp": 8, "zero": 3, "zero_gather": "step"}, batch=64)
    assert often.lines["zero.gather"] > 0 == once.lines["zero.gather"]
    assert once.lines["zero.publish"] > 0 == often.lines["zero.publish"]


@pytest.mark.parametrize("chunks", [2, 4])
def test_a_rank_updates_all_of_its_stages_once(chunks: int) -> None:
    few = predicted({"pp": 2, "dp": 1}, batch=8)
    many = predicted({"pp": 2, "dp": 1, "pp_schedule": "interleaved", "pp_chunks": chunks}, batch=8)
    assert many.lines["optimizer"] == pytest.approx(few.lines["optimizer"], rel=0.2)
