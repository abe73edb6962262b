"""Ring attention (Liu et al. 2023; Megatron-LM): keys and values go around, and partial outputs are merged.

Each rank keeps its queries. It computes with its own keys and values while those of the rank before it are on the
wire, then with these while the next come, and so on around the ring; log-sum-exps say how much of each partial output
counts (blockwise.py). Backward sends keys and values around again, and one step behind them their gradients, to which
each rank adds its share; from the last rank that had something to add they go home, where the own share has stayed.

    ============  =======================================  ================================================
    on the wire   forward                                  backward
    ============  =======================================  ================================================
    k and v       cp − 1 shifts, under the kernels         cp − 1 shifts, under the kernels
    dk and dv                                              cp − 1 shifts, all but the last under the kernels
    ============  =======================================  ================================================

One message holds a rank's k and v, with the heads that they have: grouped heads are never repeated. No rank holds more
of them than its own, those it computes with and those that come; there is no T × T/cp matrix anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.comm.collectives import Group, Pending
from meshwright.parallel.blockwise import Merged, Summed, gradients, keeping, merge
from meshwright.parallel.sight import Call, Context
from meshwright.spec.traffic import Phase


def attend(context: Context, q: Tensor, kv: Tensor, causal: bool, window: int | None) -> Tensor:
    """q [B, n, H, d], kv [2, B, n, K, d] -> [B, n, H, d], of n positions a rank of the ring."""
    out: Tensor = _Ring.apply(context, causal, window, q, kv)
    return out


class _Ring(torch.autograd.Function):
    """Keeps q, kv, the output and the log-sum-exps, all of this rank's part."""

    @staticmethod
    def forward(ctx: Any, context: Context, causal: bool, window: int | None, q: Tensor, kv: Tensor) -> Tensor:
        return keeping(ctx, context, causal, window, q, kv, _forward)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, None, None, *_backward(ctx.context, ctx.calls, ctx.micro, grad, *ctx.saved_tensors)


def _forward(context: Context, calls: Sequence[Sequence[Call]], q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    reason = "cp.ring.kv"
    merged = Merged(q)
    parts = around(context.ring, kv, len(calls) - 1, reason, context.phase, context.micro)
    for theirs, part in zip(calls, parts, strict=True):
        merge(merged, theirs, q, part)
    return merged.result()


def _backward(
    context: Context,
    calls: Sequence[Sequence[Call]],
    micro: int | None,
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:
    dq = Summed(q)
    parts = around(context.ring, kv, len(calls) - 1, "cp.ring.kv", "backward", micro)
    behind = Behind(context.ring, kv, "cp.ring.dkv", micro)
    for distance, (theirs, part) in enumerate(zip(calls, parts, strict=True)):
        share = behind.next()
        gradients(dq, share, theirs, grad, q, part, out, lse)
        behind.add(last=distance == len(calls) - 1)
    return dq.result(), behind.home(len(calls) - 1)


# -- what goes around ------------------------------------------------------------------------------------------------


def around(group: Group, own: Tensor, shifts: int, reason: str, phase: Phase, micro: int | None) -> Iterator[Tensor]:
    """`own`, then the `own` of the rank before, and so on for `shifts` ranks, each while the next is on the wire.

    A tensor is valid until the next one is asked for.
    """
    buffers = [group.scratch.take(own.numel(), own.dtype, own.device).view_as(own) for _ in range(min(shifts, 2))]
    current = own
    for step in range(shifts + 1):
        pending, coming = None, None
        if step < shifts:
            coming = buffers[step % 2]
            pending = group.shift(coming, current, reason=reason, phase=phase, micro=micro, async_=True)
        yield current
        if pending is not None and coming is not None:
            pending.wait()
            current = coming
    for buffer in buffers:
        group.scratch.give(buffer)


class Behind:
    """Sums that go around one step behind what they are gradients of, like `own`.

    At each step `next` gives a tensor for this rank's share, and `add` adds it to what came from the rank before, and
    sends it on under the next step's work. What a rank adds to its own stays; after the last step `home` brings the
    rest to it.
    """

    def __init__(self, group: Group, own: Tensor, reason: str, micro: int | None) -> None:
        self._group, self._reason, self._micro = group, reason, micro
        self._own = torch.empty_like(own)
        self._shares: list[Tensor] = []  # this step's, and the one that is being sent; none in the first
        self._coming: Tensor | None = None
        self._pending: Pending | None = None

    def next(self) -> Tensor:
        return self._shares[0] if self._shares else self._own

    def add(self, last: bool) -> None:
        """The share is there. last: nobody has anything to add to it behind this rank."""
        if not self._shares:
            if not last:
                self._shares.append(self._take())
            return
        share = self._shares[0]
        if self._pending is not None and self._coming is not None:
            self._pending.wait()
            share += self._coming
        if self._coming is None:
            self._coming = self._take()
            if not last:
                self._shares.append(self._take())
        if not last:
            self._pending = self._shift(self._coming, share, 1)
            self._shares.reverse()

    def home(self, shifts: int) -> Tensor:
        """The sum of this rank's own, after as many `shifts`."""
        if self._coming is not None:
            self._shift(self._coming, self._shares[0], self._group.size - shifts).wait()
            self._own += self._coming
            for buffer in (*self._shares, self._coming):
                self._group.scratch.give(buffer)
        return self._own

    def _take(self) -> Tensor:
        return self._group.scratch.take(self._own.numel(), self._own.dtype, self._own.device).view_as(self._own)

    def _shift(self, out: Tensor, t: Tensor, distance: int) -> Pending:
        return self._group.shift(
            out, t, distance, reason=self._reason, phase="backward", micro=self._micro, async_=True
        )
