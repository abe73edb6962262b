"""What is tried: all that a run would take on a cluster, and nothing else."""

import itertools
import random

import numpy as np
import pytest
from pydantic import ValidationError
from tests.predict.plan.cases import GPT2, LLAMA, checked, cluster, run

from meshwright.predict.plan.space import LEAST_TOKENS, Mesh, Pipe, Sharding, Space
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec, divisors


@pytest.mark.parametrize("model", [GPT2, LLAMA])
def test_a_run_takes_every_layout(model: ModelSpec) -> None:
    asked, picks = run(model), random.Random(1)
    for grid in Space(asked, cluster()).grids():
        place = tuple(picks.randrange(size) for size in grid.shape)
        layout = grid.layout(place)  # type: ignore[arg-type]
        assert layout.world == 8
        checked(asked, layout)
        assert grid.steps[place[3]] * grid.micros[place[3]] == -(-24 // layout.data_ranks)


@pytest.mark.parametrize("model", [GPT2, LLAMA])
def test_no_mesh_that_a_run_takes_is_left_out(model: ModelSpec) -> None:
    asked = run(model)
    tried = {(mesh.tp, mesh.cp, mesh.dp, mesh.pp) for mesh in Space(asked, cluster()).meshes()}
    for tp, cp, pp in itertools.product(divisors(8), repeat=3):
        if 8 % (tp * cp * pp) or asked.data.seq_len < cp * LEAST_TOKENS:
            continue
        dp = 8 // (tp * cp * pp)
        try:
            checked(asked, Layout(tp=tp, cp=cp, dp=dp, pp=pp))
        except ValidationError:
            assert (tp, cp, dp, pp) not in tried
        else:
            assert (tp, cp, dp, pp) in tried


def test_what_ranks_lie_near_each_other_is_tried_where_it_changes_their_links() -> None:
    orders = {mesh.order for mesh in Space(run(), cluster()).meshes() if (mesh.tp, mesh.pp, mesh.dp) == (2, 2, 2)}
    assert len(orders) == 2
    on_one_node = {mesh.order for mesh in Space(run(), cluster(1, 8)).meshes()}
    assert len(on_one_node) == 1


def test_shards_are_tried_within_a_node() -> None:
    grids = {grid.mesh: grid for grid in Space(run(), cluster()).grids()}
    assert {each.shard for each in grids[Mesh(2, 1, 4, 1)].shardings} == {None, 2}
    assert {each.shard for each in grids[Mesh(4, 1, 2, 1)].shardings} == {None}  # one rank of each in a node
    assert grids[Mesh(8, 1, 1, 1)].shardings == (Sharding(0),)  # nobody to share with


def test_fields_that_are_given_are_held() -> None:
    only = {"tp": 2, "zero": 1, "pp_schedule": "interleaved", "micro": 3}
    grids = list(Space(run(), cluster(), only).grids())
    assert grids
    for grid in grids:
        assert grid.mesh.tp == 2 and grid.micros == (3,)
        assert {each.zero for each in grid.shardings} == {1} and {pipe.schedule for pipe in grid.pipes} == {
            "interleaved"
        }
    with pytest.raises(ValueError, match="ep is not searched over"):
        Space(run(), cluster(), {"ep": 2})


def test_too_many_micro_batches_are_masked_out() -> None:
    """What predict/traffic.py refuses, and schedules that are too long to list."""
    grid = next(iter(Space(run(sequences=40_000), cluster(1, 2), {"pp": 1, "tp": 1, "cp": 1}).grids()))
    valid = np.broadcast_to(grid.valid, grid.shape)
    steps, zero = np.array(grid.steps), np.array([each.zero for each in grid.shardings])
    assert not valid[:, zero >= 2][..., steps > 10_000].any()
    assert valid[:, zero < 2].all() and valid[..., steps <= 10_000].all()
    deep = next(iter(Space(run(sequences=2_000_000), cluster(1, 2), {"pp": 2}).grids()))
    assert not deep.valid[deep.pipes.index(Pipe()), 0, 0, deep.micros.index(1)]


def test_a_million_ranks_and_many_parameters_do_not_overflow() -> None:
    huge = ModelSpec(family="llama", vocab=10**6, hidden=2**20, layers=96, heads=4096, ffn=2**22, max_seq=4096)
    meshes = list(Space(run(huge, 4096, 10**6), cluster(125_000, 8), {"micro": 1}).meshes())
    assert len(meshes) > 300
    assert all(mesh.tp * mesh.cp * mesh.dp * mesh.pp == 10**6 for mesh in meshes)
