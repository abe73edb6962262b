"""The order of samples in an epoch: a permutation computed place by place, without a table.

A Feistel network (Luby and Rackoff 1988) permutes the numbers of 2h bits: split into halves, each round combines one
half with a hash of the other. The smallest such range that holds all samples (64 at least) is at most four times as
long; a number that falls beyond the last sample is sent through again until it does not (cycle walking; Black and
Rogaway 2002), which leaves a permutation of the samples. Keys and hash are integer arithmetic written here and no
library's generator, so the order that follows from a seed never changes.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 12
_LEAST_HALF = 3  # bits; over fewer, some orders of a handful of samples come measurably more often than others
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # SplitMix64's multipliers
_HALF_WORD = np.uint64(32)


def shuffled(places: NDArray[np.int64], length: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The samples, of [0, length), at `places`, of [0, length), of the epoch's order; 1-dim."""
    half = max(_LEAST_HALF, ((length - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    found = _feistel(places.astype(np.uint64), half, keys)
    while len(beyond := np.flatnonzero(found >= length)):
        found[beyond] = _feistel(found[beyond], half, keys)
    return found.astype(np.int64)


def _keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """A 64-bit key for each round."""
    return np.frombuffer(hashlib.shake_128(f"order:{seed}:{epoch}".encode()).digest(8 * ROUNDS), dtype="<u8")


def _feistel(numbers: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A permutation of the numbers of 2 · half bits."""
    bits, rest = np.uint64(half), np.uint64(64 - half)
    left, right = numbers >> bits, numbers & np.uint64((1 << half) - 1)
    for key in keys:
        # Integers wrap around modulo 2⁶⁴; a product's upper bits depend on all bits of its factors.
        mixed = right * _FIRST + key
        mixed ^= mixed >> _HALF_WORD
        mixed *= _SECOND
        left, right = right, left ^ (mixed >> rest)
    return (left << bits) | right
