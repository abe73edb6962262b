"""Matrix products that several ranks compute together: by columns, by rows, and what they send for it.

With W cut by columns, y = x W is dealt out and each rank needs all of x; cut by rows, each rank needs its part of x
only and the ranks' results are to be added. See tensor.py for how the two go together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.comm.collectives import Group, Pending
from meshwright.parallel.recompute import Recompute
from meshwright.spec.traffic import Phase

T = TypeVar("T")


class Line:
    """The ranks that compute every layer together, as the layers see them.

    sequence: whether each has its part of the sequence outside of the cut products. micro: the micro-batch that
    forward is in. recompute: what computes blocks again, if anything does.
    """

    def __init__(self, group: Group, *, sequence: bool = False, recompute: Recompute | None = None) -> None:
        self.group, self.sequence, self.recompute = group, sequence, recompute
        self.micro: int | None = None

    @property
    def phase(self) -> Phase:
        return "forward" if self.recompute is None else self.recompute.phase

    def kept(self, function: Callable[[], T]) -> T:
        """`function()`, a product and what it sends, which a recompute that keeps products keeps as one."""
        return function() if self.recompute is None else self.recompute.call("linear", function)

    def hollow(self, function: Callable[[], T]) -> T:
        """`function()`, a product of which only the sum over the ranks is worth keeping."""
        return function() if self.recompute is None else self.recompute.hollow("linear", function)

    # -- the sequence -------------------------------------------------------------------------------------------

    def gather(self, x: Tensor, reason: str, phase: Phase, micro: int | None) -> Gathered:
        """Start to gather x [B, T/t, ...] to [B, T, ...]."""
        parts = x.new_empty((self.group.size, *x.shape))
        pending = self.group.all_gather(parts, x.contiguous(), reason=reason, phase=phase, micro=micro, async_=True)
        return Gathered(parts, pending)

    def scatter(self, x: Tensor, reason: str, phase: Phase, micro: int | None) -> tuple[Tensor, Pending]:
        """Start to add the ranks' x [B, T, ...] up, of which each gets its part [B, T/t, ...]."""
        b, t, *rest = x.shape
        parts = x.view(b, self.group.size, t // self.group.size, *rest).transpose(0, 1).contiguous()
        out = torch.empty_like(parts[0])
        return out, self.group.reduce_scatter(out, parts, reason=reason, phase=phase, micro=micro, async_=True)


class Gathered:
    """A sequence on its way together."""

    def __init__(self, parts: Tensor, pending: Pending) -> None:
        self._parts, self._pending = parts, pending

    def wait(self) -> Tensor:
        self._pending.wait()
        size, b, t, *rest = self._parts.shape
        return self._parts.transpose(0, 1).reshape(b, size * t, *rest)


# -- products whose outputs are dealt out -----------------------------------------------------------------------------


class Columns(nn.Module):
    """A linear layer of which this rank computes some outputs: x [..., in], or with `sp` its part -> [..., out/t].

    Backward keeps x, with `sp` the part. Layers that read the same input are computed together when the first is
    called: their input is gathered once, and the gradient with respect to it summed once.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, outputs: int, line: Line, reason: str) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.outputs = outputs  # the weight's dimension
        self.together = Together(line, reason)
        self.together.layers.append(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.together(self, x)


class Together:
    """Layers that read the same input, and what the others of them have put out when one was called."""

    def __init__(self, line: Line, reason: str) -> None:
        self.line, self.reason = line, reason
        self.layers: list[Columns] = []
        self._of: tuple[object, ...] = ()  # the input, and the state of all that the outputs came from
        self._outputs: dict[Columns, Tensor] = {}

    def __call__(self, layer: Columns, x: Tensor) -> Tensor:
        weights = [each.weight for each in self.layers]
        state = torch.is_grad_enabled(), *map(_version, (x, *weights))
        if layer not in self._outputs or self._of[0] is not x or self._of[1:] != state:
            biases = [each.bias for each in self.layers]
            outputs = columns(self.line, self.reason, x, weights, biases, self.layers[0].outputs)
            self._of, self._outputs = (x, *state), dict(zip(self.layers, outputs, strict=True))
        out = self._outputs.pop(layer)
        if not self._outputs:
            self._of = ()
        return out

    def forget(self, *_: object) -> None:
        """Forward of the module that has these layers is over: let go of what it did not ask for."""
        self._of, self._outputs = (), {}


def _version(tensor: Tensor) -> int:
    """How often its memory has been written to in place."""
    return 0 if tensor.is_inference() else tensor._version


def columns(
    line: Line, reason: str, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], outputs: int = 0
) -> tuple[Tensor, ...]:
    """x Wᵀ + b for each weight [out, in] (`outputs` 1: x W + b, [in, out]) from the same x; see Columns."""
    result: tuple[Tensor, ...] = _Columns.apply(line, reason, outputs, x, *weights, *biases)
    return result


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: Line, reason: str, outputs: int, x: Tensor, *rest: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = rest[: len(rest) // 2], rest[len(rest) // 2 :]

        def products() -> list[Tensor]:
            whole = x
            if line.sequence:
                whole = line.gather(x, reason, line.phase, line.micro).wait()
            return [_product(whole, w, b, outputs) for w, b in zip(weights, biases, strict=True)]

        ctx.line, ctx.reason, ctx.micro, ctx.outputs = line, reason, line.micro, outputs
        ctx.biases = [bias is not None for bias in biases]
        ctx.set_materialize_grads(False)
        out = line.kept(products)
        ctx.save_for_backward(x, *weights)
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        line, reason, micro = ctx.line, ctx.reason, ctx.micro
        x, *weights = ctx.saved_tensors
        needs_x, needed = ctx.needs_input_grad[3], ctx.needs_input_grad[4:]
        number = len(weights)
        gathered = line.gather(x, reason, "backward", micro) if line.sequence and any(needed[:number]) else None
        dx, pending = None, None
        if needs_x:
            dx = _input_gradient(grads, weights, ctx.outputs)
        whole = gathered.wait() if gathered is not None else x
        if dx is not None and line.sequence:
            dx, pending = line.scatter(dx, reason, "backward", micro)
        elif dx is not None:
            pending = line.group.all_reduce(dx, reason=reason, phase="backward", micro=micro, async_=True)
        # Under the sum of dx.
        rows = whole.reshape(-1, whole.size(-1))
        dweights = [
            _weight_gradient(rows, grad, ctx.outputs) if wanted and grad is not None else None
            for grad, wanted in zip(grads, needed[:number], strict=True)
        ]
        dbiases = [
            grad.reshape(-1, grad.size(-1)).sum(0) if wanted and grad is not None else None
            for grad, wanted in zip(grads, needed[number:], strict=True)
        ]
        if pending is not None:
            pending.wait()
        return None, None, None, dx, *dweights, *dbiases


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    matrix = weight.t() if outputs == 0 else weight
    rows = x.reshape(-1, x.size(-1))
    out = rows @ matrix if bias is None else torch.addmm(bias, rows, matrix)
    return out.view(*x.shape[:-1], out.size(-1))


def _input_gradient(grads: Sequence[Tensor | None], weights: Sequence[Tensor], outputs: int) -> Tensor:
    dx: Tensor | None = None
    shape: torch.Size | None = None
    for grad, weight in zip(grads, weights, strict=True):
        if grad is None:
            continue
        shape = grad.shape
        rows, matrix = grad.reshape(-1, grad.size(-1)), weight if outputs == 0 else weight.t()
        dx = rows @ matrix if dx is None else dx.addmm_(rows, matrix)
    assert dx is not None and shape is not None  # autograd asks for nothing where no output has a gradient
    return dx.view(*shape[:-1], dx.size(-1))


def _weight_gradient(rows: Tensor, grad: Tensor, outputs: int) -> Tensor:
    other = grad.reshape(-1, grad.size(-1))
    return other.t() @ rows if outputs == 0 else rows.t() @ other


# -- products whose inputs are dealt out ------------------------------------------------------------------------------


class Rows(nn.Module):
    """A linear layer of which this rank has some inputs: x [..., in/t] -> [..., out], or its part of the sequence.

    The bias is whole and added once, to the sum. Backward keeps x.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, outputs: int, line: Line, reason: str) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.outputs, self.line, self.reason = outputs, line, reason

    def forward(self, x: Tensor) -> Tensor:
        part = self.line.hollow(lambda: self._product(x))
        out = summed_over(self.line, self.reason, part)
        return out if self.bias is None else out + self.bias

    def _product(self, x: Tensor) -> Tensor:
        if self.outputs == 0:
            return F.linear(x, self.weight)
        return (x.reshape(-1, x.size(-1)) @ self.weight).view(*x.shape[:-1], self.weight.size(1))


def summed_over(line: Line, reason: str, part: Tensor) -> Tensor:
    """The sum of the ranks' parts [B, T, D], with `sp` this rank's part of the sequence of it. Overwrites `part`."""
    out: Tensor = _Sum.apply(line, reason, part)
    return out


class _Sum(torch.autograd.Function):
    """Its gradient: all ranks have it already; with `sp` it is gathered. Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, line: Line, reason: str, part: Tensor) -> Tensor:
        ctx.line, ctx.reason, ctx.micro = line, reason, line.micro

        def send() -> Tensor:
            if line.sequence:
                out, pending = line.scatter(part, reason, line.phase, line.micro)
                pending.wait()
                return out
            out = part.detach()  # another tensor, of the same memory
            line.group.all_reduce(out, reason=reason, phase=line.phase, micro=line.micro)
            return out

        return line.kept(send)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:  # type: ignore[override]
        if ctx.line.sequence:
            grad = ctx.line.gather(grad, ctx.reason, "backward", ctx.micro).wait()
        return None, None, grad
