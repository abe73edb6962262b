"""Text from a model: one token after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshwright.spec.errors import RunError


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    length: int,
    *,
    temperature: float,
    seed: int,
    multiple: int = 1,
    logits: Callable[[Tensor, int], Tensor] | None = None,
) -> list[int]:
    """`prompt` and `length` tokens after it, drawn from softmax(logits / temperature); 0: the likeliest token.

    The same seed draws the same tokens from the same logits on any device. The model sees the last `max_seq` tokens,
    is run in evaluation mode, and left in the mode it was in. It gets sequences that `multiple` divides: filled up
    behind their end, which no token before sees. logits(tokens i64[1, T], place): what it says of the token behind the
    one at `place`, [V], where the model is not to be asked itself. Raises ValueError for an empty prompt or a negative
    temperature, RunError for logits that are not finite.
    """
    if not prompt or temperature < 0:
        raise ValueError(f"prompt of {len(prompt)} tokens, temperature {temperature}; at least 1 and 0")
    device = next(model.parameters()).device
    window: int = max(model.spec.max_seq // multiple, 1) * multiple
    generator = torch.Generator().manual_seed(seed)  # the CPU's: the accelerator's would draw others
    ids = list(prompt)
    was_training = model.training
    model.eval()
    try:
        for _ in range(length):
            seen = ids[-window:]
            tokens = torch.tensor([seen + [0] * (-len(seen) % multiple)], dtype=torch.int64, device=device)
            last = len(seen) - 1
            drawn_from = model(tokens)[0, last] if logits is None else logits(tokens, last)
            ids.append(_draw(drawn_from, temperature, generator))
    finally:
        model.train(was_training)
    return ids


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """One token from logits [V]."""
    logits = logits.double().cpu()
    if not torch.isfinite(logits).all():
        raise RunError("sample: the model's logits are not finite; it cannot be sampled from")
    if temperature == 0:
        return int(logits.argmax())
    # Taken from the largest first, so that no temperature overflows.
    weights = torch.softmax((logits - logits.max()) / temperature, dim=0)
    return int(torch.multinomial(weights, 1, generator=generator))
