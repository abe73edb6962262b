"""The debug check against every way in which Gloo misreads, hangs or aborts in silence."""

from __future__ import annotations

import time

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.spec.errors import RunError, UserError
from meshwright.spec.layout import Layout

STEP = {"reason": "test", "phase": "step"}
F32, F64 = torch.float32, torch.float64


def longer_buffer(mesh: Mesh) -> None:
    group = mesh.group("dp")
    if mesh.rank == 0:
        group.send(torch.ones(2), 1, **STEP)
    else:
        group.recv(torch.empty(5), 0, **STEP)


def shorter_buffer(mesh: Mesh) -> None:
    group = mesh.group("dp")
    if mesh.rank == 0:
        group.send(torch.ones(500), 1, async_=True, **STEP).wait()
    else:
        group.recv(torch.empty(5), 0, async_=True, **STEP).wait()


def pair_dtype(mesh: Mesh) -> None:
    group = mesh.group("dp")
    if mesh.rank == 0:
        group.send(torch.ones(4), 1, **STEP)
    else:
        group.recv(torch.empty(2, dtype=F64), 0, **STEP)


def pair_reason(mesh: Mesh) -> None:
    group = mesh.group("dp")
    if mesh.rank == 0:
        group.send(torch.ones(4), 1, reason="pp.forward", phase="forward")
    else:
        group.recv(torch.ones(4), 0, reason="pp.backward", phase="forward")


def sum_dtype(mesh: Mesh) -> None:
    mesh.group("dp").all_reduce(torch.ones(4, dtype=(F32, F64)[mesh.rank]), **STEP)


def sum_shape(mesh: Mesh) -> None:
    mesh.group("dp").all_reduce(torch.ones(4 + mesh.rank), **STEP)


def sum_or_max(mesh: Mesh) -> None:
    mesh.group("dp").all_reduce(torch.ones(4), op=("sum", "max")[mesh.rank], **STEP)


def roots(mesh: Mesh) -> None:
    mesh.group("dp").broadcast(torch.ones(4), mesh.rank, **STEP)


def reasons(mesh: Mesh) -> None:
    mesh.group("dp").all_reduce(torch.ones(4), reason=("zero.reduce", "step.metrics")[mesh.rank], phase="step")


def operations(mesh: Mesh) -> None:
    if mesh.rank == 0:
        mesh.group("dp").all_reduce(torch.ones(4), reason="zero.reduce", phase="backward", async_=True).wait()
    else:
        mesh.group("dp").all_gather(torch.ones(8), torch.ones(4), reason="zero.gather", phase="forward")


def splits(mesh: Mesh) -> None:
    given, taken = ([1, 3], [1, 2]) if mesh.rank == 0 else ([2, 2], [2, 2])
    t, out = torch.ones(sum(given), 3), torch.ones(sum(taken), 3)
    mesh.group("dp").all_to_all(out, t, taken, given, **STEP)


def distances(mesh: Mesh) -> None:
    mesh.group("dp").shift(torch.empty(3), torch.ones(3), (1, -1)[mesh.rank], **STEP)


def shift_shape(mesh: Mesh) -> None:
    mesh.group("dp").shift(torch.empty(3 + mesh.rank), torch.ones(3 + mesh.rank), async_=True, **STEP).wait()


def collective_and_pair(mesh: Mesh) -> None:
    if mesh.rank == 0:
        mesh.group("dp").all_reduce(torch.ones(10), reason="zero.reduce", phase="backward")
    else:
        mesh.group("dp").send(torch.ones(3), 0, reason="pp.forward", phase="forward")


BOTH = {
    longer_buffer: ("rank 0: send test (dp) float32[2] to rank 1", "rank 1: recv test (dp) float32[5] from rank 0"),
    shorter_buffer: ("rank 0: send test (dp) float32[500] to rank 1", "rank 1: recv test (dp) float32[5] from rank 0"),
    pair_dtype: ("rank 0: send test (dp) float32[4] to rank 1", "rank 1: recv test (dp) float64[2] from rank 0"),
    pair_reason: ("rank 0: send pp.forward (dp) float32[4]", "rank 1: recv pp.backward (dp) float32[4]"),
    sum_dtype: ("rank 0: all_reduce test (dp) float32[4] sum", "rank 1: all_reduce test (dp) float64[4] sum"),
    sum_shape: ("rank 0: all_reduce test (dp) float32[4] sum", "rank 1: all_reduce test (dp) float32[5] sum"),
    sum_or_max: ("rank 0: all_reduce test (dp) float32[4] sum", "rank 1: all_reduce test (dp) float32[4] max"),
    roots: ("rank 0: broadcast test (dp) float32[4] root rank 0", "rank 1: broadcast test (dp) float32[4] root rank 1"),
    reasons: ("rank 0: all_reduce zero.reduce (dp) float32[4]", "rank 1: all_reduce step.metrics (dp) float32[4]"),
    operations: (
        "rank 0: all_reduce zero.reduce (dp) float32[4] sum",
        "rank 1: all_gather zero.gather (dp) float32[4]",
    ),
    splits: ("rank 0 sends 3 rows to rank 1, which expects 2", "rows sent [1, 3] received [1, 2]"),
    distances: ("rank 0: shift test (dp) float32[3] by 1", "rank 1: shift test (dp) float32[3] by -1"),
    shift_shape: ("rank 0: shift test (dp) float32[3] by 1", "rank 1: shift test (dp) float32[4] by 1"),
    collective_and_pair: (
        "rank 0: in all_reduce zero.reduce (dp) float32[10] sum",
        "rank 1: in send pp.forward (dp) float32[3] to rank 0",
    ),
}


def caught(mesh: Mesh, wrong) -> tuple[str, float]:
    mesh.group("dp").barrier("start")
    started = time.monotonic()
    try:
        wrong(mesh)
    except RunError as exc:
        return str(exc), time.monotonic() - started
    return "nothing was found", 0.0


@pytest.mark.parametrize("wrong", BOTH, ids=lambda f: f.__name__)
def test_both_sides_are_named_on_both_ranks(ranks, wrong) -> None:
    env = {"MESHWRIGHT_COMM_CHECK": "1"} | ({"MESHWRIGHT_COMM_CHECK_TIMEOUT": "2"} if "pair" in wrong.__name__ else {})
    for message, seconds in ranks.run(2, caught, wrong, env=env):
        for side in BOTH[wrong]:
            assert side in message
        assert seconds < 15  # the group's own timeout is 20


def unchecked(mesh: Mesh) -> list[float]:
    group = mesh.group("dp")
    if mesh.rank == 0:
        group.send(torch.ones(2), 1, **STEP)
        return []
    t = torch.full((5,), float("nan"))
    group.recv(t, 0, **STEP)
    return t.isnan().tolist()


def test_without_the_check_a_short_message_passes(ranks) -> None:
    # Should a later Gloo refuse it, the check could do less.
    assert ranks.run(2, unchecked)[1] == [False, False, True, True, True]


def absent(mesh: Mesh) -> str:
    group = mesh.group("dp")
    group.all_reduce(torch.ones(2), reason="step.metrics", phase="step")
    if mesh.rank == 2:
        time.sleep(2.5)  # busy with something else
        return ""
    try:
        group.all_reduce(torch.ones(2), reason="zero.reduce", phase="backward")
    except RunError as exc:
        return str(exc)
    return "nothing was found"


def test_a_rank_that_never_joins_is_named(ranks) -> None:
    env = {"MESHWRIGHT_COMM_CHECK": "1", "MESHWRIGHT_COMM_CHECK_TIMEOUT": "1.5"}
    for message in ranks.run(3, absent, env=env)[:2]:
        assert message.startswith("all_reduce zero.reduce (dp) float32[2] sum waited 1.5 s ")
        assert "for rank 2: " in message
        assert "ranks 0, 1: in all_reduce zero.reduce (dp) float32[2] sum" in message
        assert "rank 2: computing, after all_reduce step.metrics (dp) float32[2] sum" in message


def exchanges(mesh: Mesh) -> list[float]:
    """Orders of posting that work without the check must work with it."""
    group, n = mesh.group("dp"), mesh.world
    right, left = (mesh.rank + 1) % n, (mesh.rank - 1) % n
    got = []
    for receives_first in (True, False):
        inbox = [torch.full((2,), float("nan")) for _ in range(2)]

        def receive(inbox=inbox):
            return [group.recv(t, left, async_=True, **STEP) for t in inbox]

        pending = receive() if receives_first else []
        pending += [group.send(torch.full((2,), mesh.rank + i / 2), right, async_=True, **STEP) for i in range(2)]
        pending += [] if receives_first else receive()
        for handle in reversed(pending):  # the second message is waited for before the first
            handle.wait()
        got += [t[0].item() for t in inbox]
    return got


@pytest.mark.parametrize("check", ["0", "1"])
def test_exchanges_keep_their_order(ranks, check: str) -> None:
    found = ranks.run(3, exchanges, env={"MESHWRIGHT_COMM_CHECK": check})
    assert found == [[left, left + 0.5] * 2 for left in (2, 0, 1)]


def two_meshes(mesh: Mesh) -> list[float]:
    out = []
    second = Mesh.create(Layout(dp=2), device=mesh.device, timeout=10.0)
    for m, sizes in ((mesh, (3, 4)), (second, (4, 3))):
        for size in sizes:
            time.sleep(0.2 * mesh.rank)  # rank 0 looks before rank 1 has announced anything new
            t = torch.ones(size)
            m.group("dp").all_reduce(t, **STEP)
            out.append(t.sum().item())
    return out


def test_a_second_mesh_does_not_read_what_the_first_has_left(ranks) -> None:
    assert ranks.run(2, two_meshes, env={"MESHWRIGHT_COMM_CHECK": "1"}) == [[6, 8, 8, 6]] * 2


def keys_left(mesh: Mesh) -> tuple[int, int]:
    counts = []
    for steps in (3, 30):
        for _ in range(steps):
            mesh.group("dp").all_reduce(torch.ones(1), **STEP)
            if mesh.rank:
                mesh.group("dp").recv(torch.ones(1), 0, **STEP)
            else:
                mesh.group("dp").send(torch.ones(1), 1, **STEP)
        torch.distributed.barrier()
        counts.append(torch.distributed.distributed_c10d._get_default_store().num_keys())
        torch.distributed.barrier()
    return tuple(counts)


def test_the_store_does_not_grow(ranks) -> None:
    few, many = ranks.run(2, keys_left, env={"MESHWRIGHT_COMM_CHECK": "1"})[0]
    assert few == many


def switches(rank: int, world: int, name: str, value: str) -> str:
    import os

    from meshwright.comm.check import Checks, _timeout

    os.environ[name] = value
    try:
        return f"{Checks.wanted()} {_timeout():g}"
    except UserError as exc:
        return str(exc)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("MESHWRIGHT_COMM_CHECK", "1", "True 30"),
        ("MESHWRIGHT_COMM_CHECK", "0", "False 30"),
        ("MESHWRIGHT_COMM_CHECK", "yes", "MESHWRIGHT_COMM_CHECK=yes: neither on nor off; use 1 or 0"),
        ("MESHWRIGHT_COMM_CHECK_TIMEOUT", "2.5", "False 2.5"),
        ("MESHWRIGHT_COMM_CHECK_TIMEOUT", "-1", "MESHWRIGHT_COMM_CHECK_TIMEOUT=-1: no time to wait"),
        ("MESHWRIGHT_COMM_CHECK_TIMEOUT", "soon", "MESHWRIGHT_COMM_CHECK_TIMEOUT=soon: no time to wait"),
    ],
)
def test_switches(ranks, name: str, value: str, says: str) -> None:
    assert ranks.run(1, switches, name, value, bare=True)[0].startswith(says)
