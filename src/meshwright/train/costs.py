"""How long the parts of a model take here: the embedding, one block, and the head with its loss."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.model.base import LanguageModel
from meshwright.model.build import DTYPES, build
from meshwright.model.dropout import DropoutKey
from meshwright.model.init import initialise_
from meshwright.parallel.recompute import Recompute
from meshwright.spec.costs import Costs
from meshwright.spec.run import RunSpec

ROUNDS = 7


def measure(run: RunSpec, device: torch.device, rounds: int = ROUNDS) -> Costs:
    """Seconds of a micro-batch's forward and backward on one device, medians over `rounds`, with the run's precision,
    attention, loss, dropout and recompute; blocks are not compiled. What tensor and context ranks share is measured
    whole, as if they divided every part alike, which is nearly so.

    Memory: a model of one block, and one micro-batch of activations of it.
    """
    layout, spec = run.layout, run.model.model_copy(update={"layers": 1})
    dtype = DTYPES[run.precision]
    model = build(spec, attention=run.attention, loss=run.loss, dropout=run.dropout, dtype=dtype, device=device)
    initialise_(model, run.seed)
    model.train()
    if layout.recompute != "none":
        Recompute(list(model.blocks), keep=layout.kept_operators, rng=run.dropout == "torch" and spec.drops)
    parts = _parts(model, run, device)
    times: dict[str, list[float]] = {name: [] for name in parts}
    for index in range(rounds + 1):
        for name, part in parts.items():
            seconds = _timed(part, device)
            if index:  # the first one loads and sets up
                times[name].append(seconds)
    embedding, block, head = (statistics.median(times[name]) for name in ("embedding", "block", "head"))
    of = f"{spec.family}, blocks of {spec.hidden}, {run.batch.micro} × {run.data.seq_len} tokens, {run.precision}"
    return Costs(embedding, block, head, f"{of}, on {device.type} with {torch.get_num_threads()} threads")


def _parts(model: LanguageModel, run: RunSpec, device: torch.device) -> dict[str, Callable[[], None]]:
    """Forward and backward of each part; each begins with what the one before makes, or something like it."""
    batch, length = run.batch.micro, run.data.seq_len
    generator = torch.Generator().manual_seed(run.seed)
    tokens, targets = torch.randint(run.model.vocab, (2, batch, length), generator=generator).to(device)
    key = DropoutKey(run.seed, 0, torch.arange(batch, device=device))
    x = model.embed(tokens, None, key).detach()
    gradient = torch.randn(x.shape, generator=generator).to(x)
    context = model.context(tokens, x.dtype, None, None, None, key)
    (block,) = model.blocks

    def from_hidden(forward: Callable[[Tensor], Tensor], gradient: Tensor | None) -> Callable[[], None]:
        def both() -> None:
            torch.autograd.backward(forward(x.clone().requires_grad_()), gradient)

        return both

    return {
        "embedding": lambda: torch.autograd.backward(model.embed(tokens, None, key), gradient),
        "block": from_hidden(lambda hidden: block(hidden, *context), gradient),
        "head": from_hidden(lambda hidden: model.head(hidden, targets), None),
    }


def _timed(part: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    part()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
