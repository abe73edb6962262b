"""What a rank holds between two steps: the storages it declares, by category, and those that nobody declared.

The undeclared ones are looked for among all tensors that Python knows, so a copy forgotten anywhere is seen: in an
attribute, a closure, a list. Two things are not: memory that is no tensor, and tensors that only an autograd graph
holds (but the tensor at the head of that graph is). Scratch buffers of collectives are bare storages while nobody uses
them and do not count; one that is still lent when a step is over does.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from meshwright.train.trainer import Trainer
from meshwright.verify.activations import describe, storage_of

OTHER = "other"
"""The category of what no other one declares; nothing is predicted for it."""

LETTING_GO = 2.0
"""Seconds that a communication thread may take to drop the buffers of a collective that is over."""


def declared(trainer: Trainer) -> dict[str, Iterable[Tensor]]:
    """What a rank means to hold from step to step, by the names of predict.memory."""
    laid_out, updated = trainer.sharded.storages(), trainer.optimizer.storages()
    return {
        **laid_out,
        **updated,
        "scalars": [*laid_out["scalars"], *updated["scalars"]],
        "buffers": [buffer for laid_out in trainer.stages.values() for buffer in laid_out.model.buffers()],
    }


def held(
    categories: Mapping[str, Iterable[Tensor]], device: torch.device, evidence: Iterable[Tensor] = ()
) -> tuple[dict[str, int], list[str]]:
    """Bytes by category, each storage once and whole, OTHER last; and what OTHER counts in words, largest first.

    `evidence` is the proof's own and counts nowhere. Exact, so there is no tolerance: at the end of a step a rank has
    no tensor that it does not mean to keep.
    """
    known = {storage_of(tensor) for tensor in evidence}
    sizes = dict.fromkeys(categories, 0)
    for category, tensors in categories.items():
        for tensor in tensors:
            if storage_of(tensor) not in known:
                known.add(storage_of(tensor))
                sizes[category] += tensor.untyped_storage().nbytes()
    others = _others(known, device)
    patience = time.monotonic() + LETTING_GO
    while others and time.monotonic() < patience:
        others.clear()
        time.sleep(0.02)
        others = _others(known, device)
    sizes[OTHER] = sum(tensor.untyped_storage().nbytes() for tensor in others.values())
    return sizes, _in_words(others.values())


def _others(known: Container[int], device: torch.device) -> dict[int, Tensor]:
    """By storage, of several views of one the largest."""
    others: dict[int, Tensor] = {}
    for tensor in live(device):
        key = storage_of(tensor)
        if key not in known and (key not in others or tensor.numel() > others[key].numel()):
            others[key] = tensor
    return others


def live(device: torch.device) -> Iterator[Tensor]:
    """Every tensor with memory on `device` that can still be reached, gradients among them."""
    gc.collect()  # what only waits for the collector is not held
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # isinstance would ask proxies and lazy modules what they are
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and _lies_on(device, tensor):
                    yield tensor


def _lies_on(device: torch.device, tensor: Tensor) -> bool:
    return tensor.device == device and tensor.layout == torch.strided and tensor.untyped_storage().nbytes() > 0


def _in_words(tensors: Iterable[Tensor]) -> list[str]:
    largest_first = sorted(tensors, key=lambda t: -t.untyped_storage().nbytes())
    kinds = Counter(describe(t) + (" with its autograd graph" if t.grad_fn else "") for t in largest_first)
    return [kind if number == 1 else f"{number} × {kind}" for kind, number in kinds.items()]
