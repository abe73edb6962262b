"""A collective under way: one handle that owns its work and its buffers."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from meshwright.comm.check import Call
from meshwright.comm.works import Work
from meshwright.spec.errors import RunError

if TYPE_CHECKING:
    from meshwright.comm.collectives import Group


class DroppedOperation(ResourceWarning):
    """An asynchronous operation whose handle was freed before its `wait`: its result may never have been there."""


class Pending:
    """One operation under way: owns its work and keeps its buffers alive until `wait`."""

    __slots__ = ("_buffers", "_call", "_finish", "_group", "_sequence", "_work")

    def __init__(
        self,
        group: Group | None = None,
        call: Call | None = None,
        sequence: int = 0,
        work: Work | None = None,
        buffers: tuple[Tensor, ...] = (),
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._group = group  # None: nothing to wait for
        self._call = call
        self._sequence = sequence
        self._work = work
        self._buffers = buffers
        self._finish = finish

    def wait(self) -> None:
        """Return once the result may be used: on the CPU when it is there; on an accelerator the current stream
        waits and the host does not. Calling it again does nothing.

        Raises RunError when a rank is gone or the group's timeout has passed.
        """
        group, self._group = self._group, None
        if group is None:
            return
        assert self._call is not None
        started = time.perf_counter()
        group.blackbox.enter_again(self._sequence, self._call.op, group.axis, self._call.reason)
        try:
            if group.checker is not None:
                self._work = group.checker.before_wait(self._call) or self._work
            if self._work is not None:
                self._work.wait()
            if self._finish is not None:
                self._finish()
        except RuntimeError as exc:
            # The buffers stay: where one rank is gone, messages of the others may still arrive in them.
            raise failed(self._call, exc) from exc
        finally:
            group.ledger.blocked(time.perf_counter() - started)
        if (trace := group.tracing.now) is not None:
            trace.waited(self._sequence, self._call, group.axis, started)
        call, self._call = self._call, None
        self._work, self._buffers, self._finish = None, (), None
        group.blackbox.leave()
        if group.checker is not None:
            group.checker.after(call)

    def let_go(self) -> None:
        """Wait, on a thread of one's own, and free the buffers. Nobody else is told, and what goes wrong stays: that is
        for the `wait` that must follow."""
        if self._work is None:
            return
        with contextlib.suppress(RuntimeError):
            self._work.wait()
            if self._group is not None and (trace := self._group.tracing.now) is not None:
                trace.ended(self._sequence)
            assert self._call is not None
            # Gloo's sends can be waited for only once.
            self._work, self._buffers, self._call.tensors = None, (), ()

    def __del__(self) -> None:
        if getattr(self, "_group", None) is not None:
            warnings.warn(f"{self._call} was dropped without wait()", DroppedOperation, stacklevel=2)


def failed(call: Call, exc: RuntimeError) -> RunError:
    return RunError(f"{call} failed: {str(exc).splitlines()[0] if str(exc) else type(exc).__name__}")
