"""Matrix products that several ranks compute together: by columns, by rows, and what they send for it.

With W cut by columns, y = x W is dealt out and each rank needs all of x; cut by rows, each rank needs its part of x
only and the ranks' results are to be added. See tensor.py for how the two go together: columns deal out what rows
take. The options of the layers are for any other order, at the price of more bytes (docs/tensor.md compares them).
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

SEQUENCE, FEATURES = 1, -1
"""Dimensions of x [B, T, D]."""


class Line:
    """The ranks that compute every layer together, as the layers see them.

    sequence: whether each has its part of the sequence outside of the cut products. chunks: pieces in which forward
    gathers it, each multiplied while the next ones are on the wire. micro: the micro-batch that forward is in.
    recompute: what computes blocks again, if anything does.
    """

    def __init__(
        self, group: Group, *, sequence: bool = False, chunks: int = 1, recompute: Recompute | None = None
    ) -> None:
        assert chunks >= 1, chunks
        self.group, self.sequence, self.chunks, self.recompute = group, sequence, chunks, recompute
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

    # -- the sequence, or another dimension -----------------------------------------------------------------------

    def gather(self, x: Tensor, reason: str, phase: Phase, micro: int | None, dim: int = SEQUENCE) -> Gathered:
        """Start to gather x [B, T/t, ...] to [B, T, ...], or along another dimension."""
        parts = x.new_empty((self.group.size, *x.shape))
        pending = self.group.all_gather(parts, x.contiguous(), reason=reason, phase=phase, micro=micro, async_=True)
        return Gathered(parts, pending, dim % x.dim())

    def scatter(
        self, x: Tensor, reason: str, phase: Phase, micro: int | None, dim: int = SEQUENCE
    ) -> tuple[Tensor, Pending]:
        """Start to add the ranks' x [B, T, ...] up, of which each gets its part [B, T/t, ...]; or along another one."""
        parts = x.unflatten(dim, (self.group.size, -1)).movedim(dim % x.dim(), 0).contiguous()
        out = torch.empty_like(parts[0])
        return out, self.group.reduce_scatter(out, parts, reason=reason, phase=phase, micro=micro, async_=True)


class Gathered:
    """A tensor on its way together."""

    def __init__(self, parts: Tensor, pending: Pending, dim: int) -> None:
        self._parts: Tensor | None = parts
        self._pending, self._dim = pending, dim

    def wait(self) -> Tensor:
        """The whole, once; a copy but where a single sequence lies in order as it came."""
        self._pending.wait()
        parts, self._parts = self._parts, None
        assert parts is not None
        return parts.movedim(0, self._dim).flatten(self._dim, self._dim + 1)


# -- products whose outputs are dealt out ----------------------------------------------------------------------------


class Columns(nn.Module):
    """A linear layer of which this rank computes some outputs: x [..., in], or with `sp` its part -> [..., out/t].

    Backward keeps x, with `sp` the part. Layers that read the same input are computed together when the first is
    called: their input is gathered once, and the gradient with respect to it summed once. gather_input: x is what
    columns have put out, [..., in/t], and gathered; backward keeps all of it and scatters the sum of its gradient.
    gather_output: -> [..., out], whose gradient must be the same on all ranks.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        outputs: int,
        line: Line,
        reason: str,
        *,
        gather_input: bool = False,
        gather_output: bool = False,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.outputs = outputs  # the weight's dimension
        self.gather_input, self.gather_output = gather_input, gather_output
        self.together = Together(line, reason)
        self.together.layers.append(self)

    @property
    def companions(self) -> list[Columns]:
        """Layers whose parameters are read when this one is called."""
        return self.together.layers

    def forward(self, x: Tensor) -> Tensor:
        out = self.together(self, x)
        return whole_features(self.together.line, self.together.reason, out) if self.gather_output else out


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
            outputs = columns(
                self.line, self.reason, x, weights, biases, layer.outputs, gather_input=layer.gather_input
            )
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
    line: Line,
    reason: str,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outputs: int = 0,
    *,
    gather_input: bool = False,
) -> tuple[Tensor, ...]:
    """x Wᵀ + b for each weight [out, in] (`outputs` 1: x W + b, [in, out]) from the same x; see Columns."""
    dim = FEATURES if gather_input else SEQUENCE if line.sequence else None
    result: tuple[Tensor, ...] = _Columns.apply(line, reason, outputs, dim, x, *weights, *biases)
    return result


class _Columns(torch.autograd.Function):
    """dim: along which x is gathered; None where it is whole already."""

    @staticmethod
    def forward(
        ctx: Any, line: Line, reason: str, outputs: int, dim: int | None, x: Tensor, *rest: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = rest[: len(rest) // 2], rest[len(rest) // 2 :]

        def gathered() -> Tensor:
            return x if dim is None else line.gather(x, reason, line.phase, line.micro, dim).wait()

        def products(whole: Tensor) -> list[Tensor]:
            return [_product(whole, w, b, outputs) for w, b in zip(weights, biases, strict=True)]

        ctx.line, ctx.reason, ctx.micro, ctx.outputs, ctx.dim = line, reason, line.micro, outputs, dim
        ctx.set_materialize_grads(False)
        kept = x
        if dim == SEQUENCE and line.chunks > 1:
            out = line.kept(lambda: _in_chunks(line, reason, x, products))
        elif dim == FEATURES:
            kept = gathered()
            out = line.kept(lambda: products(kept))
        else:
            out = line.kept(lambda: products(gathered()))
        ctx.save_for_backward(kept, *weights)
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        line, reason, micro, dim = ctx.line, ctx.reason, ctx.micro, ctx.dim
        x, *weights = ctx.saved_tensors
        needs_x, needed = ctx.needs_input_grad[4], ctx.needs_input_grad[5:]
        number = len(weights)
        again = dim == SEQUENCE and any(needed[:number])
        gathered = line.gather(x, reason, "backward", micro) if again else None
        dx, pending = None, None
        if needs_x:
            dx = _input_gradient(grads, weights, ctx.outputs)
        whole = gathered.wait() if gathered is not None else x
        if dx is not None and dim is not None:
            dx, pending = line.scatter(dx, reason, "backward", micro, dim)
        elif dx is not None:
            pending = line.group.all_reduce(dx, reason=reason, phase="backward", micro=micro, async_=True, awaited=True)
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
        return None, None, None, None, dx, *dweights, *dbiases


def _in_chunks(line: Line, reason: str, x: Tensor, products: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
    """The products with the whole of x [B, T/t, in], gathered in pieces: of every rank's part the first, and so on."""
    size = line.group.size
    pieces = x.chunk(line.chunks, dim=SEQUENCE)
    on_their_way = [line.gather(piece, reason, line.phase, line.micro) for piece in pieces]
    outs: list[Tensor] = []
    start = 0
    for piece, gathered in zip(pieces, on_their_way, strict=True):
        stop = start + piece.size(SEQUENCE)
        found = products(gathered.wait())
        if not outs:
            outs = [each.new_empty((len(x), size, x.size(SEQUENCE), each.size(-1))) for each in found]
        for out, each in zip(outs, found, strict=True):
            out[:, :, start:stop] = each.unflatten(SEQUENCE, (size, -1))
        start = stop
    return [out.flatten(1, 2) for out in outs]


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


# -- products whose inputs are dealt out -----------------------------------------------------------------------------


class Rows(nn.Module):
    """A linear layer of which this rank has some inputs: x [..., in/t] -> [..., out], or its part of the sequence.

    The bias is whole and added once, to the sum. Backward keeps x. scatter_input: x is whole, [..., in], and the same
    on all ranks; each takes its part, which it keeps, and gathers the gradient.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        outputs: int,
        line: Line,
        reason: str,
        *,
        scatter_input: bool = False,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.outputs, self.line, self.reason, self.scatter_input = outputs, line, reason, scatter_input

    def forward(self, x: Tensor) -> Tensor:
        if self.scatter_input:
            x = own_features(self.line, self.reason, x)
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
            line.group.all_reduce(out, reason=reason, phase=line.phase, micro=line.micro, awaited=True)
            return out

        return line.kept(send)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:  # type: ignore[override]
        if ctx.line.sequence:
            grad = ctx.line.gather(grad, ctx.reason, "backward", ctx.micro).wait()
        return None, None, grad


# -- from dealt out to whole, and back -------------------------------------------------------------------------------


def whole_features(line: Line, reason: str, part: Tensor) -> Tensor:
    """The ranks' [..., n/t] side by side, [..., n]. Keeps nothing; its gradient, the same on all ranks, is cut."""
    out: Tensor = _Whole.apply(line, reason, part)
    return out


def own_features(line: Line, reason: str, whole: Tensor) -> Tensor:
    """This rank's part [..., n/t] of what is the same on all ranks, [..., n]. Its gradient is gathered."""
    out: Tensor = _Own.apply(line, reason, whole)
    return out


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: Line, reason: str, part: Tensor) -> Tensor:
        ctx.line = line
        return line.gather(part, reason, line.phase, line.micro, FEATURES).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:  # type: ignore[override]
        return None, None, _own(ctx.line, grad)


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: Line, reason: str, whole: Tensor) -> Tensor:
        ctx.line, ctx.reason, ctx.micro = line, reason, line.micro
        return _own(line, whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:  # type: ignore[override]
        return None, None, ctx.line.gather(grad, ctx.reason, "backward", ctx.micro, FEATURES).wait()


def _own(line: Line, whole: Tensor) -> Tensor:
    """A copy: a view would keep all of it."""
    return whole.unflatten(FEATURES, (line.group.size, -1))[..., line.group.rank, :].contiguous()
