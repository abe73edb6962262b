"""What a block waits for, and what a rank holds."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.predict.cost.operators import Product
from meshwright.predict.cost.parts import Parts, Shard
from meshwright.predict.params import count
from meshwright.predict.tensor import reissued
from meshwright.spec.cluster import Cluster
from meshwright.spec.devices import cluster
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.presets import PRESETS

GPT, LLAMA = PRESETS["gpt3-175b"], PRESETS["llama3-8b"]
DROPS = GPT.model_copy(update={"resid_dropout": 0.1})


def parts(model: ModelSpec = GPT, on: Cluster | None = None, **constants: Any) -> Parts:
    on = on or cluster("8x8xh100")
    exposed = {"overlap_tensor": 0.0, "overlap_tensor_backward": 0.0}
    return Parts(model, 2048, "bf16", on.model_copy(update={"constants": exposed | constants}))


@pytest.mark.parametrize("model", [GPT, DROPS], ids=["gpt", "drops"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_a_blocks_tensor_collectives_are_those_of_the_ledger(model: ModelSpec, recompute: Any) -> None:
    costs, shard = parts(model), Shard(tp=8, recompute=recompute)
    each = float(costs.collective("all_reduce", 2048 * 12288 * 2, 8))
    again = reissued(model, Layout(dp=1, tp=8, recompute=recompute))
    expected = 4 + sum(again.values()) / model.layers
    assert costs.block(shard).lines["tp"] == pytest.approx(expected * each)
    part = float(costs.collective("all_gather", 2048 * 12288 * 2, 8))
    sp = 10 + (2 + sum(again.values()) / model.layers) * (recompute == "full")
    assert costs.block(shard._replace(sp=True)).lines["tp"] == pytest.approx(sp * part)


def test_regions_of_several_blocks_spare_their_last_product_only() -> None:
    """By collectives, which the ledger counts, and by what is computed: each second block's product and sum."""
    layout = Layout(dp=1, tp=8, recompute="full", recompute_every=2)
    costs, shard = parts(GPT), Shard.of(layout, 1, GPT.layers)
    assert shard.region == 2
    each = float(costs.collective("all_reduce", 2048 * 12288 * 2, 8))
    expected = 4 + sum(reissued(GPT, layout).values()) / GPT.layers
    found, alone = costs.block(shard), costs.block(shard._replace(region=1))
    assert found.lines["tp"] == pytest.approx(expected * each)
    down = costs.seconds(Product(1, 2048, 12288, 4 * 12288 // 8))
    more = found.lines["recompute"] - alone.lines["recompute"]
    assert down / 2 < more < 1.2 * down / 2, "the residual's sum behind it, too"
    assert sum(found.lines.values()) == pytest.approx(found.forward + found.backward + found.recompute)


def test_lines_are_the_whole_of_a_block() -> None:
    for shard in (Shard(), Shard(tp=8, sp=True, recompute="full"), Shard(tp=2, cp=4, recompute="selective", micro=2)):
        block = parts(LLAMA).block(shard)
        assert sum(block.lines.values()) == pytest.approx(block.forward + block.backward + block.recompute)


def test_hidden_collectives_are_not_waited_for() -> None:
    shown, hidden = (parts(**how).block(Shard(tp=8)).lines["tp"] for how in ({}, {"overlap_tensor_backward": 0.5}))
    assert hidden == pytest.approx(shown * (2 + 2 / 2) / 4)
    assert parts(overlap_tensor=0.5).block(Shard(tp=8)).lines["tp"] == pytest.approx(shown / 2)


def test_a_rings_messages_go_under_its_computing() -> None:
    """Where attention takes longer than its messages they cost nothing; over a slow network what is left of them."""
    one = cluster("8xh100")
    slow = one.model_copy(update={"links": (one.links[0].model_copy(update={"bandwidth": 1e8}),)})
    long = PRESETS["llama3-8b"].model_copy(update={"max_seq": 1 << 17})
    fast, waits = (
        Parts(long, 1 << 16, "bf16", on.model_copy(update={"constants": {"contention": 0.0}})).block(Shard(cp=8))
        for on in (one, slow)
    )
    assert fast.lines["cp"] == 0
    assert waits.lines["cp"] > 0
    assert waits.lines["compute"] == fast.lines["compute"]


def test_context_ranks_share_the_work() -> None:
    long = PRESETS["llama3-8b"].model_copy(update={"max_seq": 1 << 17})
    costs = Parts(long, 1 << 16, "bf16", cluster("8xh100"))
    assert costs.block(Shard(cp=8)).lines["compute"] == pytest.approx(
        costs.block(Shard()).lines["compute"] / 8, rel=0.05
    )


@pytest.mark.parametrize("model", [GPT, LLAMA, PRESETS["gpt2"]], ids=["gpt3", "llama", "gpt2"])
def test_parameters_add_up_to_the_models(model: ModelSpec) -> None:
    before, inside, after = parts(model).parameters(1)
    tied_twice = model.vocab * model.hidden if model.is_tied else 0
    assert before + model.layers * inside + after == count(model) + tied_twice


def test_devices_that_straggle_hold_everybody_up() -> None:
    alone, many = (parts(on=cluster(name), straggle=0.1).block(Shard(micro=8)) for name in ("1x1xh100", "2x8xh100"))
    assert alone.forward < many.forward < 1.4 * alone.forward


def test_updates_go_by_bytes() -> None:
    costs = parts()
    took = float(costs.optimizer(1e9)) - float(costs.optimizer(0))
    device, constants = costs.cluster.device, costs.constants
    assert took == pytest.approx(1e9 * constants.update_bytes / (device.bandwidth * constants.update))
