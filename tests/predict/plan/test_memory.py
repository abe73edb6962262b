"""Memory as arrays is that of predict/memory.py, layout by layout."""

import random
from typing import Any

import numpy as np
import pytest
from tests.predict.plan.cases import GPT2, LLAMA, cluster, run, where

from meshwright.predict.memory import memory
from meshwright.predict.modes import largest
from meshwright.predict.plan.memory import MemoryOf
from meshwright.predict.plan.space import Grid, Space, run_of
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import RunSpec

MODELS = [GPT2, GPT2.model_copy(update={"tied": False}), LLAMA, LLAMA.model_copy(update={"tied": True})]
LARGE = LLAMA.model_copy(update={"hidden": 1024, "ffn": 4096, "vocab": 4000})  # no units are joined
WAYS: list[dict[str, Any]] = [
    {}, {"loss": "chunked"}, {"grad_dtype": "bf16"}, {"precision": "fp32"}, {"attention": "explicit"},
    {"data": {"seq_len": 1024, "packing": "documents"}}, {"reduce_dtype": "bf16"},
]  # fmt: skip


def drawn(asked: RunSpec, seed: int, number: int) -> list[tuple[Grid, tuple[int, int, int, int]]]:
    picks, grids = random.Random(seed), list(Space(asked, cluster()).grids())
    chosen = [picks.choice(grids) for _ in range(number)]
    return [(grid, tuple(picks.randrange(size) for size in grid.shape)) for grid in chosen]  # type: ignore[misc]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("model", [*MODELS, LARGE], ids=lambda m: f"{m.family} {m.is_tied} {m.hidden}")
def test_the_fullest_rank_holds_what_is_predicted_of_it(model: ModelSpec, way: dict[str, Any]) -> None:
    asked = run(model, **way)
    known = MemoryOf(asked, cpu=False)
    for grid, place in drawn(asked, 3, 12):
        held = known.of(grid, where(asked, grid))
        layout = grid.layout(place)
        exact = largest(run_of(asked, layout, grid.micro(place)), layout, "cuda").total
        least, spare = held.least[place], held.spare[place]
        assert least <= exact <= least + spare, (layout, grid.micro(place))
        simple = layout.pp == 1 and not way.keys() & {"attention", "reduce_dtype"}
        assert spare == 0 or not simple, layout  # then it is exact


@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m.family} {m.is_tied}")
def test_a_rank_on_the_cpu_holds_no_less(model: ModelSpec) -> None:
    asked = run(model, device="cpu", precision="fp32")
    known = MemoryOf(asked, cpu=True)
    for grid, place in drawn(asked, 5, 25):
        layout = grid.layout(place)
        exact = largest(run_of(asked, layout, grid.micro(place)), layout, "cpu").total
        assert known.of(grid, where(asked, grid)).least[place] <= exact, layout


def test_large_micro_batches_follow_from_small_ones() -> None:
    asked = run(sequences=240)
    known = MemoryOf(asked, cpu=False)
    grid = next(iter(Space(asked, cluster(1, 2), {"tp": 2}).grids()))
    held = known.of(grid, where(asked, grid))
    for number, micro in enumerate(grid.micros):
        layout = grid.layout((0, 0, 0, number))
        exact = memory(run_of(asked, layout, micro), layout, 0, "cuda").total
        assert held.least[0, 0, 0, number] == exact, micro


def test_what_is_always_there_is_never_more() -> None:
    asked = run()
    known = MemoryOf(asked, cpu=False)
    for grid in Space(asked, cluster()).grids():
        there = where(asked, grid)
        assert (known.always(grid, there)[:, :, None, None] <= known.of(grid, there).least).all()


def test_huge_models_stay_finite() -> None:
    huge = ModelSpec(family="llama", vocab=10**6, hidden=2**20, layers=96, heads=4096, ffn=2**22, max_seq=4096)
    asked = run(huge, 4096, 4096)
    known = MemoryOf(asked, cpu=False)
    grid = next(iter(Space(asked, cluster(512, 8), {"tp": 8, "pp": 8, "cp": 1}).grids()))
    least = known.of(grid, where(asked, grid)).least
    assert np.isfinite(least).all() and (least > 1e15 / 64 * 2 / 512).all()
