"""The sum of token losses, over all logits at once or never holding more than those of a chunk of tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.spec.run import LOSS_ROWS

IGNORE = -100  # a target that does not count


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Σ over targets that count of −log softmax(logits)[target], 0-dim, in float32 at least.

    logits [..., V], targets i64[...]. No target that counts: 0, with zero gradients.
    Backward keeps the logarithm of the softmax, as large as the logits, and not the logits.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    return F.cross_entropy(wide, targets.flatten(), reduction="sum", ignore_index=IGNORE)


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same from hidden states [..., D] and the head's weight [V, D], logits = hidden · weightᵀ.

    Gradients are computed in forward, as each chunk of logits passes; backward keeps them (as large as hidden and
    weight) and scales them.
    """
    return _Chunked.apply(hidden.flatten(0, -2), weight, targets.flatten(), torch.is_grad_enabled())


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, backward_follows: bool) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        # In here autograd is off either way, so the caller tells; needs_input_grad alone is true for evaluation too.
        for_hidden, for_weight = (backward_follows and needed for needed in ctx.needs_input_grad[:2])
        dhidden = torch.empty_like(hidden) if for_hidden else None
        dweight = torch.zeros_like(weight, dtype=wide) if for_weight else None
        for begin in range(0, len(hidden), LOSS_ROWS):
            part, target = hidden[begin : begin + LOSS_ROWS], targets[begin : begin + LOSS_ROWS]
            logp = F.log_softmax(part @ weight.t(), dim=-1, dtype=wide)
            total += F.nll_loss(logp, target, reduction="sum", ignore_index=IGNORE)
            if dhidden is None and dweight is None:
                del logp
                continue
            grad = _softmax_minus_one_hot_(logp, target).to(weight.dtype)
            del logp  # its memory is the gradient's, or free for the products
            if dhidden is not None:
                torch.mm(grad, weight, out=dhidden[begin : begin + LOSS_ROWS])
            if dweight is not None:
                add_product_(dweight, grad, part)
            del grad  # before the next chunk's logits come
        ctx.save_for_backward(dhidden, None if dweight is None else dweight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        dhidden, dweight = ctx.saved_tensors
        scaled = [None if d is None else (d * grad).to(d.dtype) for d in (dhidden, dweight)]
        return scaled[0], scaled[1], None, None


def _softmax_minus_one_hot_(logp: Tensor, target: Tensor) -> Tensor:
    """Gradient of the loss with respect to logits, in place of their log-softmax; rows that do not count are 0."""
    counts = (target != IGNORE)[:, None]
    grad = logp.exp_().mul_(counts)
    return grad.scatter_add_(1, target.clamp(min=0)[:, None], counts.to(grad.dtype).neg_())


def add_product_(total: Tensor, grad: Tensor, part: Tensor) -> None:
    """Add gradᵀ · part to `total`, which may be wider: the head's gradient of a chunk of tokens."""
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), part)
    else:
        total += grad.t() @ part
