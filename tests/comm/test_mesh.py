from __future__ import annotations

import time

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.spec.errors import RunError
from meshwright.spec.layout import Layout

AXES = ("tp", "cp", "dp", "pp")
WORLD_OF_8 = {"tp": 2, "cp": 1, "dp": 2, "pp": 2}


def places(mesh: Mesh) -> dict:
    pairs = {
        name: mesh.group(*axes)
        for name, axes in {"dp+tp": ("dp", "tp"), "pp+dp": ("pp", "dp"), "all": ("tp", "dp", "pp")}.items()
    }
    return {
        "coords": mesh.coords,
        **{axis: list(mesh.group(axis).ranks) for axis in AXES},
        **{name: list(group.ranks) for name, group in pairs.items()},
        "world": list(mesh.world_group.ranks),
        "own": all(g.ranks[g.rank] == mesh.rank for g in pairs.values()),
    }


def test_default_order_has_tensor_neighbours_adjacent(ranks) -> None:
    found = ranks.run(8, places, axes=WORLD_OF_8)
    assert [f["tp"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert [f["dp"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert [f["pp"] for f in found] == [[0, 4], [1, 5], [2, 6], [3, 7], [0, 4], [1, 5], [2, 6], [3, 7]]
    assert [f["cp"] for f in found] == [[r] for r in range(8)]
    assert [f["dp+tp"] for f in found] == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    assert [f["pp+dp"] for f in found] == [[0, 2, 4, 6], [1, 3, 5, 7]] * 4
    assert all(f["all"] == f["world"] == list(range(8)) and f["own"] for f in found)
    assert found[6]["coords"] == {"tp": 0, "cp": 0, "dp": 1, "pp": 1}


def test_another_order_puts_stages_next_to_each_other(ranks) -> None:
    found = ranks.run(8, places, axes=WORLD_OF_8, order=("pp", "dp", "cp", "tp"))
    assert [f["pp"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert [f["dp"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert [f["tp"] for f in found] == [[0, 4], [1, 5], [2, 6], [3, 7], [0, 4], [1, 5], [2, 6], [3, 7]]
    assert [f["dp+tp"] for f in found] == [[0, 2, 4, 6], [1, 3, 5, 7]] * 4
    assert found[6]["coords"] == {"tp": 1, "cp": 0, "dp": 1, "pp": 0}


def sums(mesh: Mesh) -> dict:
    out = {}
    for name, axes in {"tp": ("tp",), "dp": ("dp",), "dp+cp": ("dp", "cp"), "cp+dp": ("cp", "dp")}.items():
        t = torch.tensor([10.0**mesh.rank], dtype=torch.float64)
        mesh.group(*axes).all_reduce(t, reason=name, phase="step")
        out[name] = int(t)
    t = torch.tensor([10.0**mesh.rank], dtype=torch.float64)
    mesh.world_group.all_reduce(t, reason="world", phase="step")
    return out | {"world": int(t), "axes": {row.key.reason: row.key.axis for row in mesh.ledger.rows()}}


def test_groups_sum_over_their_own_ranks(ranks) -> None:
    found = ranks.run(8, sums, axes={"tp": 2, "cp": 2, "dp": 2})
    assert [f["tp"] for f in found][:4] == [11, 11, 1100, 1100]
    assert [f["dp"] for f in found][:4] == [10001, 100010, 1000100, 10001000]
    assert found[0]["dp+cp"] == found[0]["cp+dp"] == found[6]["dp+cp"] == 1010101
    assert all(f["world"] == 11111111 for f in found)
    names = {"tp": "tp", "dp": "dp", "dp+cp": "dp+cp", "cp+dp": "cp+dp", "world": "world"}
    assert all(f["axes"] == names for f in found)


def combined(mesh: Mesh) -> tuple:
    group = mesh.group("dp", "cp")
    return group.axis, group.size, mesh.group("cp").axis, mesh.group("dp", "cp") is group


def test_axes_of_one_rank_are_left_out_of_the_name(ranks) -> None:
    assert ranks.run(2, combined) == [("dp", 2, "cp", True)] * 2


def torch_mesh(mesh: Mesh) -> tuple:
    torch_own = mesh.device_mesh
    t = torch.tensor([mesh.rank])
    torch.distributed.all_reduce(t, group=torch_own.get_group("dp"))
    shape = (torch_own.mesh_dim_names, tuple(torch_own.shape), torch_own.mesh.flatten().tolist())
    coords = dict(zip(torch_own.mesh_dim_names, torch_own.get_coordinate(), strict=True))
    return (*shape, coords == mesh.coords, t.item())


def test_torch_sees_the_same_mesh(ranks) -> None:
    found = ranks.run(4, torch_mesh, axes={"tp": 2, "dp": 2})
    expected = ("pp", "dp", "cp", "tp"), (1, 2, 1, 2), [0, 1, 2, 3], True
    assert found == [(*expected, r) for r in (2, 4, 2, 4)]


def short_mesh(mesh: Mesh) -> tuple[str, bool]:
    layout = Layout.model_construct(tp=2, cp=1, dp=2, pp=1, order=AXES)
    short = Mesh.create(layout, device=mesh.device, timeout=2.0)
    mesh.world_group.barrier("start")
    started = time.monotonic()
    if mesh.rank == 0:  # rank 2, the other of its dp group, never joins
        try:
            short.group("dp").barrier("test")
        except RunError as exc:
            return str(exc), time.monotonic() - started < 15
    return "", True


def test_sub_groups_have_the_timeout_asked_for(ranks) -> None:
    found = ranks.run(4, short_mesh, axes={"tp": 2, "dp": 2})  # their default group waits 20 s, torch's own 1,800
    assert found[0][0].startswith("barrier test (dp) failed: ") and found[0][1]


@pytest.mark.parametrize("order", [AXES, ("pp", "dp", "cp", "tp"), ("dp", "tp", "pp", "cp")])
def test_every_group_holds_the_ranks_that_differ_on_its_axes_only(order) -> None:
    sizes = {"tp": 2, "cp": 3, "dp": 2, "pp": 2}
    coords = [_alone(sizes, order, rank) for rank in range(24)]
    for axes in (("tp",), ("cp",), ("dp", "cp"), ("pp", "tp"), ("tp", "cp", "dp", "pp")):
        for rank, (here, along) in enumerate(coords):
            same = [r for r, (c, _) in enumerate(coords) if all(c[a] == here[a] for a in AXES if a not in axes)]
            assert along[axes] == same, (rank, axes)


def _alone(sizes, order, rank):
    """Coordinates and groups of one rank, by arithmetic alone."""
    mesh = object.__new__(Mesh)
    mesh._locate(sizes, order, rank)
    every = (("tp",), ("cp",), ("dp", "cp"), ("pp", "tp"), ("tp", "cp", "dp", "pp"))
    return mesh.coords, {axes: mesh.ranks_along(*axes) for axes in every}


def test_a_single_process_needs_no_group() -> None:
    mesh = Mesh.single(torch.device("cpu"))
    group = mesh.group("dp", "cp")
    t, out = torch.arange(6.0), torch.empty(6)
    step = {"reason": "test", "phase": "step"}
    group.all_reduce(t, **step, async_=True).wait()
    group.broadcast(t, 0, **step)
    group.reduce(t, 0, **step)
    assert t.tolist() == [0, 1, 2, 3, 4, 5]
    for act in (
        lambda: group.all_gather(out, t, **step),
        lambda: group.reduce_scatter(out, t, **step),
        lambda: group.all_to_all(out, t, **step),
        lambda: group.gather([out], t, 0, **step),
        lambda: group.scatter(out, [t], 0, **step),
    ):
        out.fill_(float("nan"))
        act()
        assert torch.equal(out, t)
    group.barrier("test")
    assert (mesh.rank, mesh.world, mesh.ledger.rows(), mesh.ledger.records) == (0, 1, [], 0)
    assert (mesh.coords, mesh.world_group.size) == ({"tp": 0, "cp": 0, "dp": 0, "pp": 0}, 1)
