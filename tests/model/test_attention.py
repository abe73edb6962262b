"""Attention written out: in low precision only its inputs and outputs are coarse."""

import torch

from meshwright.model.attention import Explicit
from meshwright.model.dropout import Dropout

B, T, H, D = 2, 64, 4, 16


def gradients(dtype: torch.dtype, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the same numbers, those that bfloat16 has, in `dtype`."""
    generator = torch.Generator().manual_seed(1)
    q, k, grad = (torch.randn(B, T, H, D, generator=generator).bfloat16().to(dtype) for _ in range(3))
    q.requires_grad_()
    k.requires_grad_()
    core = Explicit(causal=True, window=None, dropout=Dropout(0.0, 0))
    out = core(q, k, values.to(dtype), core.mask(T, dtype, q.device), None)
    # Powers of two, so that products with the values are exact and alike.
    exact = grad.sign().flatten(2)
    return torch.autograd.grad(out, (q, k), exact)


def test_softmax_is_not_rounded_before_its_gradient() -> None:
    """Where all values are alike, what a position looks at changes nothing: scores have no gradient.

    That holds if a row of the softmax sums to 1. Rounded to bfloat16 it misses that by some 2⁻⁹ of each weight.
    """
    alike = torch.ones(B, T, H, D)
    for dtype, most in ((torch.float64, 1e-13), (torch.bfloat16, 1e-5)):
        for gradient in gradients(dtype, alike):
            assert gradient.double().abs().max() < most, dtype


def test_gradients_in_bfloat16_are_as_near_as_their_inputs() -> None:
    generator = torch.Generator().manual_seed(2)
    values = 8 + torch.randn(B, T, H, D, generator=generator).mul(4).round().div(4)  # exact in bfloat16
    for found, exact in zip(gradients(torch.bfloat16, values), gradients(torch.float64, values), strict=True):
        error = (found.double() - exact).norm() / exact.norm()
        assert error < 0.02, error
