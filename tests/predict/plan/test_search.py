"""The search answers as if every layout that fits had been simulated."""

from itertools import product
from typing import Any

import pytest
from tests.predict.plan.cases import GPT2, LLAMA, cluster, run

from meshwright.predict.cost.parts import Parts
from meshwright.predict.cost.step import step_time
from meshwright.predict.modes import largest
from meshwright.predict.plan.capacity import allowance
from meshwright.predict.plan.search import Candidate, Result, Search
from meshwright.predict.plan.space import Space, run_of
from meshwright.spec.cluster import Cluster
from meshwright.spec.run import RunSpec

SMALL = 24 * 10**6  # bytes that some layouts of the small models need more than


def brute_force(asked: RunSpec, on: Cluster, usable: float, only: dict[str, Any]) -> list[float]:
    """Seconds of all layouts that fit, one by one by the predictors of single runs."""
    device = "cpu" if on.device.kind == "cpu" else "cuda"
    parts = Parts(asked.model, asked.data.seq_len, asked.precision, on, attention=asked.attention)
    found = []
    for grid in Space(asked, on, only).grids():
        for place in product(*map(range, grid.shape)):
            layout = grid.layout(place)
            candidate = run_of(asked, layout, grid.micro(place))
            if largest(candidate, layout, device).total <= usable:  # type: ignore[arg-type]
                found.append(step_time(candidate, layout, on, parts).seconds)
    return sorted(found)


CASES: list[tuple[RunSpec, Cluster, dict[str, Any]]] = [
    (run(LLAMA, 512, 4), cluster(2, 2), {"zero": 1, "recompute": "none"}),
    (run(LLAMA, 512, 8), cluster(1, 4, network=1e9), {"recompute": "none", "micro": 1}),
    (run(GPT2, 512, 12), cluster(2, 2), {"pp": 2, "sp": False, "zero": 2, "recompute": "full"}),
    (run(GPT2, 256, 6), cluster(2, 4), {"zero": 3, "cp": 1, "recompute": "selective"}),
    (run(LLAMA, 256, 8, precision="fp32", device="cpu"), cluster(1, 4, kind="cpu"), {"recompute": "none"}),
]


@pytest.mark.parametrize(("asked", "on", "only"), CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("usable", [SMALL, 10**12])
def test_equals_brute_force(asked: RunSpec, on: Cluster, only: dict[str, Any], usable: float) -> None:
    expected = brute_force(asked, on, usable, only)
    result = Search(asked, on, only=only, usable=usable, top=8).run_all()
    assert [candidate.seconds for candidate in result.best] == pytest.approx(expected[:8], rel=1e-9)
    for candidate in result.best:
        held = largest(run_of(asked, candidate.layout, candidate.micro), candidate.layout, Search(asked, on).device)
        assert held.total <= usable


def test_cores_that_ranks_share() -> None:
    on = cluster(1, 4, kind="cpu").model_copy(update={"cores": 2})
    asked, only = run(LLAMA, 256, 8, precision="fp32", device="cpu"), {"zero": 0, "recompute": "none"}
    result = Search(asked, on, only=only, usable=1e12, top=5).run_all()
    assert [each.seconds for each in result.best] == pytest.approx(brute_force(asked, on, 1e12, only)[:5], rel=1e-9)


def seconds(result: Result) -> list[float]:
    return [candidate.seconds for candidate in result.best]


def test_searches_do_not_disturb_each_other() -> None:
    ways = [(run(), cluster()), (run(GPT2), cluster(1, 8)), (run(), cluster(network=1e9))]
    alone = [seconds(Search(*way, top=3).run_all()) for way in ways]
    searches = [Search(*way, top=3) for way in ways]
    grids = [list(search.space.grids()) for search in searches]
    for step in range(max(map(len, grids))):  # a grid of each in turn
        for search, of_search in zip(searches, grids, strict=True):
            for grid in of_search[step : step + 1]:
                search._grid(grid)
    for search in searches:
        search._simulate()
    assert [seconds(search.result) for search in searches] == alone


def test_more_memory_never_fits_less_nor_slower() -> None:
    fitting, best = 0, float("inf")
    for usable in (5e6, 1e7, 2e7, 4e7, 1e9):
        result = Search(run(), cluster(), usable=usable, top=1).run_all()
        assert result.fitting >= fitting
        if result.best:
            assert result.best[0].seconds <= best * (1 + 1e-12)
            best = result.best[0].seconds
        fitting = result.fitting
    assert fitting and best < float("inf")


def test_faster_links_are_never_slower() -> None:
    times = [Search(run(), cluster(network=network), top=1).run_all().best[0].seconds for network in (1e8, 1e9, 1e10)]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


def test_cut_short_there_are_the_best_so_far() -> None:
    def stop(part: float, layouts: int) -> None:
        if part > 0.5:
            raise KeyboardInterrupt

    whole = Search(run(), cluster(), top=3).run_all()
    result = Search(run(), cluster(), top=3).run_all(stop)
    assert result.cut_short and not whole.cut_short
    assert 0 < result.layouts < whole.layouts
    assert len(result.best) == 3 and result.best[0].seconds >= whole.best[0].seconds


def test_progress_goes_to_the_end() -> None:
    told: list[float] = []
    result = Search(run(), cluster(), top=1).run_all(lambda part, layouts: told.append(part))
    assert told == sorted(told) and told[-1] == 1.0
    assert result.layouts == sum(
        int((grid.valid | [[[[False]]]]).sum() * grid.shape[2]) for grid in Space(run(), cluster()).grids()
    )


def test_where_nothing_fits_the_nearest_is_what_holds_least() -> None:
    search = Search(run(LLAMA, 512, 4), cluster(1, 2), usable=1e5)
    assert not search.run_all().best and not search.any_fits()
    nearest = search.nearest()
    assert isinstance(nearest, Candidate)
    every = [
        largest(run_of(search.run, grid.layout(place), grid.micro(place)), grid.layout(place), "cuda").total
        for grid in search.space.grids()
        for place in product(*map(range, grid.shape))
    ]
    assert nearest.held == min(every)


def test_the_allowance_is_left_to_others() -> None:
    device = cluster(memory=10 * 10**9).device
    mine = allowance(device)
    assert mine.usable(device.memory) < device.memory - mine.context
    assert mine.needed(mine.usable(device.memory)) == pytest.approx(device.memory)
