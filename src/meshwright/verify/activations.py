"""Which tensors autograd keeps for backward, watched from outside through its saved-tensor hooks.

Counted once a storage, at the storage's full size, from when the first node saves a view of it until the last such
node lets go; so a storage that stays alive because a slice of it is saved counts whole, as in real memory. The
model's parameters and buffers do not count, nor do the tensors named as inputs: those exist without autograd.
A tensor is placed in the innermost module whose forward was running when it was first saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.predict.activations import Saved


@dataclass(frozen=True, slots=True)
class Kept:
    """One storage kept for backward: the module (its name in the model), the tensor first saved of it, its bytes."""

    where: str
    what: str  # dtype and shape, "float32[2, 8, 64]"
    bytes: int


@dataclass(frozen=True)
class SavedBytes:
    """What was kept when most was."""

    kept: tuple[Kept, ...]

    @property
    def total(self) -> int:
        return sum(k.bytes for k in self.kept)

    def by_tensor(self) -> dict[str, int]:
        """Bytes by "module: dtype[shape]"; equal descriptions are summed."""
        sums: Counter[str] = Counter()
        for kept in self.kept:
            sums[f"{kept.where}: {kept.what}"] += kept.bytes
        return dict(sums)


def measure(
    models: nn.Module | Sequence[nn.Module], fn: Callable[[], Any], *, inputs: Iterable[Tensor] = ()
) -> SavedBytes:
    """Run `fn`, which calls the models (and may run backward), and return what was kept at the fullest moment.

    `inputs` are tensors that exist anyway: tokens, targets, positions. Works on any device.
    """
    tracker = _Tracker()
    parts = [models] if isinstance(models, nn.Module) else list(models)
    for tensor in (*(t for part in parts for t in (*part.parameters(), *part.buffers())), *inputs):
        tracker.exclude(tensor)
    handles = [h for part in parts for name, module in part.named_modules() for h in tracker.follow(name, module)]
    try:
        with torch.autograd.graph.saved_tensors_hooks(tracker.pack, tracker.unpack):
            result = fn()  # held, so that the graph lives until everything has been counted
    finally:
        for handle in handles:
            handle.remove()
    fullest = tracker.fullest()
    del result
    return fullest


@dataclass(frozen=True, slots=True)
class Difference:
    """One module's saved bytes where prediction and measurement disagree, and the tensors only one of them has."""

    where: str
    predicted: int
    measured: int
    only_predicted: tuple[str, ...]
    only_measured: tuple[str, ...]


def compare(predicted: Sequence[Saved], measured: SavedBytes) -> list[Difference]:
    """Differences by module, largest first; tensors are matched by their module and bytes. Empty: all agree."""
    foretold: dict[str, list[tuple[str, int]]] = {}
    found: dict[str, list[tuple[str, int]]] = {}
    for saved in predicted:
        foretold.setdefault(saved.where, []).append((saved.what, saved.bytes))
    for kept in measured.kept:
        found.setdefault(kept.where, []).append((kept.what, kept.bytes))
    differences = []
    for where in dict.fromkeys((*foretold, *found)):
        ours, theirs = foretold.get(where, []), found.get(where, [])
        only_ours, only_theirs = _unmatched(ours, theirs), _unmatched(theirs, ours)
        if only_ours or only_theirs:
            sizes = (sum(size for _, size in ours), sum(size for _, size in theirs))
            differences.append(Difference(where, *sizes, only_ours, only_theirs))
    return sorted(differences, key=lambda d: -abs(d.predicted - d.measured))


def _unmatched(these: list[tuple[str, int]], those: list[tuple[str, int]]) -> tuple[str, ...]:
    """Descriptions of `these` that find no partner of equal bytes in `those`."""
    partners = Counter(size for _, size in those)
    left = []
    for what, size in these:
        if partners[size]:
            partners[size] -= 1
        else:
            left.append(f"{what}, {size} bytes")
    return tuple(left)


class _Holder:
    """What the graph keeps in a saved tensor's place; its end is the end of that saving."""

    __slots__ = ("key", "tensor", "tracker")

    def __init__(self, tracker: _Tracker, key: int, tensor: Tensor) -> None:
        self.tracker, self.key, self.tensor = tracker, key, tensor

    def __del__(self) -> None:
        self.tracker.release(self.key)


@dataclass
class _Tracker:
    excluded: dict[int, Tensor] = field(default_factory=dict)  # the tensors are kept so that no address is reused
    modules: list[str] = field(default_factory=lambda: [""])
    holders: Counter[int] = field(default_factory=Counter)
    live: dict[int, Kept] = field(default_factory=dict)
    events: list[tuple[Kept, int]] = field(default_factory=list)  # (kept, +1 begins or -1 ends)

    def exclude(self, tensor: Tensor) -> None:
        self.excluded[storage_of(tensor)] = tensor

    def follow(self, name: str, module: nn.Module) -> Mapping[Any, Any] | list[Any]:
        """Hooks that keep the path of the module that is running. Explicit state: backward has its own threads."""
        return [
            module.register_forward_pre_hook(lambda *_: self.modules.append(name)),
            module.register_forward_hook(lambda *_: (self.modules.pop(), None)[1], always_call=True),
        ]

    def pack(self, tensor: Tensor) -> Tensor | _Holder:
        key = storage_of(tensor)
        if key in self.excluded:
            return tensor
        if self.holders[key] == 0:
            self.live[key] = Kept(self.modules[-1], describe(tensor), tensor.untyped_storage().nbytes())
            self.events.append((self.live[key], 1))
        self.holders[key] += 1
        return _Holder(self, key, tensor)

    def unpack(self, saved: Tensor | _Holder) -> Tensor:
        return saved.tensor if isinstance(saved, _Holder) else saved

    def release(self, key: int) -> None:
        self.holders[key] -= 1
        if self.holders[key] == 0:
            self.events.append((self.live.pop(key), -1))

    def fullest(self) -> SavedBytes:
        """Replay the events up to the moment when most bytes were kept."""
        now = most = end = 0
        for i, (kept, sign) in enumerate(self.events):
            now += sign * kept.bytes
            if now > most:
                most, end = now, i + 1
        alive: dict[int, Kept] = {}
        for kept, sign in self.events[:end]:
            if sign > 0:
                alive[id(kept)] = kept
            else:
                del alive[id(kept)]
        return SavedBytes(tuple(alive.values()))


def storage_of(tensor: Tensor) -> int:
    """What tells a live storage from every other."""
    return tensor.untyped_storage()._cdata


def describe(tensor: Tensor) -> str:
    """ "float32[2, 8, 64]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
