from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.model.base import LanguageModel
from meshwright.model.loss import IGNORE, chunked_cross_entropy, cross_entropy
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import LOSS_ROWS

Batch = tuple[torch.Tensor, torch.Tensor]


def case(tokens: int, vocab: int = 37) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(1, tokens, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(vocab, (1, tokens), generator=generator)
    targets[:, ::3] = IGNORE
    return hidden, weight, targets


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).norm() <= 1e-12 * b.norm())


@pytest.mark.parametrize("tokens", [1, 5, LOSS_ROWS, LOSS_ROWS + 1, 3 * LOSS_ROWS + 7])
def test_chunked_equals_full(tokens: int) -> None:
    hidden, weight, targets = case(tokens)
    full = cross_entropy(hidden @ weight.t(), targets)
    gradients = torch.autograd.grad(0.3 * full, (hidden, weight))
    chunked = chunked_cross_entropy(hidden, weight, targets)
    assert close(chunked, full)
    for ours, theirs in zip(torch.autograd.grad(0.3 * chunked, (hidden, weight)), gradients, strict=True):
        assert close(ours, theirs)


def test_full_is_the_definition() -> None:
    hidden, weight, targets = case(7)
    logits = hidden @ weight.t()
    expected = sum(
        torch.logsumexp(logits[0, i], 0) - logits[0, i, t] for i, t in enumerate(targets[0].tolist()) if t != IGNORE
    )
    assert close(cross_entropy(logits, targets), expected)


def test_chunked_gives_only_the_gradients_asked_for() -> None:
    hidden, weight, targets = case(LOSS_ROWS + 3)
    expected = torch.autograd.grad(cross_entropy(hidden @ weight.t(), targets), (hidden, weight))
    (alone,) = torch.autograd.grad(chunked_cross_entropy(hidden, weight.detach(), targets), hidden)
    assert close(alone, expected[0])
    (alone,) = torch.autograd.grad(chunked_cross_entropy(hidden.detach(), weight, targets), weight)
    assert close(alone, expected[1])


class Largest(TorchDispatchMode):
    """Records the largest tensor any operation makes, and the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.operations = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations.append(str(func))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("kind", ["full", "chunked"])
def test_chunked_never_holds_all_logits(kind: str) -> None:
    hidden, weight, targets = case(4 * LOSS_ROWS, vocab=512)
    with Largest() as seen:
        if kind == "full":
            cross_entropy(hidden @ weight.t(), targets).backward()
        else:
            chunked_cross_entropy(hidden, weight, targets).backward()
    assert seen.numel == (4 * LOSS_ROWS if kind == "full" else LOSS_ROWS) * 512


def test_evaluation_computes_no_gradients() -> None:
    hidden, weight, targets = case(8)
    with torch.no_grad(), Largest() as seen:
        chunked_cross_entropy(hidden, weight, targets)
    assert not any("scatter" in operation for operation in seen.operations)


@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_ignored_targets_do_not_count(
    loss: str, spec: ModelSpec, make: Callable[..., LanguageModel], batch: Batch
) -> None:
    """Loss and gradients are those of the sequences without the ignored one, which is the last."""
    tokens, targets = batch
    model = make(spec, loss=loss)
    total = model(tokens, targets)
    gradients = torch.autograd.grad(total, list(model.parameters()))
    fewer = model(tokens[:2], targets[:2])
    assert close(total, fewer)
    for a, b in zip(gradients, torch.autograd.grad(fewer, list(model.parameters())), strict=True):
        assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_all_ignored(loss: str, attention: str, spec: ModelSpec, make: Callable[..., LanguageModel]) -> None:
    model = make(spec, loss=loss, attention=attention)
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    total = model(tokens, torch.full_like(tokens, IGNORE))
    total.backward()
    assert total.item() == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name  # true for NaN


@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_low_precision_sums_in_float32(loss: str, spec: ModelSpec, make: Callable[..., LanguageModel]) -> None:
    model = make(spec, loss=loss, dtype=torch.bfloat16)
    tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))
    total = model(tokens, tokens)
    total.backward()
    assert total.dtype == torch.float32 and model.lm_head.weight.grad.dtype == torch.bfloat16
    exact = make(spec)
    exact.load_state_dict(model.state_dict())
    assert total.item() == pytest.approx(exact(tokens, tokens).item(), rel=0.03)


def test_the_weight_gradient_is_summed_in_float32_over_chunks() -> None:
    """In bfloat16 a sum of 64 chunks would stall: its error is then tens of what rounding each product costs."""
    chunks, vocab, width = 64, 11, 8
    generator = torch.Generator().manual_seed(3)
    # Alike chunks: every product adds the same, so what is lost to a sum too coarse does not cancel.
    hidden = torch.randn(LOSS_ROWS, width, generator=generator).bfloat16().repeat(chunks, 1)
    weight = torch.randn(vocab, width, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(vocab, (LOSS_ROWS,), generator=generator).repeat(chunks)
    (found,) = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets), weight)
    exact_weight = weight.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(cross_entropy(hidden.double() @ exact_weight.t(), targets), exact_weight)
    assert found.dtype == torch.bfloat16
    error = (found.double() - exact).norm() / exact.norm()
    assert error < 0.006, error
