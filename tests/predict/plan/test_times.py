"""The bound is never above what predict/cost/step.py simulates, and is near it."""

import random

import numpy as np
import pytest
from tests.predict.plan.cases import GPT2, LLAMA, cluster, run

from meshwright.predict.cost.parts import Parts
from meshwright.predict.cost.step import step_time
from meshwright.predict.plan.search import Search
from meshwright.predict.plan.space import Space, run_of
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import ModelSpec


@pytest.mark.parametrize("stack", ["default", "megatron-2021", "megatron-core"])
@pytest.mark.parametrize("network", [1e9, 1e11])
@pytest.mark.parametrize("model", [GPT2, LLAMA])
def test_no_layout_is_faster_than_its_bound(model: ModelSpec, network: float, stack: str) -> None:
    on: Cluster = cluster(network=network).model_copy(update={"stack": stack})
    asked, picks = run(model), random.Random(7)
    search = Search(asked, on)
    parts = Parts(model, 1024, "bf16", on)
    grids = list(Space(asked, on).grids())
    near = []
    for grid in (picks.choice(grids) for _ in range(25)):
        place = tuple(picks.randrange(size) for size in grid.shape)
        bound = search.bounds(grid, [(place[2], place[3])])[place[0], place[1], 0]
        layout = grid.layout(place)  # type: ignore[arg-type]
        exact = step_time(run_of(asked, layout, grid.micros[place[3]]), layout, on, parts).seconds
        assert bound <= exact * (1 + 1e-9), layout
        (simulated,) = search.simulated([(grid, place)])  # type: ignore[list-item]
        assert simulated == pytest.approx(exact, rel=1e-12), layout
        near.append(bound / exact)
    assert np.median(near) > 0.97
