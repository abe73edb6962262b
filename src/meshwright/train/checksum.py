"""The checksum of a block of a tensor's bytes. NumPy only, so that checkpoints can be checked without torch."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

COLUMNS = 1031
"""Columns of a checksum, a prime larger than the pages (4 KiB) of a block, so that no two pages fall on the same."""
_ROWS = 63  # that are added up at once: 254 KiB, so that they come from a cache when they have just been read
_WORD = np.dtype("<u4")
_ROW = COLUMNS * _WORD.itemsize  # bytes


def checksum(block: memoryview, ready: Callable[[memoryview], object] = lambda part: None) -> int:
    """CRC-32 of a block's column sums: of its 4-byte little-endian words in rows of COLUMNS, modulo 2³².

    The last word is filled up with zeros. Nearly four times as fast as a CRC-32 of all bytes, and what a disk does to
    a block changes it as surely: see docs/decisions/checksums.md. `ready` is called with each part of the block in
    turn just before that is looked at: who reads the block there spares a way to memory.
    """
    words = np.frombuffer(block, _WORD, len(block) // 4)
    whole = len(words) // COLUMNS
    rows, rest = words[: whole * COLUMNS].reshape(whole, COLUMNS), words[whole * COLUMNS :]
    sums, some = np.zeros(COLUMNS, _WORD), np.empty(COLUMNS, _WORD)
    for row in range(0, whole, _ROWS):
        ready(block[row * _ROW : min(row + _ROWS, whole) * _ROW])
        np.add.reduce(rows[row : row + _ROWS], 0, _WORD, some)
        np.add(sums, some, sums)
    ready(block[whole * _ROW :])
    sums[: len(rest)] += rest
    if last := bytes(block[words.nbytes :]):
        sums[len(rest) : len(rest) + 1] += np.frombuffer(last.ljust(4, b"\0"), _WORD)
    return zlib.crc32(sums)
