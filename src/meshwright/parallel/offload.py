"""Offload: what autograd saves waits for backward in the host's memory (Rhu et al. 2016, vDNN).

Every storage that forward saves on the accelerator is copied once to pinned memory of the host, and back when backward
first reads it. The device then holds the activations of what computes at the moment, the host all others; with
recompute, these are the regions' inputs and kept outputs. Parameters and buffers stay. Sends nothing to other ranks.
The copies go in order on the stream that computes, so the bus adds its time to the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

View = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]


class Offload:
    """Moves what is saved on `device` to the host. `held` and `most`: bytes there now, and at most so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held = self.most = 0

    def forward(self, stay: Iterable[Tensor]) -> saved_tensors_hooks:
        """A context for one forward; tensors that share memory with `stay` are saved where they are."""
        here = {tensor.untyped_storage()._cdata for tensor in stay}
        moved: weakref.WeakValueDictionary[tuple[int, int], _Moved] = weakref.WeakValueDictionary()

        def pack(tensor: Tensor) -> Tensor | tuple[_Moved, View]:
            storage = tensor.untyped_storage()
            if tensor.device != self.device or storage._cdata in here or not storage.nbytes():
                return tensor
            key = storage._cdata, tensor._version
            found = moved.get(key)
            if found is None or found.original() is not storage:  # not a new storage in a dead one's place
                found = moved[key] = _Moved(self, storage)
            return found, (tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

        return saved_tensors_hooks(pack, self._unpack)

    def _unpack(self, packed: Tensor | tuple[_Moved, View]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        moved, (dtype, offset, size, stride) = packed
        return torch.empty(0, dtype=dtype, device=self.device).set_(moved.back(), offset, size, stride)


class _Moved:
    """One storage's copy on the host; it lives as long as autograd holds a tensor of it."""

    def __init__(self, owner: Offload, storage: torch.UntypedStorage) -> None:
        self.owner = owner
        self.original = weakref.ref(storage)
        self._back: weakref.ref[torch.UntypedStorage] | None = None
        self._host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=owner.device.type == "cuda")
        self._host.copy_(_bytes(storage), non_blocking=True)
        owner.held += storage.nbytes()
        owner.most = max(owner.most, owner.held)

    def back(self) -> torch.UntypedStorage:
        """The storage on the device once more: the same one for all views of it that backward has in hand."""
        storage = self._back() if self._back is not None else None
        if storage is None:
            storage = self._host.to(self.owner.device, non_blocking=True, copy=True).untyped_storage()
            self._back = weakref.ref(storage)
        return storage

    def __del__(self) -> None:
        host = getattr(self, "_host", None)
        if host is not None:
            self.owner.held -= host.untyped_storage().nbytes()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
