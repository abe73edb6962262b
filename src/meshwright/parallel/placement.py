"""Where a parameter's local part belongs in the whole: one record each, read by everyone who must know.

Initialisation, gradient reduction, the norm, checkpoints, proofs and export read these records and nothing else,
so no strategy needs a list of special names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from meshwright.spec.cuts import Cut, local_shape


@dataclass(frozen=True, slots=True)
class Placement:
    """One parameter: its public (Hugging Face) name and global shape, how it is cut, over what it is replicated.

    `names` holds every place of the module tree where the parameter stands; a tied weight has several, and the
    first is its public name. partial: the ranks over which its gradients are still to be summed beside the data ranks,
    by the name of their group; None where each rank has the whole gradient of what it holds. counted: whether this
    rank's is the one that norms count and checkpoints hold, of several that other axes than `dp` have of the same part.
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
