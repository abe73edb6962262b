"""What is particular to CPUs: ranks share a node's cores, and Gloo's work is done by the same cores as everything else.

A rank of few has threads on several cores; of as many ranks as cores each has one, and memory is shared. More ranks
than cores get a part each: a step is timed as if each had a core, and each moment of it then takes as much longer as
more ranks are busy than there are cores, which in a pipeline are not all of them.

Collectives go by what was measured among as many ranks: Gloo copies through sockets, and no formula of links holds for
all of its algorithms.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from meshwright.schedule.timeline import Timeline
from meshwright.spec.cluster import Cluster, Flops
from meshwright.spec.errors import UserError
from meshwright.spec.traffic import Operation

Array = NDArray[np.float64]
Row = tuple[Operation, int, int, tuple[tuple[int, float], ...]]
"""A collective that was measured: ranks at once in all, ranks of a group, and (bytes, seconds), ascending."""
_Points = tuple[tuple[PositiveInt, PositiveFloat], ...]
_Curve = Annotated[_Points, Field(min_length=1)]
_TABLES: dict[str, tuple[TypeAdapter[Any], str]] = {
    "threads": (TypeAdapter(_Points), "[[2, 1.8], …]: threads, and how many times faster than one"),
    "busy": (TypeAdapter(_Points), "[[2, 1.1], …]: ranks, and how much slower each is"),
    "collectives": (
        TypeAdapter(tuple[tuple[Operation, PositiveInt, PositiveInt, _Curve], ...]),
        "[[all_reduce, 2, 2, [[1024, 1e-4], …]], …]: operation, ranks at once, ranks of a group, seconds by bytes",
    ),
}
THREADS = 0.7
"""Part of a core that each further thread of a rank is worth where nobody measured it."""


def shared(cluster: Cluster, ranks: int) -> Cluster:
    """`cluster` as one of `ranks` ranks finds it, as if it had a core or more of its own: see `crowd`.

    An accelerator is nobody else's.
    """
    if cluster.device.kind != "cpu":
        return cluster
    for name, value in cluster.constants.items():
        check_table(name, value)
    here, cores = _local(cluster, ranks), _cores(cluster)
    speed = _threads(cluster, max(cores // here, 1)) / _between(cluster.constants.get("busy", ()), here)
    flops = {name: each * speed for name, each in cluster.device.flops.model_dump(exclude_none=True).items()}
    device = cluster.device.model_copy(update={"flops": Flops(**flops), "bandwidth": cluster.device.bandwidth * speed})
    constants: dict[str, Any] = dict(cluster.constants)
    if "collectives" in constants:
        constants["collectives"] = among(constants["collectives"], here, crowd(cluster, ranks))
    return cluster.model_copy(update={"device": device, "constants": constants})


def crowd(cluster: Cluster, ranks: int) -> float:
    """How many of `ranks` ranks there are for a core where they are more than cores, else 1."""
    if cluster.device.kind != "cpu":
        return 1.0
    return max(_local(cluster, ranks) / _cores(cluster), 1.0)


def check_table(name: str, value: object) -> None:
    """Raise UserError for a measured table that is none; other constants are not looked at."""
    if name not in _TABLES:
        return
    kind, right = _TABLES[name]
    try:
        kind.validate_python(value)
    except ValidationError as error:
        where = "".join(f"[{part}]" for part in error.errors()[0]["loc"] if isinstance(part, int))
        raise UserError(f"cluster.constants.{name}{where}: not as `meshwright probe` writes it, {right}") from None


def _local(cluster: Cluster, ranks: int) -> int:
    """How many of `ranks` are on one node."""
    return min(ranks, cluster.per_node)


def _cores(cluster: Cluster) -> int:
    return cluster.cores or cluster.per_node


def _threads(cluster: Cluster, threads: int) -> float:
    """How many times faster than one thread."""
    measured = cluster.constants.get("threads", ())
    return _between([(1, 1.0), *measured], threads) if measured else 1 + THREADS * (threads - 1)


def _between(points: Iterable[Sequence[float]], at: float) -> float:
    """On the line through measured points; 1 where there are none."""
    measured = sorted(dict((each[0], each[1]) for each in points).items())
    if not measured:
        return 1.0
    counts, factors = zip(*measured, strict=True)
    return float(np.interp(at, counts, factors))


def stretched(timeline: Timeline, copies: int, crowded: float, uneven: float = 0.0) -> float:
    """Seconds of a step of as many `copies` of a pipeline as data, context and tensor ranks make.

    timeline: as if each rank had a core. crowded: ranks for each core there is. Where n ranks are busy and n is above
    the cores, all go on at cores / n of their speed, so that the order of things stays as it is and that moment takes
    n / cores times as long. uneven: how far the system is from dealing cores out so; at 1 it is as if all computed.
    """
    if crowded == 1:
        return timeline.length
    cores = copies * len(timeline.ranks) / crowded
    edges = sorted(
        (moment, change)
        for rank in timeline.ranks
        for span in rank
        if span.end > span.start
        for moment, change in ((span.start, 1), (span.end, -1))
    )
    length, busy, before = 0.0, 0, 0.0
    for moment, change in edges:
        length += (moment - before) * max(busy * copies / cores, 1.0)
        before, busy = moment, busy + change
    length += timeline.length - before
    return length + uneven * (timeline.length * crowded - length)


# -- collectives ------------------------------------------------------------------------------------------------------


def among(rows: Iterable[Sequence[Any]], ranks: int, crowded: float) -> tuple[Row, ...]:
    """The rows that were measured while as many ranks, or the next more, or else the most, were there.

    crowded: what their seconds are divided by, because a whole step is multiplied by it.
    """
    every = list(rows)
    there = sorted({row[1] for row in every})
    if not there:
        return ()
    wanted = there[min(bisect_left(there, ranks), len(there) - 1)]
    return tuple(
        (operation, at_once, group, tuple((size, took / crowded) for size, took in points))
        for operation, at_once, group, points in every
        if at_once == wanted
    )


class Measured:
    """Collectives by what was measured of them, between sizes on a line through logarithms."""

    def __init__(self, rows: Iterable[Sequence[Any]]) -> None:
        self._curves: dict[str, dict[int, tuple[Array, Array]]] = {}
        for operation, _, ranks, points in rows:
            size, took = np.log(np.asarray(points, dtype=np.float64)).T
            self._curves.setdefault(operation, {})[int(ranks)] = size, took

    def __contains__(self, operation: str) -> bool:
        return operation in self._curves

    def seconds(self, operation: Operation, payload: Array, ranks: Array) -> Array:
        """Of arrays that have one shape; 0 for one rank or no bytes. Groups of a size nobody measured take as long as
        the nearest's, by the bytes that a ring sends on each rank's link."""
        found = np.zeros(payload.shape)
        curves = self._curves[operation]
        for each in np.unique(ranks[(ranks > 1) & (payload > 0)]):
            nearest = min(curves, key=lambda known: abs(np.log(known / each)))
            chosen = (ranks == each) & (payload > 0)
            scale = (1 - 1 / each) / (1 - 1 / nearest)
            found[chosen] = _along(*curves[nearest], payload[chosen]) * scale
        return found


def _along(size: Array, took: Array, payload: Array) -> Array:
    """Beyond the smallest size nothing is won, beyond the largest time grows with the bytes."""
    log = np.log(payload)
    return np.asarray(np.exp(np.interp(log, size, took) + np.maximum(log - size[-1], 0.0)))


def curve(measured: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    """Points of a Row from seconds by bytes, never falling, which only noise makes them do."""
    rising: list[tuple[int, float]] = []
    for size, took in sorted(measured.items()):
        rising.append((size, max(took, rising[-1][1] if rising else 0.0)))
    return tuple(rising)
