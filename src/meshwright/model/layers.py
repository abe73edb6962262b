"""The layers with parameters, named and shaped as in Hugging Face's models. All start uninitialised (torch.empty).

`inits()` of a layer says how its parameters start; see init.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.model.init import STD, Init
from meshwright.model.loss import chunked_cross_entropy, cross_entropy


def _parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


class Linear(nn.Module):
    """x [..., in] -> x Wᵀ + b [..., out], weight [out, in]. Backward keeps x."""

    def __init__(
        self, n_in: int, n_out: int, *, bias: bool, std: float = STD, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.std = std
        self.weight = _parameter(n_out, n_in, dtype=dtype, device=device)
        self.bias = _parameter(n_out, dtype=dtype, device=device) if bias else None

    def inits(self) -> dict[str, Init]:
        return {"weight": Init("normal", self.std), "bias": Init("zeros")}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Head(Linear):
    """The output layer: logits, or with targets the sum of token losses; chunked: never holding all logits."""

    def __init__(self, n_in: int, n_out: int, *, chunked: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(n_in, n_out, bias=False, dtype=dtype, device=device)
        self.chunked = chunked

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is not None and self.chunked:
            return chunked_cross_entropy(x, self.weight, targets)
        logits = super().forward(x)
        return logits if targets is None else cross_entropy(logits, targets)


class Conv1D(nn.Module):
    """x [..., in] -> x W + b [..., out], weight [in, out]: a linear layer as GPT-2 stores it. Backward keeps x."""

    def __init__(self, n_in: int, n_out: int, *, std: float = STD, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.std = std
        self.weight = _parameter(n_in, n_out, dtype=dtype, device=device)
        self.bias = _parameter(n_out, dtype=dtype, device=device)

    def inits(self) -> dict[str, Init]:
        return {"weight": Init("normal", self.std), "bias": Init("zeros")}

    def forward(self, x: Tensor) -> Tensor:
        # Not F.linear(x, W.t()): its gradient of W comes out transposed and would be copied into place.
        rows = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
        return rows.view(*x.shape[:-1], -1)


class Embedding(nn.Embedding):
    """indices i64[...] -> rows of the weight [..., D]. Backward keeps the indices, and never reads the weight."""

    def __init__(self, rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(rows, width, dtype=dtype, device=device)

    def reset_parameters(self) -> None:
        """Nothing: like all layers it starts uninitialised."""

    def inits(self) -> dict[str, Init]:
        return {"weight": Init("normal", STD)}

    def forward(self, indices: Tensor) -> Tensor:  # the parameter's name differs from torch's
        return F.embedding(indices, self.weight)


class LayerNorm(nn.Module):
    """LayerNorm over the last dimension (Ba et al. 2016). Backward keeps x, and mean and 1/σ of each row."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(width, dtype=dtype, device=device)
        self.bias = _parameter(width, dtype=dtype, device=device)

    def inits(self) -> dict[str, Init]:
        return {"weight": Init("ones"), "bias": Init("zeros")}

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last dimension (Zhang and Sennrich 2019).

    Statistics are in float32 at least. Backward keeps x, and the inverse root of each row.
    """

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(width, dtype=dtype, device=device)

    def inits(self) -> dict[str, Init]:
        return {"weight": Init("ones")}

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda":
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)  # one fused kernel
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """torch composes F.rms_norm of several operations on the CPU, keeps x twice and takes thrice the time.

    With r = 1/√(mean(x²) + eps) of a row and h = grad · weight:
    dx = r · (h − x · r² · mean(h · x)), dweight = Σ over rows of grad · x · r.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        xw = x.to(wide)
        r = torch.linalg.vector_norm(xw, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (xw * r).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, r = ctx.saved_tensors
        xhat = x.to(r.dtype) * r
        gx = grad * xhat
        dweight = gx.sum(dim=tuple(range(x.dim() - 1)))
        mean = (gx @ weight.to(gx.dtype)).unsqueeze(-1).div_(x.size(-1))
        dx = (grad * weight).addcmul_(xhat, mean, value=-1).mul_(r)
        return dx.to(x.dtype), dweight.to(weight.dtype), None
