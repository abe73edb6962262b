"""Sums of gradients of which each tensor rank has a part: of norms of single heads, of heads that several ranks hold,
and with sequence parallelism of whatever is whole. And of a tied table that the two ends of a pipeline hold.

They are few numbers. When the sums over the data ranks are there, those in this rank's shards go in one message for
each group of ranks; tensor ranks at the same place on the other axes have shards of the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from meshwright.comm.collectives import Group
from meshwright.comm.mesh import Mesh
from meshwright.parallel.flat import Piece, Unit

_REASONS = {"tp": "tp.partial", "tp.inner": "tp.partial", "pp.ends": "pp.tied"}


class PartialSums:
    """Of `units`, the trainable ones; see Placement.partial."""

    def __init__(self, mesh: Mesh, units: Sequence[Unit]) -> None:
        self._pieces: dict[Group, list[tuple[Unit, Piece]]] = {}
        for unit in units:
            for piece in unit.pieces:
                placement = piece.placement
                if placement.partial == "tp":
                    group = mesh.group("tp")
                elif placement.partial == "tp.inner":
                    group = mesh.split("tp", placement.cuts[0].copies)[0]
                elif placement.partial == "pp.ends":
                    ends = mesh.ends("pp")
                    assert ends is not None, f"{placement.name} is neither at the beginning nor at the end"
                    group = ends
                else:
                    continue
                self._pieces.setdefault(group, []).append((unit, piece))

    def sums(self, units: Iterator[Unit]) -> Iterator[Unit]:
        """`units` as they come with their sums over the data ranks, now over these ranks too."""
        if not self._pieces:
            yield from units
            return
        found = list(units)
        for group, pieces in self._pieces.items():
            parts = [piece.of(unit.gradient_shard) for unit, piece in pieces]
            together = torch.cat(parts)
            group.all_reduce(together, reason=_REASONS[group.axis], phase="step")
            for part, total in zip(parts, together.split([len(part) for part in parts]), strict=True):
                part.copy_(total)
        yield from found
