"""The collectives of one group of ranks, each with its reason, and each in the ledger.

Every operation says why it happens (`reason`), in which `phase` and for which micro-batch (`micro`, None for what
happens once a step): given explicitly, because CUDA runs backward on another thread. With `async_=True` it returns at
once, and the caller must `wait` for the Pending before it reads, writes or frees the tensors; operations run in the
order in which they were issued, which must be the same on every rank of the group.

The ledger counts the payload of the whole tensor: all_reduce, broadcast and reduce the tensor's; all_gather and
gather the output's; reduce_scatter and scatter the input's; all_to_all what this rank puts in; shift, send and recv
the message's. A group of one rank communicates nothing and records nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.blackbox import BlackBox
from meshwright.comm.check import Call, Checker
from meshwright.comm.ledger import Ledger
from meshwright.comm.pending import Pending, failed
from meshwright.comm.scratch import Scratch
from meshwright.comm.trace import Tracing
from meshwright.comm.works import Work, Works
from meshwright.spec.traffic import Operation, Phase, lent_to_sum

ReduceOp = Literal["sum", "min", "max"]
DIRECT_BYTES = 1 << 18  # parts from this size on are gathered by direct messages on the CPU
EXCHANGE_TAG = 1  # keeps them apart from `send` and `recv`, which use 0
SHIFT_TAG = 2
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Group:
    """The ranks along one axis (or several) of the mesh that this rank communicates with.

    axis: "dp", or "dp+cp" for a group over several axes, or "world". ranks: their numbers in the world, ascending;
    `rank` and every `src` and `dst` are places in that list. All tensors are contiguous and on the mesh's device.
    """

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        rank: int,
        process_group: dist.ProcessGroup | None,
        ledger: Ledger,
        blackbox: BlackBox,
        checker: Checker | None = None,
        scratch: Scratch | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        assert process_group is not None or len(ranks) == 1
        self.axis = axis
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.process_group = process_group
        self.ledger = ledger
        self.blackbox = blackbox
        self.scratch = scratch or Scratch()
        self.checker = checker
        self.tracing = tracing or Tracing()

    def __repr__(self) -> str:
        return f"Group({self.axis}, rank {self.rank} of {self.ranks})"

    # -- everybody has the same tensor -----------------------------------------------------------------------------

    def all_reduce(
        self,
        t: Tensor,
        *,
        reason: str,
        phase: Phase,
        micro: int | None = None,
        op: ReduceOp = "sum",
        async_: bool = False,
        awaited: bool = False,
    ) -> Pending:
        """Replace `t` on every rank by the reduction of all ranks' `t`.

        awaited: nothing much can be done until it is there. On the CPU small ones are then sent to all ranks at once
        and reduced by each, in the same order, where Gloo's go twice around a ring; `lent_to_sum` bytes are borrowed.
        """
        if self.size == 1:
            return Pending()
        call = Call("all_reduce", reason, self.axis, (t,), reduction=op)
        if awaited and t.device.type == "cpu" and lent_to_sum(self.size, _bytes(t)):
            parts = self.scratch.take(self.size * t.numel(), t.dtype)

            def finish() -> None:
                _reduce_parts(t.view(-1), parts.view(self.size, -1), op)
                self.scratch.give(parts)

            return self._issue(
                call, phase, micro, _bytes(t), async_, lambda: self._exchange(parts, t), (parts,), finish
            )
        return self._issue(
            call, phase, micro, _bytes(t), async_,
            lambda: dist.all_reduce(t, _REDUCE_OPS[op], self.process_group, async_op=True),
        )  # fmt: skip

    def broadcast(
        self, t: Tensor, src: int, *, reason: str, phase: Phase, micro: int | None = None, async_: bool = False
    ) -> Pending:
        """Replace `t` on every rank by that of `src`."""
        if self.size == 1:
            return Pending()
        call = Call("broadcast", reason, self.axis, (t,), root=src)
        return self._issue(
            call, phase, micro, _bytes(t), async_,
            lambda: dist.broadcast(t, group=self.process_group, group_src=src, async_op=True),
        )  # fmt: skip

    def reduce(
        self,
        t: Tensor,
        dst: int,
        *,
        reason: str,
        phase: Phase,
        micro: int | None = None,
        op: ReduceOp = "sum",
        async_: bool = False,
    ) -> Pending:
        """Replace `t` on `dst` by the reduction of all ranks' `t`; on the others `t` is left with no defined value."""
        if self.size == 1:
            return Pending()
        call = Call("reduce", reason, self.axis, (t,), reduction=op, root=dst)
        return self._issue(
            call, phase, micro, _bytes(t), async_,
            lambda: dist.reduce(t, group=self.process_group, group_dst=dst, op=_REDUCE_OPS[op], async_op=True),
        )  # fmt: skip

    # -- parts and wholes ------------------------------------------------------------------------------------------

    def all_gather(
        self, out: Tensor, t: Tensor, *, reason: str, phase: Phase, micro: int | None = None, async_: bool = False
    ) -> Pending:
        """Fill `out` with the ranks' `t`, one after the other in the group's order; `t` may be its own place in it.

        On the CPU large parts go from each rank to each other one directly: Gloo's own takes three times as long.
        """
        assert out.numel() == self.size * t.numel() and out.dtype == t.dtype, (out.shape, t.shape, self)
        if self.size == 1:
            _copy(out, t)
            return Pending()
        call = Call("all_gather", reason, self.axis, (t,))
        directly = t.device.type == "cpu" and _bytes(t) >= DIRECT_BYTES
        return self._issue(
            call, phase, micro, _bytes(out), async_,
            (lambda: self._exchange(out, t)) if directly
            else (lambda: dist.all_gather_single(out.view(-1), t.view(-1), self.process_group, async_op=True)), (out,),
        )  # fmt: skip

    def reduce_scatter(
        self,
        out: Tensor,
        t: Tensor,
        *,
        reason: str,
        phase: Phase,
        micro: int | None = None,
        op: ReduceOp = "sum",
        async_: bool = False,
    ) -> Pending:
        """Fill `out` with this rank's part of the reduction of all ranks' `t`, which is cut into equal parts.

        On the CPU it is an all-to-all and a local reduction: Gloo's own takes about three times as long.
        """
        assert t.numel() == self.size * out.numel() and out.dtype == t.dtype, (out.shape, t.shape, self)
        if self.size == 1:
            _copy(out, t)
            return Pending()
        call = Call("reduce_scatter", reason, self.axis, (t,), reduction=op)
        if t.device.type != "cpu":
            return self._issue(
                call, phase, micro, _bytes(t), async_,
                lambda: dist.reduce_scatter_single(
                    out.view(-1), t.view(-1), _REDUCE_OPS[op], self.process_group, async_op=True
                ), (out,),
            )  # fmt: skip
        parts = self.scratch.take(t.numel(), t.dtype)

        def finish() -> None:
            _reduce_parts(out.view(-1), parts.view(self.size, -1), op)
            self.scratch.give(parts)

        return self._issue(
            call, phase, micro, _bytes(t), async_,
            lambda: dist.all_to_all_single(parts, t.view(-1), group=self.process_group, async_op=True),
            (out, parts), finish,
        )  # fmt: skip

    def gather(
        self,
        out: Sequence[Tensor] | None,
        t: Tensor,
        dst: int,
        *,
        reason: str,
        phase: Phase,
        micro: int | None = None,
        async_: bool = False,
    ) -> Pending:
        """Fill `out` on `dst` with the ranks' `t`, all of one shape; `out` is None on the others."""
        assert (out is not None) == (self.rank == dst), f"out belongs to rank {dst} of {self}, and only to it"
        if self.size == 1:
            _copy(_only(out), t)
            return Pending()
        call = Call("gather", reason, self.axis, (t,), root=dst)
        parts = None if out is None else list(out)
        assert parts is None or _alike(parts, t, self.size), f"{call}: {self.size} parts like the rank's own"
        return self._issue(
            call, phase, micro, self.size * _bytes(t), async_,
            lambda: dist.gather(t, parts, group=self.process_group, group_dst=dst, async_op=True), tuple(parts or ()),
        )  # fmt: skip

    def scatter(
        self,
        t: Tensor,
        parts: Sequence[Tensor] | None,
        src: int,
        *,
        reason: str,
        phase: Phase,
        micro: int | None = None,
        async_: bool = False,
    ) -> Pending:
        """Fill `t` with this rank's of the `parts` on `src`, all of one shape; `parts` is None on the others."""
        assert (parts is not None) == (self.rank == src), f"parts belong to rank {src} of {self}, and only to it"
        if self.size == 1:
            _copy(t, _only(parts))
            return Pending()
        call = Call("scatter", reason, self.axis, (t,), root=src)
        given = None if parts is None else list(parts)
        assert given is None or _alike(given, t, self.size), f"{call}: {self.size} parts like the rank's own"
        return self._issue(
            call, phase, micro, self.size * _bytes(t), async_,
            lambda: dist.scatter(t, given, group=self.process_group, group_src=src, async_op=True), tuple(given or ()),
        )  # fmt: skip

    def all_to_all(
        self,
        out: Tensor,
        t: Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        *,
        reason: str,
        phase: Phase,
        micro: int | None = None,
        async_: bool = False,
    ) -> Pending:
        """Send part j of `t` to rank j, and fill part j of `out` with what rank j sent.

        Parts run along the first dimension: `in_splits[j]` rows of `t` and `out_splits[j]` rows of `out`, all equal
        where no splits are given. The ledger's bytes on the wire leave out what a rank keeps.
        """
        given, taken = _splits(t, in_splits, self.size), _splits(out, out_splits, self.size)
        assert out.dtype == t.dtype and out.shape[1:] == t.shape[1:], (out.shape, t.shape)
        if self.size == 1:
            _copy(out, t)
            return Pending()
        row = _bytes(t) // t.shape[0] if t.shape[0] else 0
        call = Call("all_to_all", reason, self.axis, (t,), splits=(given, taken))
        return self._issue(
            call, phase, micro, _bytes(t), async_,
            lambda: dist.all_to_all_single(
                out, t, None if out_splits is None else list(taken), None if in_splits is None else list(given),
                self.process_group, async_op=True,
            ), (out,), sent=row * (t.shape[0] - given[self.rank]),
        )  # fmt: skip

    def shift(
        self,
        out: Tensor,
        t: Tensor,
        distance: int = 1,
        *,
        reason: str,
        phase: Phase,
        micro: int | None = None,
        async_: bool = False,
    ) -> Pending:
        """Send `t` to the rank `distance` places on, round and round, and fill `out` with what comes from as far back.

        All ranks of the group do so together; `out` shares no memory with `t`.
        """
        assert out.shape == t.shape and out.dtype == t.dtype, (out.shape, t.shape, self)
        if distance % self.size == 0:
            _copy(out, t)
            return Pending()
        call = Call("shift", reason, self.axis, (t,), distance=distance)
        return self._issue(
            call, phase, micro, _bytes(t), async_, lambda: self._send_on(out, t, distance), (out,),
        )  # fmt: skip

    # -- two ranks -------------------------------------------------------------------------------------------------

    def send(
        self, t: Tensor, dst: int, *, reason: str, phase: Phase, micro: int | None = None, async_: bool = False
    ) -> Pending:
        """Send `t` to `dst`, which receives it with `recv`; messages between two ranks keep their order."""
        assert dst != self.rank, f"a message to itself in {self}"
        call = Call("send", reason, self.axis, (t,), root=dst)
        return self._issue(
            call, phase, micro, _bytes(t), async_,
            lambda: dist.isend(t, group=self.process_group, group_dst=dst),
        )  # fmt: skip

    def recv(
        self, t: Tensor, src: int, *, reason: str, phase: Phase, micro: int | None = None, async_: bool = False
    ) -> Pending:
        """Fill `t` with the message that `src` sends; shape and dtype must be the sender's."""
        assert src != self.rank, f"a message from itself in {self}"
        call = Call("recv", reason, self.axis, (t,), root=src)
        return self._issue(
            call, phase, micro, _bytes(t), async_,
            lambda: dist.irecv(t, group=self.process_group, group_src=src),
        )  # fmt: skip

    def barrier(self, reason: str) -> None:
        """Return once every rank of the group has come. Moves no tensor, so the ledger does not list it."""
        if self.size == 1:
            return
        call = Call("barrier", reason, self.axis, ())
        devices = [torch.accelerator.current_device_index()] if dist.get_backend(self.process_group) == "nccl" else None
        self._issue(
            call, None, None, 0, False,
            lambda: dist.barrier(self.process_group, async_op=True, device_ids=devices),
        )  # fmt: skip

    def _exchange(self, out: Tensor, t: Tensor) -> Works:
        """An all-gather of messages between every two ranks, each received where it belongs."""
        parts = out.view(self.size, -1)
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        works = [
            dist.irecv(parts[other], group=self.process_group, group_src=other, tag=EXCHANGE_TAG)
            for other in reversed(others)
        ]
        works += [
            dist.isend(t.view(-1), group=self.process_group, group_dst=other, tag=EXCHANGE_TAG) for other in others
        ]
        _copy(parts[self.rank], t)
        return Works(works)

    def _send_on(self, out: Tensor, t: Tensor, distance: int) -> Works:
        ahead, behind = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        group = self.process_group
        # One batch: NCCL would wait for a receive that the sender has not come to.
        return Works(
            dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.irecv, out, group=group, tag=SHIFT_TAG, group_peer=behind),
                    dist.P2POp(dist.isend, t, group=group, tag=SHIFT_TAG, group_peer=ahead),
                ]
            )
        )

    # -- how it is done --------------------------------------------------------------------------------------------

    def _issue(
        self,
        call: Call,
        phase: Phase | None,
        micro: int | None,
        payload: int,
        async_: bool,
        start: Callable[[], Work | None],
        buffers: tuple[Tensor, ...] = (),
        finish: Callable[[], None] | None = None,
        sent: int = 0,
    ) -> Pending:
        assert all(t.is_contiguous() for t in (*call.tensors, *buffers)), f"{call}: tensors must be contiguous"
        if phase is not None:
            operation: Operation = call.op  # type: ignore[assignment]
            self.ledger.record(operation, self.axis, call.reason, phase, micro, self.size, payload, sent)
        started = time.perf_counter()
        sequence = self.blackbox.enter(call.op, self.axis, call.reason)
        try:
            work = start() if self.checker is None else self.checker.issue(call, start)
        except RuntimeError as exc:
            raise failed(call, exc) from exc
        finally:
            self.ledger.blocked(time.perf_counter() - started)
        if (trace := self.tracing.now) is not None:
            trace.issued(sequence, call, self.axis, phase, micro, payload, started)
        pending = Pending(self, call, sequence, work, call.tensors + buffers, finish)
        if async_:
            self.blackbox.leave()
        else:
            pending.wait()
        return pending


def _bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def _alike(parts: Sequence[Tensor], t: Tensor, size: int) -> bool:
    return len(parts) == size and all(p.shape == t.shape and p.dtype == t.dtype for p in parts)


def _copy(out: Tensor, t: Tensor) -> None:
    if out.data_ptr() != t.data_ptr():
        out.view(-1).copy_(t.view(-1))


def _only(parts: Sequence[Tensor] | None) -> Tensor:
    assert parts is not None and len(parts) == 1
    return parts[0]


def _splits(t: Tensor, splits: Sequence[int] | None, size: int) -> tuple[int, ...]:
    if splits is None:
        assert t.shape[0] % size == 0, f"{t.shape[0]} rows do not divide over {size} ranks; give splits"
        return (t.shape[0] // size,) * size
    assert len(splits) == size and sum(splits) == t.shape[0], (tuple(splits), t.shape, size)
    return tuple(splits)


def _reduce_parts(out: Tensor, parts: Tensor, op: ReduceOp) -> None:
    """Reduce the rows of `parts` into `out`, always in rank order, so that the result does not depend on timing.

    Row by row: torch's reduction over a first dimension of few rows takes twice as long.
    """
    combine = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}[op]
    combine(parts[0], parts[1], out=out)
    for row in parts[2:]:
        combine(out, row, out=out)
