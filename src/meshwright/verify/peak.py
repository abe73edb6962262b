"""The most bytes a rank holds at once in a step on the CPU, and what they are at that moment.

A dispatch mode sees every operation, in forward, in backward (which on the CPU runs on the caller's thread), inside
custom autograd functions and in the optimizer. Each storage counts once, at its size, from the operation that makes
it until nothing refers to it any more. What exists before must be handed in by name: of that, sizes are read anew at
every operation, because ZeRO 3 frees and regrows its buffers behind the operations' back. Not seen are the workspace
inside a single operation, and memory of the libraries.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.train.trainer import Trainer
from meshwright.verify.activations import describe, storage_of
from meshwright.verify.held import declared

MADE = "made in the step"
"""The category of every storage that is made while watching, but for those of collectives."""

SCRATCH = "scratch"
"""Buffers lent for collectives, in use and kept for the next one."""


@dataclass(frozen=True)
class Peak:
    """Bytes at the fullest moment: by category, and what was made in the step by the operation that made it.

    `where` says which operation had just run, and whether in backward.
    """

    categories: dict[str, int]
    made: dict[str, int]  # "mm float32[2, 8]" -> bytes, equal ones summed, largest first
    where: str

    @property
    def total(self) -> int:
        return sum(self.categories.values())


def peak(trainer: Trainer, fn: Callable[[], Any]) -> Peak:
    """Run `fn`, a step of `trainer` that is not its first one, and tell when most was held."""
    scratch = trainer.sharded.group.scratch
    known = {name: [t.untyped_storage() for t in tensors] for name, tensors in declared(trainer).items()}
    with Watch({**known, SCRATCH: scratch.kept()}) as watch:
        fn()
    return watch.peak()


class Watch(TorchDispatchMode):
    """Follows storages from birth to death while it is entered; `known` are those that exist already, by category."""

    def __init__(self, known: Mapping[str, Iterable[torch.UntypedStorage]]) -> None:
        super().__init__()
        self._known: dict[int, tuple[str, torch.UntypedStorage]] = {}
        for category, storages in known.items():
            for storage in storages:
                self._known.setdefault(storage._cdata, (category, storage))
        self._storages = [storage for _, storage in self._known.values()]
        self._sizes = [0] * len(self._storages)
        self._alive: dict[int, tuple[str, str, int]] = {}  # category, description, bytes
        self._events: list[tuple[str, str, int]] = []  # category, description, bytes more (or less)
        self._now = self._most = 0
        self._end, self._where = 0, ""
        self._sample("the start")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        for tensor in tensors_in(out):
            if tensor.device.type == "cpu":
                self._see(tensor, name, storage_of(tensor) in given)
        self._sample(name)
        return out

    def peak(self) -> Peak:
        """Replay what came and went up to the fullest moment."""
        categories: Counter[str] = Counter({category: 0 for category, _ in self._known.values()})
        made: Counter[str] = Counter()
        for category, what, size in self._events[: self._end]:
            categories[category] += size
            if category == MADE:
                made[what] += size
        largest_first = {what: size for what, size in made.most_common() if size}
        return Peak(dict(categories), largest_first, self._where)

    def _see(self, tensor: Tensor, name: str, given: bool) -> None:
        key = storage_of(tensor)
        if key in self._known or key in self._alive:
            return
        if given and name != "set_":
            return  # made before watching, by somebody who did not hand it in: no part of the step
        storage = tensor.untyped_storage()
        category = SCRATCH if name == "set_" else MADE
        self._alive[key] = (category, f"{name} {describe(tensor)}", storage.nbytes())
        self._count(*self._alive[key])
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        category, what, size = self._alive.pop(key)
        self._count(category, what, -size)

    def _sample(self, name: str) -> None:
        # At every operation, and hardly ever has one changed: so all are compared at once.
        if (sizes := list(map(torch.UntypedStorage.nbytes, self._storages))) != self._sizes:
            for (category, _), size, before in zip(self._known.values(), sizes, self._sizes, strict=True):
                if size != before:
                    self._count(category, "", size - before)
            self._sizes = sizes
        if self._now > self._most:
            self._most, self._end = self._now, len(self._events)
            backward = torch._C._current_graph_task_id() != -1
            self._where = f"{name} in backward" if backward else name

    def _count(self, category: str, what: str, size: int) -> None:
        self._now += size
        self._events.append((category, what, size))


def tensors_in(things: Any) -> Iterator[Tensor]:
    """Those that an operation takes or gives: by themselves, or in lists, tuples and dictionaries. Torch's walk through
    any tree takes several times as long, longer than most operations."""
    if isinstance(things, Tensor):
        yield things
    elif isinstance(things, (list, tuple)):
        for thing in things:
            yield from tensors_in(thing)
    elif isinstance(things, dict):
        yield from tensors_in(tuple(things.values()))
