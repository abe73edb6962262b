"""Seconds that collectives and messages take on a cluster's links: latency, and bytes over the narrowest link.

A ring of n ranks sends each byte of a payload (n − 1)/n times past every rank for an all-gather or a reduce-scatter,
and twice that for an all-reduce (Patarasuk and Yuan 2009); NCCL has as many rings at once as keep all of a node's
adapters busy. So a group that spans nodes, with r of its ranks in each, is as fast as r adapters together, or as a
device's own links within the node if these are slower. All groups along an axis communicate at once, so what devices
share is divided among them. Small payloads are bound by latency: a ring's grows with its ranks, a tree's, which
all-reduces may take, with their logarithm.

Payloads, ranks and strides may be numbers or NumPy arrays that broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.predict.cost.constants import Constants
from meshwright.predict.cost.cpu import Measured
from meshwright.spec.cluster import Cluster
from meshwright.spec.traffic import Operation

Array = NDArray[np.float64]
Numbers = float | Array
"""A number, or one for each of many layouts."""

PASSES: dict[Operation, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "reduce": 1}
"""How often a ring carries a payload past each rank."""


class _Level(NamedTuple):
    """One kind of link, as fast as software makes it, for a device whose neighbours all send too."""

    devices: int
    below: int  # devices that the next inner link joins
    bandwidth: float
    message: float  # bandwidth of a single message
    latency: float
    outside: bool  # between nodes


class _Crossing(NamedTuple):
    """Whether groups cross a level, and how many of a group's ranks lie together below it."""

    level: _Level
    crosses: NDArray[np.bool_]
    inner: Array


class Links:
    """The links of `cluster`, as fast as `constants` say."""

    def __init__(self, cluster: Cluster, constants: Constants) -> None:
        self.constants = constants
        self.measured = Measured(constants.collectives)
        self.levels: list[_Level] = []
        below = 1
        for place, link in enumerate(cluster.links):
            outside = place > 0 or cluster.per_node == 1
            each = link.bandwidth / min(link.shared, below if place else link.devices)
            reached = constants.network if outside else constants.wire
            message = constants.message_network if outside else constants.message
            latency = link.latency + constants.hop
            self.levels.append(_Level(link.devices, below, each * reached, each * message, latency, outside))
            below = link.devices

    def collective(self, operation: Operation, payload: Numbers, ranks: Numbers, stride: Numbers = 1.0) -> Array:
        """Of `payload` bytes (the whole tensor's) over groups of `ranks` devices, `stride` apart; 0 for one rank.

        all_to_all: payload is what one rank has of the tensor. shift: every rank sends `payload` to the next.
        """
        payload, ranks, stride = np.broadcast_arrays(_array(payload), _array(ranks), _array(stride))
        if operation in self.measured:
            return self.measured.seconds(operation, payload, ranks)
        crossed = list(self._crossed(ranks, stride))
        if operation == "shift":
            took = _last(crossed, ranks, lambda at: at.level.latency + payload / at.level.message)
        elif operation == "all_to_all":
            # What leaves each inner domain goes over the outer link.
            took = _most(crossed, ranks, lambda at: payload * (1 - at.inner / ranks) / at.level.bandwidth)
            took = took + _last(crossed, ranks, lambda at: at.level.latency * np.log2(np.maximum(ranks, 2)))
        else:
            passes = PASSES[operation]
            slowness = _most(crossed, ranks, lambda at: self._crowd(at, ranks) / (at.inner * at.level.bandwidth))
            latency = passes * _around(crossed, ranks)
            if operation == "all_reduce":
                latency = np.minimum(latency, _up_and_down(crossed, ranks))
            took = passes * payload * (ranks - 1) / ranks * slowness + latency
        return np.where((ranks > 1) & (payload > 0), self.constants.collective + took, 0.0)

    def message(self, payload: Numbers, stride: Numbers) -> Array:
        """Of `payload` bytes from each device to the one `stride` further."""
        payload, stride = np.broadcast_arrays(_array(payload), _array(stride))
        ranks = np.full_like(stride, 2.0)
        if "send" in self.measured:
            return self.measured.seconds("send", payload, ranks)
        crossed = list(self._crossed(ranks, stride))
        took = _last(crossed, ranks, lambda at: at.level.latency + payload / at.level.message)
        return np.where(payload > 0, self.constants.send + took, 0.0)

    def _crossed(self, ranks: Array, stride: Array) -> Iterator[_Crossing]:
        """Of each level, from inner to outer. A group that reaches over an inner domain's edge is charged as if as
        many of its ranks as divide both lay together."""
        open_ = np.ones(ranks.shape, dtype=bool)
        for place, level in enumerate(self.levels):
            last = place == len(self.levels) - 1
            inner = _together(ranks, level.below // stride)
            here = ranks if last else _together(ranks, level.devices // stride)
            yield _Crossing(level, open_ & (here > inner), inner)
            open_ = open_ & (level.devices % (ranks * stride) != 0)

    def _crowd(self, at: _Crossing, ranks: Array) -> Array:
        """How much slower a network is that many nodes use at once."""
        if not at.level.outside:
            return np.ones(ranks.shape)
        return 1 + self.constants.crowd * np.log2(np.maximum(ranks / at.inner, 1))


def _array(numbers: Numbers) -> Array:
    return np.asarray(numbers, dtype=np.float64)


def _together(ranks: Array, places: Array) -> Array:
    """How many of each group's ranks fill domains of so many places evenly."""
    return np.gcd(ranks.astype(np.int64), np.maximum(places, 1).astype(np.int64)).astype(np.float64)


def _most(crossed: list[_Crossing], ranks: Array, of: Callable[[_Crossing], Array]) -> Array:
    """The largest of the levels that are crossed."""
    found = np.zeros(ranks.shape)
    for at in crossed:
        found = np.where(at.crosses, np.maximum(found, of(at)), found)
    return found


def _last(crossed: list[_Crossing], ranks: Array, of: Callable[[_Crossing], Array]) -> Array:
    """That of the outermost level that is crossed."""
    found = np.zeros(ranks.shape)
    for at in crossed:
        found = np.where(at.crosses, of(at), found)
    return found


def _around(crossed: list[_Crossing], ranks: Array) -> Array:
    """Seconds once around a ring for the first byte: each level's link as often as the ring enters a domain below."""
    total, beyond = np.zeros(ranks.shape), np.zeros(ranks.shape)
    for level, crosses, inner in reversed(crossed):
        domains = ranks / inner
        total = total + np.where(crosses, (domains - beyond) * level.latency, 0.0)
        beyond = np.where(crosses, domains, beyond)
    return total


def _up_and_down(crossed: list[_Crossing], ranks: Array) -> Array:
    """Seconds up a binary tree and down for the first byte."""
    total, above = np.zeros(ranks.shape), ranks
    for level, crosses, inner in reversed(crossed):
        domains = np.maximum(above / inner, 1)
        total = total + np.where(crosses, 2 * np.ceil(np.log2(domains)) * level.latency, 0.0)
        above = np.where(crosses, inner, above)
    return total
