"""Buffers for what is under way, kept from one collective to the next.

Touching fresh memory costs more than the messages that fill it: on the CPU an all-to-all of 32 MiB into a new buffer
takes two to three times as long as into one used before.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

CPU = torch.device("cpu")


class Scratch:
    """Lends buffers on the CPU; as many are kept as were out at once, each as large as its largest use."""

    def __init__(self) -> None:
        self._free: list[torch.UntypedStorage] = []
        self._lock = threading.Lock()

    def take(self, size: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """A flat tensor of `size` elements with no defined values; give it back with `give`.

        An accelerator's comes from torch's own allocator, which keeps what is freed.
        """
        if device.type != "cpu":
            return torch.empty(size, dtype=dtype, device=device)
        need = size * dtype.itemsize
        with self._lock:
            self._free.sort(key=torch.UntypedStorage.nbytes)
            place = next((i for i, b in enumerate(self._free) if b.nbytes() >= need), None)
            if place is not None:
                buffer = self._free.pop(place)
            else:
                # None is large enough: replace the largest, so that growing sizes do not pile up.
                if self._free:
                    self._free.pop()
                buffer = torch.UntypedStorage(need)
        return torch.empty(0, dtype=dtype).set_(buffer, 0, (size,), (1,))

    def give(self, taken: Tensor) -> None:
        """Take back what `take` lent; nobody may use it any more."""
        if taken.device.type != "cpu":
            return
        with self._lock:
            self._free.append(taken.untyped_storage())

    def kept(self) -> list[torch.UntypedStorage]:
        """The buffers kept and not lent at the moment."""
        with self._lock:
            return list(self._free)

    @property
    def bytes(self) -> int:
        """Bytes kept and not lent at the moment."""
        return sum(b.nbytes() for b in self._free)
