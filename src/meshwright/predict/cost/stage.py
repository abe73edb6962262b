"""What a pipeline stage takes: its blocks one after another, and what data ranks send beside them.

The formulas take numbers or NumPy arrays that broadcast, so that a search evaluates many layouts at once by the very
ones that `step` takes for one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.predict.cost.constants import Constants
from meshwright.predict.cost.links import Array, Numbers
from meshwright.predict.cost.parts import Parts


class Sent(NamedTuple):
    """Seconds in which all gradients of a stage are reduced, and all its parameters gathered, in so many messages."""

    reduce: Array
    gather: Array
    units: Array


class Times(NamedTuple):
    """Seconds of one stage.

    forward, backward: of a micro-batch, with what ZeRO makes them wait for, which is `gather` and `reduce`. tail: from
    the last backward until all gradients are reduced.
    """

    forward: Array
    backward: Array
    tail: Array
    gather: Array
    reduce: Array


def sent(
    parts: Parts,
    elements: Numbers,
    units: Numbers,
    *,
    ranks: Numbers,
    stride: Numbers,
    cut: Numbers,
    zero: Numbers,
    reduce_bytes: int,
) -> Sent:
    """For `elements` parameters of a tensor rank over `ranks` of the data and context axes, `cut` of which shard."""
    units, zero, stride = (np.asarray(each, dtype=np.float64) for each in (units, zero, stride))
    each = elements / units
    plain = parts.collective("all_reduce", each * reduce_bytes, ranks, stride)
    inner = parts.collective("reduce_scatter", each * reduce_bytes, cut, stride)
    outer = parts.collective("all_reduce", each * reduce_bytes / cut, ranks / cut, stride * cut)
    gather = parts.collective("all_gather", each * parts.size, cut, stride)
    return Sent(units * np.where(zero == 0, plain, inner + outer), units * np.where(zero == 0, 0.0, gather), units)


def times(
    forward: Numbers, backward: Numbers, sent: Sent, *, zero: Numbers, by_step: Numbers, constants: Constants
) -> Times:
    """forward, backward: seconds of the stage's computing, recompute included. by_step: ZeRO 3 gathers once a step.

    Once a step, gradients are reduced under the last backward; at ZeRO 2 and 3 so in each micro-batch. ZeRO 3 gathers a
    unit while the one before it computes, in forward and in backward.
    """
    forward, backward, zero = (np.asarray(each, dtype=np.float64) for each in (forward, backward, zero))
    often = (zero == 3) & ~np.asarray(by_step, dtype=bool)
    ahead = np.where(often, sent.gather, 0.0)
    gather = _waits(forward, ahead, sent.units, constants.overlap_gather, constants.contention)
    hidden = constants.overlap_gather and constants.overlap_reduce
    each = ahead + np.where(zero >= 2, sent.reduce, 0.0)
    reduce = _waits(backward, each, sent.units, hidden, constants.contention)
    once = np.where(zero < 2, sent.reduce, 0.0)
    tail = _waits(backward, once, sent.units, constants.overlap_reduce, constants.contention)
    return Times(forward + gather, backward + reduce, tail, gather, reduce)


def publish(forward: Numbers, sent: Sent, *, zero: Numbers, by_step: Numbers, constants: Constants) -> Array:
    """Seconds that a rank waits for new parameters, once a step: they are gathered under its next first forward.

    forward, sent: of all stages that the rank has. At ZeRO 0 there are none to gather, and 3 gathers as it goes.
    """
    forward, zero = np.asarray(forward, dtype=np.float64), np.asarray(zero)
    never = (zero == 0) | ((zero == 3) & ~np.asarray(by_step, dtype=bool))
    gather = np.where(never, 0.0, sent.gather)
    return _waits(forward, gather, sent.units, constants.overlap_gather, constants.contention)


def _waits(computing: Array, moved: Array, units: Array, hidden: bool, contention: float) -> Array:
    """By how much messages of as many units prolong the computing of these: the first, or last, is beside nothing, and
    the others slow computing down; all of them where nothing is hidden."""
    if not hidden:
        return moved
    under = np.minimum(moved, computing) * (1 - 1 / units)
    return moved - under + contention * under
