from __future__ import annotations

import functools
import threading
import time

import pytest
import torch
from torch import Tensor

from meshwright.comm.blackbox import box_path, read
from meshwright.comm.collectives import DIRECT_BYTES
from meshwright.comm.mesh import Mesh
from meshwright.spec.errors import RunError
from meshwright.spec.traffic import SMALL_SUM, lent_to_sum, wire_bytes

NAN = float("nan")
STEP = {"reason": "test", "phase": "step"}


def own(rank: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """What a rank puts in: `size` numbers, different on each rank; every sum of them is exact."""
    return (torch.arange(size) * 10 + 1000 * rank).to(dtype)


def every_operation(mesh: Mesh, async_: bool) -> dict[str, list]:
    group, n, r = mesh.group("dp"), mesh.world, mesh.rank
    found: dict[str, Tensor] = {}
    pending = []

    def note(name: str, result: Tensor, handle) -> None:
        found[name] = result
        pending.append(handle)

    def kind(name: str) -> dict:
        return {"reason": name, "phase": "forward", "micro": 3, "async_": async_}

    def empty(size: int) -> Tensor:
        return torch.full((size,), NAN, dtype=torch.float64)

    for op in ("sum", "min", "max"):
        note(f"all_reduce.{op}", t := own(r, 4), group.all_reduce(t, op=op, **kind(f"all_reduce.{op}")))
        note(f"reduce.{op}", t := own(r, 4), group.reduce(t, n - 1, op=op, **kind(f"reduce.{op}")))
        name = f"reduce_scatter.{op}"
        note(name, t := empty(2), group.reduce_scatter(t, own(r, 2 * n), op=op, **kind(name)))
    note("broadcast", t := own(r, 3), group.broadcast(t, n - 1, **kind("broadcast")))
    note("all_gather", t := empty(2 * n), group.all_gather(t, own(r, 2), **kind("all_gather")))
    note("all_gather.in_place", t := empty(2 * n), None)
    t[2 * r : 2 * r + 2] = own(r, 2)
    pending.append(group.all_gather(t, t[2 * r : 2 * r + 2], **kind("all_gather.in_place")))
    parts = [empty(2) for _ in range(n)] if r == 1 else None
    pending.append(group.gather(parts, own(r, 2), 1, **kind("gather")))
    pieces = [own(i, 2) for i in range(n)] if r == 1 else None
    note("scatter", t := empty(2), group.scatter(t, pieces, 1, **kind("scatter")))
    note("all_to_all", t := empty(2 * n), group.all_to_all(t, own(r, 2 * n), **kind("all_to_all")))
    # Rank r sends r + j rows of two columns to rank j.
    splits = [r + j for j in range(n)]
    rows = own(r, 2 * sum(splits)).view(-1, 2)
    t = torch.full_like(rows, NAN)
    note("all_to_all.uneven", t, group.all_to_all(t, rows, splits, splits, **kind("all_to_all.uneven")))
    note("recv", t := empty(3), group.recv(t, (r - 1) % n, async_=True, reason="pair", phase="backward"))
    pending.append(group.send(own(r, 3), (r + 1) % n, async_=True, reason="pair", phase="backward"))
    for distance in (1, 2, -1):
        name = f"shift.{distance}"
        note(name, t := empty(3), group.shift(t, own(r, 3), distance, **kind(name)))
    for handle in pending:
        if handle is not None:
            handle.wait()
    group.barrier("end")
    found["gather"] = torch.cat(parts) if parts else torch.empty(0)
    return {k: v.flatten().tolist() for k, v in found.items()} | {"rows": mesh.ledger.rows()}


def expected(n: int, r: int) -> dict[str, list]:
    def stacked(size: int) -> Tensor:
        return torch.stack([own(i, size) for i in range(n)])

    out: dict[str, Tensor] = {}
    for op, reduce in (("sum", torch.sum), ("min", torch.amin), ("max", torch.amax)):
        out[f"all_reduce.{op}"] = reduce(stacked(4), 0)
        out[f"reduce.{op}"] = reduce(stacked(4), 0) if r == n - 1 else None
        out[f"reduce_scatter.{op}"] = reduce(stacked(2 * n), 0)[2 * r : 2 * r + 2]
    out["broadcast"] = own(n - 1, 3)
    out["all_gather"] = out["all_gather.in_place"] = stacked(2).flatten()
    out["gather"] = stacked(2).flatten() if r == 1 else torch.empty(0)
    out["scatter"] = own(r, 2)
    out["all_to_all"] = stacked(2 * n)[:, 2 * r : 2 * r + 2].flatten()
    uneven = []
    for i in range(n):
        splits = [i + j for j in range(n)]
        start = sum(splits[:r])
        uneven.append(own(i, 2 * sum(splits)).view(-1, 2)[start : start + splits[r]].flatten())
    out["all_to_all.uneven"] = torch.cat(uneven)
    out["recv"] = own((r - 1) % n, 3)
    for distance in (1, 2, -1):
        out[f"shift.{distance}"] = own((r - distance) % n, 3)
    return {k: None if v is None else v.tolist() for k, v in out.items()}


@pytest.mark.parametrize("check", ["0", "1"])
@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_results(ranks, world: int, async_: bool, check: str) -> None:
    found = ranks.run(world, every_operation, async_, env={"MESHWRIGHT_COMM_CHECK": check})
    for r in range(world):
        for name, value in expected(world, r).items():
            if value is not None:  # what a reduction leaves on ranks other than its root is not defined
                assert found[r][name] == value, (name, r)


@pytest.mark.parametrize("world", [2, 3])
def test_ledger_rows(ranks, world: int) -> None:
    n = world
    for r, found in enumerate(ranks.run(world, every_operation, True)):
        rows = {row.key.operation if row.key.reason == "pair" else row.key.reason: row for row in found["rows"]}
        # Bytes of the whole tensor, float64.
        payloads = {"broadcast": 24, "all_gather": 16 * n, "all_gather.in_place": 16 * n, "gather": 16 * n}
        payloads |= {"scatter": 16 * n, "all_to_all": 16 * n, "send": 24, "recv": 24}
        for op in ("sum", "min", "max"):
            payloads |= {f"all_reduce.{op}": 32, f"reduce.{op}": 32, f"reduce_scatter.{op}": 16 * n}
        # By two places on two ranks it stays where it is.
        payloads |= {f"shift.{distance}": 24 for distance in (1, 2, -1) if distance % n}
        payloads["all_to_all.uneven"] = 16 * sum(r + j for j in range(n))
        assert {reason: row.payload for reason, row in rows.items()} == payloads
        for reason, row in rows.items():
            assert row.key.operation == reason.partition(".")[0]
            assert (row.key.axis, row.count) == ("dp", 1)
            pair = reason in ("send", "recv")
            assert (row.key.phase, row.key.micro) == (("backward", None) if pair else ("forward", 3))
            wire = 16.0 * sum(r + j for j in range(n) if j != r)
            if reason != "all_to_all.uneven":
                wire = wire_bytes(row.key.operation, n, row.payload)
            assert row.wire == wire, reason


def dtypes(mesh: Mesh) -> list:
    group, out = mesh.group("dp"), []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8):
        t = torch.tensor([1, 2, 3, 4]).to(dtype)
        group.all_reduce(t, **STEP)
        part = torch.zeros(2, dtype=dtype)
        group.reduce_scatter(part, torch.tensor([1, 2, 3, 4]).to(dtype), **STEP)
        out.append((t.tolist(), part.tolist(), t.dtype == part.dtype == dtype))
    return out


def test_dtypes(ranks) -> None:
    found = ranks.run(2, dtypes)
    assert found[0] == [([2, 4, 6, 8], [2, 4], True)] * 6
    assert found[1] == [([2, 4, 6, 8], [6, 8], True)] * 6


def handles(mesh: Mesh) -> dict:
    group, r = mesh.group("dp"), mesh.rank
    many = [torch.full((1000,), float(i + r)) for i in range(5)]
    pending = [group.all_reduce(t, async_=True, **STEP) for t in many]
    for handle in reversed(pending):
        handle.wait()
        handle.wait()  # once more does nothing
    # The handle keeps the buffers of an operation whose caller has let go of them.
    big = torch.full((1 << 20,), 1.0)
    handle = group.all_gather(out := torch.empty(2 << 20), big, async_=True, **STEP)
    del big
    noise = [torch.full((1 << 20,), NAN) for _ in range(3)]
    handle.wait()
    del noise
    # CUDA runs backward on a thread of its own; the rows are the same wherever the wait is.
    t = torch.tensor([1.0])
    handle = group.all_reduce(t, async_=True, reason="thread", phase="backward")
    thread = threading.Thread(target=handle.wait)
    thread.start()
    thread.join()
    rows = [(row.key.reason, row.key.phase, row.count) for row in mesh.ledger.rows()]
    return {"sums": [t[0].item() for t in many], "ones": bool((out == 1).all()), "thread": t.item(), "rows": rows}


def test_pending(ranks) -> None:
    expect = {"sums": [1, 3, 5, 7, 9], "ones": True, "thread": 2.0}
    expect["rows"] = [("test", "step", 5), ("test", "step", 1), ("thread", "backward", 1)]
    assert ranks.run(2, handles) == [expect] * 2


def dropping(mesh: Mesh) -> None:
    mesh.group("dp").all_reduce(torch.ones(1), async_=True, reason="lost.sum", phase="step")
    mesh.group("dp").barrier("end")


def test_a_handle_dropped_without_wait_is_an_error_here(ranks) -> None:
    for outcome in ranks.attempt(2, dropping):
        assert "all_reduce lost.sum (dp) was dropped without wait()" in outcome.error


def late(mesh: Mesh) -> float:
    mesh.group("dp").barrier("start")
    mesh.ledger.clear()
    if mesh.rank == 0:
        time.sleep(0.6)
    handle = mesh.group("dp").all_reduce(torch.ones(1), async_=True, **STEP)
    handle.wait()
    return mesh.ledger.blocked_seconds


def test_waiting_for_another_rank_counts_as_blocked(ranks) -> None:
    early, waiting = ranks.run(2, late)
    assert early > 0 and waiting > 0.2  # of 0.6 s


def misuse(mesh: Mesh) -> list[str]:
    group, out = mesh.group("dp"), []
    square = torch.zeros(4, 4)
    wrong = {
        "not contiguous": lambda: group.all_reduce(square.t()[:, :2], **STEP),
        "all_gather": lambda: group.all_gather(torch.zeros(5), torch.zeros(2), **STEP),
        "dtype": lambda: group.all_gather(torch.zeros(4), torch.zeros(2, dtype=torch.float64), **STEP),
        "reduce_scatter": lambda: group.reduce_scatter(torch.zeros(2), torch.zeros(5), **STEP),
        "all_to_all": lambda: group.all_to_all(torch.zeros(4), torch.zeros(4), [2, 2], [3, 2], **STEP),
        "odd": lambda: group.all_to_all(torch.zeros(5), torch.zeros(5), **STEP),
        "gather": lambda: group.gather([torch.zeros(2)] * 2 if mesh.rank else None, torch.zeros(2), 0, **STEP),
        "parts": lambda: group.gather(None if mesh.rank else [torch.zeros(3)] * 2, torch.zeros(2), 0, **STEP),
        "scatter": lambda: group.scatter(torch.zeros(2), None if mesh.rank else [torch.zeros(2)], 0, **STEP),
        "itself": lambda: group.send(torch.zeros(2), mesh.rank, **STEP),
    }
    for name, act in wrong.items():
        if mesh.rank and name in ("parts", "scatter"):
            continue  # wrong on the root alone
        try:
            act()
        except AssertionError:
            continue
        out.append(name)
    return out + [row.key.operation for row in mesh.ledger.rows()]


def test_misuse_is_refused_before_anything_is_sent_or_recorded(ranks) -> None:
    assert ranks.run(2, misuse) == [[], []]


def dying(mesh: Mesh, folder: str) -> str:
    mesh.blackbox.step = 7
    mesh.group("dp").barrier("start")
    if mesh.rank == 1:
        mesh.blackbox.note("loading data")
        import os

        os.kill(os.getpid(), 9)
    try:
        mesh.group("dp").all_reduce(torch.ones(8), reason="zero.reduce", phase="backward")
    except RunError as exc:
        raise RuntimeError(f"told: {exc}; {read(box_path(folder, 0))}") from None
    return ""


def test_a_dead_rank_ends_the_others_in_words(ranks, tmp_path) -> None:
    env = {"MESHWRIGHT_BLACKBOX": str(tmp_path)}
    alive, dead = ranks.attempt(2, dying, str(tmp_path), env=env, group_timeout=10)
    assert dead.exit == -9
    assert "told: all_reduce zero.reduce (dp) failed: " in alive.error and "state='in'" in alive.error
    record = read(box_path(tmp_path, 1))
    assert (record.step, record.state, record.op, record.note) == (7, "done", "barrier", "loading data")


def large_gathers(mesh: Mesh) -> list[bool]:
    """Several all-gathers of large parts under way at once, beside messages between two of the ranks."""
    group, n, r = mesh.group("dp"), mesh.world, mesh.rank
    size = DIRECT_BYTES // 8 + 3
    outs, pending = [], []
    for number in range(3):
        out = torch.full((n * size,), NAN, dtype=torch.float64)
        part = own(r, size) + 7 * number
        if number == 1:  # in its own place
            out[r * size : (r + 1) * size] = part
            part = out[r * size : (r + 1) * size]
        pending.append(group.all_gather(out, part, async_=True, **STEP))
        outs.append(out)
    if r < 2:
        message = torch.full((size,), NAN, dtype=torch.float64) if r else own(5, size)
        (group.recv(message, 0, **STEP) if r else group.send(message, 1, **STEP)).wait()
        outs.append(message)
    for handle in pending:
        handle.wait()
    whole = torch.cat([own(rank, size) for rank in range(n)])
    right = [torch.equal(out, whole + 7 * number) for number, out in enumerate(outs[:3])]
    return right + [torch.equal(message, own(5, size)) for message in outs[3:]]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_large_parts_are_gathered_as_small_ones_are(ranks, world):
    for right in ranks.run(world, large_gathers):
        assert all(right), right


def awaited_sums(mesh):
    """Sums whose parts each rank adds up by itself, of odd sizes and at the limit, beside ones that Gloo adds up."""
    group = mesh.group("dp")
    found = []
    for size in (1, 7, SMALL_SUM // 4, SMALL_SUM // 4 + 1, 0):
        mine = torch.randn(size, generator=torch.Generator().manual_seed(mesh.rank))
        t, least = mine.clone(), mine.clone()
        group.all_reduce(t, reason="test", phase="step", async_=True, awaited=True).wait()
        group.all_reduce(least, reason="test", phase="step", op="min", awaited=True)
        found.append((mine, t, least))
    return found, [(row.key.operation, row.payload) for row in mesh.ledger.rows()], group.scratch.bytes


@pytest.mark.parametrize("world", [3, 4])
def test_awaited_sums_are_the_same_bits_on_all_ranks(ranks, world):
    results = ranks.run(world, awaited_sums)
    for place, each in enumerate(zip(*(found for found, _, _ in results), strict=True)):
        parts = [mine for mine, _, _ in each]
        for _, total, least in each:
            assert torch.equal(total, each[0][1]) and torch.equal(least, torch.stack(parts).amin(0))
            torch.testing.assert_close(total, torch.stack(parts).double().sum(0).float())
        if place < 3:  # small ones: added up in the order of the ranks
            assert torch.equal(each[0][1], functools.reduce(torch.add, parts))
    for _, rows, borrowed in results:
        assert rows == results[0][1] and borrowed == lent_to_sum(world, SMALL_SUM) == world * SMALL_SUM
    assert lent_to_sum(2, 8) == lent_to_sum(world, SMALL_SUM + 1) == 0
