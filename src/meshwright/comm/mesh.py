"""The mesh: where this rank stands on each axis, and the groups it communicates in.

Ranks are numbered so that the first axis of the layout's order varies fastest: with the order tp, cp, dp, pp the
ranks of a tensor group are neighbours. That decides which traffic stays inside a node.

The map is torch's `DeviceMesh` (`Mesh.device_mesh`), built from process groups made here and not by
`init_device_mesh`, which gives its groups torch's own timeout of half an hour and knows no groups over several axes.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from operator import mul
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.blackbox import BlackBox
from meshwright.comm.check import Checks
from meshwright.comm.collectives import Group
from meshwright.comm.ledger import Ledger
from meshwright.comm.patience import Patience
from meshwright.comm.scratch import Scratch
from meshwright.comm.trace import Tracing
from meshwright.comm.yielding import yield_to_computing
from meshwright.spec.layout import AXES, Axis, Layout, places

_MESHES: weakref.WeakSet[Mesh] = weakref.WeakSet()


class Mesh:
    """All ranks of a run on their axes, seen from this one.

    rank, world: this rank's number and how many there are. sizes, coords: by axis, sizes[axis] ranks and this rank's
    place 0 … sizes[axis] - 1. device: where this rank computes. ledger, blackbox, tracing: shared by all groups.
    patience: waiting for what takes its time outside of collectives.
    """

    def __init__(
        self, sizes: dict[Axis, int], order: Iterable[Axis], rank: int, device: torch.device, timeout: float
    ) -> None:
        self._locate(sizes, order, rank)
        self.device = device
        self.ledger = Ledger()
        self.tracing = Tracing()
        self._scratch = Scratch()
        self.blackbox = BlackBox.from_environment(rank)
        self.patience = Patience(self.world, self.blackbox, timeout)
        self._timeout = timeout
        self._groups: dict[tuple[Axis, ...], Group] = {}
        self._parts: dict[tuple[str, int], Group] = {}
        self._stood_aside: dict[tuple[str, int], object] = {}
        self._storage_group: dist.ProcessGroup | None = None
        self._process_groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._checks = Checks(rank, timeout) if self.world > 1 and Checks.wanted() else None
        self.world_group = self._group("world", range(self.world))
        _MESHES.add(self)

    def close(self) -> None:
        """Let go of the process groups: no collective after this."""
        for group in (self.world_group, *self._groups.values(), *self._parts.values()):
            group.process_group = None
        self._process_groups.clear()
        self._stood_aside.clear()
        self._storage_group = None

    def _locate(self, sizes: dict[Axis, int], order: Iterable[Axis], rank: int) -> None:
        self.rank = rank
        self.world = math.prod(sizes.values())
        self.sizes = {axis: sizes[axis] for axis in order}  # innermost axis first
        self._strides = dict(zip(self.sizes, itertools.accumulate(self.sizes.values(), mul, initial=1), strict=False))
        self.coords = places(rank, self.sizes)

    @classmethod
    def create(cls, layout: Layout, *, device: torch.device, timeout: float) -> Mesh:
        """The mesh of a resolved layout over the default process group, which has as many ranks as the layout.

        All ranks must call it. `timeout`: seconds a collective may wait for a rank.
        """
        assert dist.is_initialized(), "start the process group first: comm.runtime.init"
        sizes = {axis: layout.size(axis) for axis in AXES}
        assert math.prod(sizes.values()) == dist.get_world_size(), f"{sizes} are not {dist.get_world_size()} ranks"
        mesh = cls(sizes, layout.order, dist.get_rank(), device, timeout)
        for axis in AXES:  # made now, where all ranks are together, and not in the middle of the first step
            mesh.group(axis)
        return mesh

    @classmethod
    def single(cls, device: torch.device) -> Mesh:
        """The mesh of a process that is alone; needs no process group, and its collectives do nothing."""
        return cls({axis: 1 for axis in AXES}, AXES, 0, device, 0.0)

    @property
    def checked(self) -> bool:
        """Whether ranks compare each operation before they do it: see comm/check.py."""
        return self._checks is not None

    def __repr__(self) -> str:
        return f"Mesh(rank {self.rank} of {self.world}, {self.coords} in {self.sizes}, {self.device})"

    def group(self, *axes: Axis) -> Group:
        """The ranks that differ from this one on the given axes only, in ascending order.

        Several axes make one combined group, named in the order given without axes of size 1 ("dp+cp", or "dp"
        where cp=1). A group is made on first use and kept; all its ranks must ask for it at the same point.
        """
        known = self._groups.get(axes)
        if known is None:
            known = self._groups[axes] = self._group(self._name(axes), self.ranks_along(*axes))
        return known

    def _name(self, axes: tuple[Axis, ...]) -> str:
        assert axes and len(set(axes)) == len(axes), axes
        return "+".join([a for a in axes if self.sizes[a] > 1] or axes[:1])

    def split(self, axes: Axis | tuple[Axis, ...], inner: int) -> tuple[Group, Group]:
        """The ranks along one axis, or several, cut into runs of `inner` neighbours: this rank's run, and the ranks at
        its place in the others.

        They are named "dp.inner" and "dp.outer", by the name of the whole group. All ranks must ask at the same point.
        """
        axes = (axes,) if isinstance(axes, str) else axes
        axis, ranks = self._name(axes), self.ranks_along(*axes)
        assert len(ranks) % inner == 0, f"{inner} does not divide {len(ranks)}"
        place = ranks.index(self.rank)
        first = place - place % inner
        found = []
        for part, members in (("inner", ranks[first : first + inner]), ("outer", ranks[place % inner :: inner])):
            key = (f"{axis}.{part}", inner)
            if key not in self._parts:
                self._parts[key] = self._group(key[0], members)
            found.append(self._parts[key])
        return found[0], found[1]

    def ends(self, axis: Axis) -> Group | None:
        """The first and the last rank along an axis, named "pp.ends"; None on those between. All ranks of the axis must
        ask at the same point."""
        ranks = self.ranks_along(axis)
        key = (f"{axis}.ends", 0)
        if self.rank not in (ranks[0], ranks[-1]):
            if key not in self._stood_aside:
                self._stand_aside(key)
            return None
        if key not in self._parts:
            self._parts[key] = self._group(key[0], dict.fromkeys((ranks[0], ranks[-1])))
        return self._parts[key]

    def channels(self, axis: Axis, wanted: Sequence[tuple[int, int, str]]) -> dict[tuple[int, int, str], Group]:
        """For each (source, target, what) a group of the ranks at these two places of an axis, named after the axis,
        with a communicator that nothing else uses; of those that this rank is in. `1 - rank` is the other's place.

        All ranks of the axis must ask for the same, at the same point, once.
        """
        ranks, place = self.ranks_along(axis), self.coords[axis]
        found: dict[tuple[int, int, str], Group] = {}
        for number, together in enumerate(_rounds(wanted)):
            mine = next((one for one in together if place in one[:2]), None)
            if mine is None:
                self._stand_aside((f"{axis}.channels", number))
                continue
            source, target, what = mine
            purpose = f"{axis}.{what}.{source}>{target}"
            found[mine] = self._group(axis, sorted((ranks[source], ranks[target])), purpose)
        return found

    def _stand_aside(self, key: tuple[str, int]) -> None:
        """Take no part while other ranks make a group for themselves: make one of this rank alone.

        torch names a group after its ranks and the number of groups that a rank has made so far, so that members find
        each other by name only where all have made as many.
        """
        self._stood_aside[key] = dist.new_group([self.rank], use_local_synchronization=True)

    def ranks_along(self, *axes: Axis) -> list[int]:
        """Numbers of the ranks that differ from this one on the given axes only, ascending."""
        strides = self._strides
        base = self.rank - sum(self.coords[a] * strides[a] for a in axes)
        places = itertools.product(*(range(self.sizes[a]) for a in axes))
        return sorted(base + sum(p * strides[a] for p, a in zip(place, axes, strict=True)) for place in places)

    def storage_group(self) -> dist.ProcessGroup | None:
        """A group of all ranks on the CPU that nothing else uses, for what other threads agree on; None for one rank.

        It waits for days, because disks may be slow: see patience.py for who notices that nothing advances. All ranks
        must ask for it at the same point.
        """
        if self.world == 1:
            return None
        if self._storage_group is None:
            self._storage_group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
        return self._storage_group

    @property
    def device_mesh(self) -> DeviceMesh:
        """This mesh as torch's, axes from the outermost to the innermost, for torch's own tools.

        Its groups of several ranks are this mesh's. All ranks must ask for it at the same point.
        """
        axes = tuple(reversed(self.sizes))
        shape = [self.sizes[a] for a in axes]
        return DeviceMesh.from_group(
            [self._process_group(self.ranks_along(a)) for a in axes],
            self.device.type,
            torch.arange(self.world, dtype=torch.int).view(shape),
            mesh_dim_names=cast("tuple[str, ...]", axes),
        )

    def _group(self, name: str, ranks: Iterable[int], purpose: str = "") -> Group:
        ranks = tuple(ranks)
        if len(ranks) == 1:
            return Group(name, ranks, 0, None, self.ledger, self.blackbox, tracing=self.tracing)
        process_group = self._process_group(ranks, purpose)
        checker = self._checks.of(ranks) if self._checks is not None else None
        return Group(
            name, ranks, ranks.index(self.rank), process_group, self.ledger, self.blackbox, checker, self._scratch,
            self.tracing,
        )  # fmt: skip

    def _process_group(self, ranks: Iterable[int], purpose: str = "") -> dist.ProcessGroup:
        """That of these ranks; with a purpose one that is for this alone."""
        key = purpose, tuple(ranks)
        known, ranks = self._process_groups.get(key), key[1]
        if known is None:
            if len(ranks) == self.world and not purpose:
                known = dist.group.WORLD
            else:
                # Only the group's own ranks take part, so ranks with other groups need not come.
                known = dist.new_group(
                    list(ranks), timeout=timedelta(seconds=self._timeout), use_local_synchronization=True
                )
            assert known is not None
            self._process_groups[key] = known
            yield_to_computing()
        return known


def _rounds(wanted: Sequence[tuple[int, int, str]]) -> list[list[tuple[int, int, str]]]:
    """The channels in rounds, in each of which no place has more than one."""
    rounds: list[list[tuple[int, int, str]]] = []
    for channel in wanted:
        free = (known for known in rounds if not any({*channel[:2]} & {*other[:2]} for other in known))
        together = next(free, None)
        if together is None:
            rounds.append([channel])
        else:
            together.append(channel)
    return rounds


def close_all() -> None:
    """Close every mesh of this process."""
    for mesh in list(_MESHES):
        mesh.close()
