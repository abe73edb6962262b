import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.model.layers import Conv1D, RMSNorm

WHERE = {"dtype": torch.float64, "device": torch.device("cpu")}


def filled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return module


def kept(fn, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (tensors.append(t), t)[1], lambda t: t):
        return fn(x), tensors


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (2, 3, 4, 8)])
def test_rms_norm_is_torchs(shape: tuple[int, ...]) -> None:
    norm = filled(RMSNorm(8, 1e-3, **WHERE))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(shape, dtype=torch.float64)
    expected = F.rms_norm(x, (8,), norm.weight, 1e-3)
    assert torch.allclose(norm(x), expected, rtol=1e-14, atol=1e-14)
    for a, b in zip(
        torch.autograd.grad(norm(x), (x, norm.weight), grad),
        torch.autograd.grad(expected, (x, norm.weight), grad),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=1e-13, atol=1e-13)


def test_rms_norm_keeps_its_input_once() -> None:
    norm = filled(RMSNorm(8, 1e-3, **WHERE))
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    _, tensors = kept(norm, x)
    assert sorted(t.numel() for t in tensors) == [6, 8, 48]  # inverse roots, weight, x


def test_rms_norm_statistics_are_float32_at_least() -> None:
    norm = filled(RMSNorm(512, 1e-6, dtype=torch.bfloat16, device=torch.device("cpu")))
    x = (100 * torch.randn(4, 512, generator=torch.Generator().manual_seed(1))).bfloat16()
    exact = F.rms_norm(x.double(), (512,), norm.weight.double(), 1e-6)
    assert norm(x).dtype == torch.bfloat16
    assert ((norm(x).double() - exact).abs() <= 2**-8 * exact.abs()).all()  # one rounding


def test_conv1d_is_a_transposed_linear_with_contiguous_gradients() -> None:
    conv = filled(Conv1D(6, 4, **WHERE))
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(conv(x), F.linear(x, conv.weight.t(), conv.bias))
    conv(x).square().sum().backward()
    assert conv.weight.grad.is_contiguous() and conv.weight.grad.shape == (6, 4)
