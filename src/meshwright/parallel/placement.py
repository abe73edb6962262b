"""Where a parameter's local part belongs in the whole: one record each, read by everyone who must know.

Initialisation, gradient reduction, the norm, checkpoints, proofs and export read these records and nothing else,
so no strategy needs a list of special names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.spec.boxes import Box
from meshwright.spec.cuts import Cut, in_whole, local_shape


@dataclass(frozen=True, slots=True)
class Placement:
    """One parameter: its public (Hugging Face) name and global shape, how it is cut, over what it is replicated.

    `names` holds every place of the module tree where the parameter stands; a tied weight has several, and the
    first is its public name. partial: the ranks over which its gradients are still to be summed beside the data ranks,
    by the name of their group; None where each rank has the whole gradient of what it holds. counted: whether this
    rank's is the one that norms count and checkpoints hold, of several that `tp` ranks have of the same part.
    """

    name: str
    shape: tuple[int, ...]
    decay: bool
    names: tuple[str, ...]
    cuts: tuple[Cut, ...] = ()
    replicated: tuple[str, ...] = ()
    partial: str | None = None
    counted: bool = True

    @property
    def local_shape(self) -> tuple[int, ...]:
        return local_shape(self.shape, self.cuts)

    @property
    def local_numel(self) -> int:
        return math.prod(self.local_shape)


def plain_placements(module: nn.Module, replicated: Iterable[str] = ()) -> dict[str, Placement]:
    """Records of a plain module's parameters, in the module's order, every one whole and replicated over the axes.

    Weight decay is for matrices: tensors of two dimensions or more (Loshchilov and Hutter 2019 leave it open; this
    is the convention of GPT-3 and its successors).
    """
    places: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        places.setdefault(parameter, []).append(name)
    return {
        names[0]: Placement(
            name=names[0],
            shape=tuple(parameter.shape),
            decay=parameter.ndim >= 2,
            names=tuple(names),
            replicated=tuple(replicated),
        )
        for parameter, names in places.items()
    }


@torch.no_grad()
def cut_out(tensor: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """This rank's part of a whole tensor, filled up with zeros; a new one."""
    part = tensor.new_zeros(local_shape(tensor.shape, cuts))
    for inner, box in _boxes(part, cuts):
        at(part, inner).copy_(at(tensor, box))
    return part


@torch.no_grad()
def put_together(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """The whole tensor from the parts of the ranks of `tp`, in their order."""
    whole = parts[0].new_empty(placement.shape)
    for coordinate, part in enumerate(parts):
        for inner, box in _boxes(part, [cut.at(coordinate) for cut in placement.cuts]):
            at(whole, box).copy_(at(part, inner))
    return whole


def _boxes(part: Tensor, cuts: Sequence[Cut]) -> Iterator[tuple[Box, Box]]:
    return in_whole(Box((0,) * part.dim(), tuple(part.shape)), cuts)


def at(tensor: Tensor, box: Box, of: Box | None = None) -> Tensor:
    """The elements `box` of a tensor, or of one that is itself the box `of`; a view."""
    origins = of.offsets if of is not None else (0,) * tensor.dim()
    for dim, (offset, origin, size) in enumerate(zip(box.offsets, origins, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset - origin, size)
    return tensor
