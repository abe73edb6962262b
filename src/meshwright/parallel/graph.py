"""What a forward gave back: the tensors in it, and the leaves that their autograd graph leads to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of a forward's output: alone, or in tuples, lists, dicts and objects with fields."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors(value)
    elif hasattr(output, "__dataclass_fields__"):
        for name in output.__dataclass_fields__:
            yield from tensors(getattr(output, name))


def leaves(output: Any) -> Iterator[Tensor]:
    """The leaves that a backward from `output` will bring a gradient to. Those that only a recompute uses are not
    seen. Walks the whole graph."""
    ahead = [tensor.grad_fn for tensor in tensors(output)]
    seen = set()  # it holds the nodes, whose Python objects would else be made anew
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        ahead += [before for before, _ in node.next_functions]
