"""What attention over `cp` moves, keeps and computes: as recorded, to the byte, and by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from meshwright.comm.mesh import Mesh
from meshwright.parallel.context import attention
from meshwright.predict.context import (
    Attention,
    borrowed,
    flops,
    kept,
    messages,
    needed_flops,
    traffic,
)
from meshwright.spec.traffic import TrafficRow, wire_bytes
from meshwright.verify.activations import storage_of
from parallel.sequences import Case, mine

ORDERS = ("contiguous", "zigzag", "striped")
METHODS = (("gather", 1), ("rsa", 1), ("ring", 1), ("ulysses", 1), ("usp", 2))


def predicted(case: Case) -> Attention:
    return Attention(
        case.method, 4, case.order, case.batch, case.length, case.heads, case.kv_heads, case.width,
        case.dtype.itemsize, case.inner, case.causal, case.window,
    )  # fmt: skip


# torch's counter knows the fused kernels of GPUs; the CPU's counts by the same formulas.
def _forward(query, key, value, *args, out_shape=None, **kwargs):  # type: ignore[no-untyped-def]
    return sdpa_flop_count(query, key, value)


def _backward(grad, query, key, value, *args, out_shape=None, **kwargs):  # type: ignore[no-untyped-def]
    return sdpa_backward_flop_count(grad, query, key, value)


FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}


def measured(mesh: Mesh, cases: list[Case]) -> list[tuple[list[TrafficRow], list[int], tuple[int, int]]]:
    """For each case the ledger's rows, bytes of each storage kept for backward, and FLOPs forward and backward."""
    found = []
    for case in cases:
        *inputs, grad = (mine(each, mesh, case.order).to(case.dtype) for each in case.inputs())
        weight = torch.nn.Parameter(torch.ones(1, case.heads * case.width, dtype=case.dtype))  # as of the next layer
        storages: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor, storages=storages) -> torch.Tensor:
            storages.setdefault(storage_of(tensor), tensor)
            return tensor

        q, k, v = (each.clone().requires_grad_() for each in inputs)
        mesh.ledger.clear()
        with (
            FlopCounterMode(display=False, custom_mapping=FUSED) as forward,
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            out = attention(q, k, v, mesh, micro=3, **case.options)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            F.linear(out.flatten(2), weight)
        with FlopCounterMode(display=False, custom_mapping=FUSED) as backward:
            out.backward(grad)
        kept = sorted(t.untyped_storage().nbytes() for t in storages.values() if t.data_ptr() != weight.data_ptr())
        found.append((mesh.ledger.take(), kept, (forward.get_total_flops(), backward.get_total_flops())))
    return found


def rows_of(rows: list[TrafficRow]) -> list[TrafficRow]:
    return sorted(rows, key=lambda each: str(each.key))


def test_what_is_recorded_is_what_was_predicted(ranks):
    """Traffic and memory to the byte, FLOPs by torch's counter: every method and order, windows, grouped heads."""
    cases = [
        Case(method, order, causal, window, inner=inner, kv_heads=kv_heads, dtype=dtype)
        for (method, inner), order in itertools.product(METHODS, ORDERS)
        for causal, window, kv_heads, dtype in (
            (True, None, 2, torch.float64),
            (False, None, 4, torch.float32),
            (True, 5, 1, torch.bfloat16),
        )
    ]
    for rank, found in enumerate(ranks.run(4, measured, cases, axes={"cp": 4})):
        for case, (rows, bytes_kept, counted) in zip(cases, found, strict=True):
            it = predicted(case)
            assert rows_of(rows) == rows_of(traffic(it, 1, 3)), case
            assert bytes_kept == sorted(row.bytes for row in kept(it)), case
            assert counted == flops(it, rank), case


BORROWING = [
    *(Case("ring", "contiguous", window=window) for window in (None, 1, 7, 8, 14)),
    Case("ring", window=2), Case("rsa", window=2), Case("gather"), Case("ulysses"), Case("usp", inner=2),
]  # fmt: skip
"""None, and windows that reach no other rank's part, the next one's and the one behind it; in zigzag every one's."""


def lent(mesh: Mesh, cases: list[Case]) -> list[int]:
    """Bytes of the buffers that the axis keeps afterwards, which are those that were out at once."""
    found = []
    for case in cases:
        fresh = Mesh(mesh.sizes, tuple(mesh.sizes), mesh.rank, mesh.device, timeout=20)
        *inputs, grad = (mine(each, mesh, case.order) for each in case.inputs())
        attention(*(each.requires_grad_() for each in inputs), fresh, **case.options).backward(grad)
        found.append(fresh.group("cp").scratch.bytes)
        fresh.close()
    return found


def test_buffers_are_as_many_as_predicted(ranks):
    """None where a window ends the ring at the rank itself."""
    predictions = [predicted(case) for case in BORROWING]
    expected = [sum(borrowed(it)) if it.ring > 1 else 0 for it in predictions]
    assert [e // it.kv for e, it in zip(expected[:6], predictions, strict=False)] == [5, 0, 3, 5, 5, 5]
    for found in ranks.run(4, lent, BORROWING, axes={"cp": 4}):
        assert found == expected


SIZES = {"batch": 2, "length": 64, "heads": 8, "kv_heads": 2, "width": 16, "size": 2}
KV = 2 * 2 * 16 * 2 * 16 * 2  # bytes of a rank's keys and values: both, batch, positions, heads, width, size


def sent(method: str, **fields) -> dict[tuple[str, str, str], float]:
    """Bytes that a rank sends in a layer, by axis, reason and phase."""
    found = messages(Attention(method, 4, "zigzag", **(SIZES | fields)))
    return {(m.axis, m.reason, m.phase): m.times * wire_bytes(m.operation, m.ranks, m.payload) for m in found}


def test_bytes_by_hand():
    """Rings and gather send each part cp − 1 times, and as often its gradients; Ulysses 3/4 of q, k, v and the output,
    with two copies of each key-value head."""
    assert sent("ring") == {
        ("cp", "cp.ring.kv", "forward"): 3 * KV,
        ("cp", "cp.ring.kv", "backward"): 3 * KV,
        ("cp", "cp.ring.dkv", "backward"): 3 * KV,
    }
    assert sent("gather") == {
        ("cp", "cp.gather.kv", "forward"): 3 * KV,
        ("cp", "cp.gather.kv", "backward"): 3 * KV,
        ("cp", "cp.gather.dkv", "backward"): 3 * KV,
    }
    assert sum(sent("rsa").values()) == sum(sent("ring").values())
    q = KV // 4 * 8 // 2 * 2  # eight heads where keys and values have four between them
    ulysses = {phase: {"qkv": 3 / 4 * (q + 2 * KV), "out": 3 / 4 * q} for phase in ("forward", "backward")}
    assert sent("ulysses") == {
        ("cp", f"cp.ulysses.{what}", phase): size for phase, sizes in ulysses.items() for what, size in sizes.items()
    }
    usp = sent("usp", inner=2)
    assert usp["cp.inner", "cp.ulysses.qkv", "forward"] == 1 / 2 * (q + KV)
    assert usp["cp.outer", "cp.ring.kv", "forward"] == KV  # twice the positions, half of the heads
    assert usp["cp.outer", "cp.ring.dkv", "backward"] == KV


def test_a_window_ends_the_ring_early():
    """64 positions over 4 ranks, contiguous: a window of 16 reaches into the part before, one of 17 too, one of 1 into
    none; striped every part is near."""
    shifts = {
        window: [m.times for m in messages(Attention("ring", 4, "contiguous", **SIZES, window=window))]
        for window in (1, 2, 16, 17, 18, 64)
    }
    assert shifts == {1: [], 2: [1] * 3, 16: [1] * 3, 17: [1] * 3, 18: [2] * 3, 64: [3] * 3}
    assert [m.times for m in messages(Attention("ring", 4, "striped", **SIZES, window=4))] == [3] * 3


def test_what_is_sent_again_is_what_forward_sent():
    it = Attention("usp", 4, "zigzag", **SIZES, inner=2)
    rows = traffic(it, layers=3, micro=1, recomputed=2)
    forward = {r.key.reason: (r.count, r.payload) for r in rows if r.key.phase == "forward"}
    again = {r.key.reason: (r.count, r.payload) for r in rows if r.key.phase == "recompute"}
    assert forward.keys() == again.keys() == {"cp.ulysses.qkv", "cp.ulysses.out", "cp.ring.kv"}
    assert all(again[reason] == (2 * n // 3, 2 * size // 3) for reason, (n, size) in forward.items())


def test_zigzag_is_even_and_contiguous_as_uneven_as_its_formula():
    """The last of n contiguous parts sees all before it: 2 − 1/n of the mean, about."""
    for cp in (2, 4, 8):
        its = {order: Attention("ring", cp, order, 1, 4096, 8, 2, 64, 2) for order in ORDERS}
        needed = {order: [needed_flops(it, rank)[0] for rank in range(cp)] for order, it in its.items()}
        called = {order: [flops(it, rank)[0] for rank in range(cp)] for order, it in its.items()}
        assert unevenness(needed["zigzag"]) == unevenness(called["zigzag"]) == 1
        assert unevenness(needed["striped"]) < 1.01 and unevenness(called["striped"]) < 1.01
        assert unevenness(needed["contiguous"]) == pytest.approx(2 - 1 / cp, rel=1e-3)
        assert unevenness(called["contiguous"]) == 2 * cp / (cp + 1)
        assert len({sum(shares) for shares in needed.values()}) == 1


def unevenness(shares: list[int]) -> float:
    """The largest over the mean: how much longer everybody waits than if all did the same."""
    return max(shares) * len(shares) / sum(shares)
