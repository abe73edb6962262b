"""The checksum of a block of a tensor's bytes. NumPy only, so that checkpoints can be checked without torch."""

from __future__ import annotations

import zlib

import numpy as np

COLUMNS = 1031
"""Columns of a checksum, a prime larger than the pages (4 KiB) of a block, so that no two pages fall on the same."""


def checksum(block: memoryview) -> int:
    """CRC-32 of a block's column sums: of its 4-byte little-endian words in rows of COLUMNS, modulo 2³².

    The last word is filled up with zeros. Nearly four times as fast as a CRC-32 of all bytes, and what a disk does to
    a block changes it as surely: see docs/decisions/checksums.md.
    """
    words = np.frombuffer(block, dtype="<u4", count=len(block) // 4)
    rows = len(words) // COLUMNS
    sums = words[: rows * COLUMNS].reshape(rows, COLUMNS).sum(axis=0, dtype="<u4")
    rest = words[rows * COLUMNS :]
    sums[: len(rest)] += rest
    if last := bytes(block[len(words) * 4 :]):
        sums[len(rest) : len(rest) + 1] += np.frombuffer(last.ljust(4, b"\0"), dtype="<u4")
    return zlib.crc32(sums)
