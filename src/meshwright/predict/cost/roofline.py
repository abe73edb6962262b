"""Seconds that a device takes for one piece of work: as long as its arithmetic or its memory takes, and a kernel's
beginning and end (Williams et al. 2009)."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.predict.cost.constants import Constants
from meshwright.predict.cost.operators import Flash, Move, Product, Work


def seconds(work: Work, constants: Constants, peak: float, bandwidth: float, size: int) -> float:
    """peak: FLOP/s, bandwidth: bytes/s, of the data sheet; size: bytes of a value."""
    if isinstance(work, Product):
        return product(work, constants, peak, bandwidth, size)
    if isinstance(work, Flash):
        return flash(work, constants, peak)
    return move(work, constants, bandwidth)


def product(work: Product, constants: Constants, peak: float, bandwidth: float, size: int) -> float:
    """A product of matrices, by the kernel that is fastest for its shape.

    Each unit computes tiles of the output one after the other; all units together are a wave. Tiles at the edge are as
    dear as whole ones, and a wave that is not full nearly so. A tile's time is that of its inner dimension, and of
    `depth` elements more for reading the first and writing the result.
    """
    batch, m, n, k = work
    rate = peak * constants.product * constants.sustained / constants.units
    best = float("inf")
    for rows, columns, speed in constants.tiles:
        waves = batch * -(-m // rows) * -(-n // columns) / constants.units
        whole = -(-waves // 1)
        waves = whole if waves < 1 else waves + constants.quantised * (whole - waves)
        best = min(best, waves * 2 * rows * columns * (k + constants.depth) / (rate * speed))
    if batch > 1:
        best /= constants.batched
    moved = batch * (m * k + k * n + m * n) * size / (bandwidth * constants.stream)
    return constants.kernel + max(best, moved)


def flash(work: Flash, constants: Constants, peak: float) -> float:
    """Fused attention: its scores never leave the device's chip, so arithmetic alone counts; the narrower a head, the
    more of it is exponentials."""
    part = constants.flash_backward if work.backward else constants.flash
    rate = peak * part * constants.sustained * work.width / (work.width + constants.flash_width)
    return constants.kernel + work.seen / rate


def move(work: Move, constants: Constants, bandwidth: float) -> float:
    """What reads and writes memory; nothing costs nothing, not even a kernel."""
    if not work.bytes:
        return 0.0
    part: float = getattr(constants, work.kind) or constants.stream
    return constants.kernel + work.bytes / (bandwidth * part)


def floor(work: Work, constants: Constants, peak: float, bandwidth: float, size: int) -> float:
    """Seconds that the work does not go below whatever its tiles: convex in each of its dimensions."""
    if not isinstance(work, Product):
        return seconds(work, constants, peak, bandwidth, size)
    rate = peak * constants.product * constants.sustained * max(speed for _, _, speed in constants.tiles)
    moved = work.batch * (work.m * work.k + work.k * work.n + work.m * work.n) * size
    took = work.flops / (rate * max(constants.batched, 1.0))
    return constants.kernel + max(took, moved / (bandwidth * constants.stream))


def kernels(works: Iterable[Work]) -> int:
    """Kernels that the host issues for these."""
    return sum(not isinstance(work, Move) or work.bytes > 0 for work in works)
