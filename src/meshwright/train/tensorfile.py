"""Tensors into a safetensors file and out of it in one pass each, with a checksum of every block on the way.

The format: 8 bytes N, little-endian; N bytes of JSON, name → dtype, shape, data_offsets; then the tensors' bytes.
(https://github.com/huggingface/safetensors#format). The library's own writer needs tensors that share no storage, so
it would cost a copy of all of them, and a second reading for checksums; its reader maps the file, so that a damaged
disk shows as a signal and not as an error.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
BLOCK = 1 << 22
"""Bytes of a tensor under one checksum: what must be read to trust a part of it."""
COLUMNS = 1031
"""Columns of a checksum, a prime larger than the pages (4 KiB) of a block, so that no two pages fall on the same."""
_ALIGN = 8
_FLUSH_EVERY = 1 << 26  # bytes; so that the last flush, which tells of no advance, has little to do on a slow disk


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor's bytes begin in its file, and the `checksum` of each BLOCK of them."""

    start: int
    sums: tuple[int, ...]


class Damaged(Exception):
    """Bytes are not those that were written."""


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


def write(
    path: Path,
    tensors: Sequence[tuple[str, Tensor]],
    advance: Callable[[], None] = lambda: None,
    check: Callable[[str, Tensor], None] = lambda name, tensor: None,
) -> tuple[int, dict[str, Stored]]:
    """Write `tensors` by name, on any device and with any strides, and flush them to the disk.

    `advance` is called after each block; `check` of each tensor, in a thread, may raise what ends the writing. Returns
    the file's bytes and where each tensor lies. Takes memory only for a tensor that is not contiguous or not on the
    CPU. Raises OSError, and KeyError for a dtype that the format lacks.
    """
    # Wide items first keep every tensor aligned to its item, which readers ask for.
    ordered = sorted(tensors, key=lambda pair: (-pair[1].element_size(), pair[0]))
    stored: dict[str, Stored] = {}
    with (
        open(path, "wb", buffering=0) as stream,
        _Flushing(stream.fileno()) as flushing,
        ThreadPoolExecutor(1, "checksums") as beside,
    ):
        _put(stream, memoryview(_header(ordered)))
        for name, tensor in ordered:
            start = stream.tell()
            checked = beside.submit(check, name, tensor)
            sums = []
            for block in _blocks(tensor):
                sums.append(beside.submit(checksum, block))
                _put(stream, block)
                flushing.written(len(block))
                advance()
            checked.result()
            stored[name] = Stored(start, tuple(each.result() for each in sums))
        size = stream.tell()
        flushing.join()
        os.fsync(stream.fileno())
    return size, stored


class _Flushing:
    """Sends what has been written on to the disk, in a thread, while more is written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._since = 0
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def __enter__(self) -> _Flushing:
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()  # the file must not be closed under it

    def written(self, nbytes: int) -> None:
        """So many bytes more are there to be flushed. Raises OSError where an earlier flush failed."""
        self._since += nbytes
        if self._since >= _FLUSH_EVERY:
            self.join()
            self._since = 0
            self._thread = threading.Thread(target=self._flush, name="flush", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait for the flush under way. Raises OSError where one failed: a second one would not tell of it again."""
        self._wait()
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _flush(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._error = error


def _header(tensors: Sequence[tuple[str, Tensor]]) -> bytes:
    entries, end = {}, 0
    for name, tensor in tensors:
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    words = json.dumps(entries).encode()
    words += b" " * (-len(words) % _ALIGN)
    return len(words).to_bytes(8, "little") + words


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    content = memoryview(as_bytes(tensor.detach().cpu().contiguous()).numpy())
    for start in range(0, len(content), BLOCK):
        yield content[start : start + BLOCK]


def as_bytes(contiguous: Tensor) -> Tensor:
    """A contiguous tensor as uint8, 1-dim; a view."""
    # One element is contiguous whatever its strides, which `view` minds.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def _put(stream: BinaryIO, content: memoryview) -> None:
    while content:
        content = content[stream.write(content) :]


class Reader:
    """Reads parts of stored tensors, each block against its checksum. Holds one block in memory.

    What is read may be trusted after `settle`: checksums are taken in a thread, while more is read.
    """

    def __init__(self) -> None:
        self._block = torch.empty(BLOCK, dtype=torch.uint8)
        self._beside = ThreadPoolExecutor(1, "checksums")
        self._sums: list[tuple[Future[int], int]] = []

    def settle(self) -> None:
        """Raise Damaged where a checksum of what has been read so far differs."""
        sums, self._sums = self._sums, []
        for found, expected in sums:
            _compare(found.result(), expected)

    def read(self, stream: BinaryIO, stored: Stored, nbytes: int, first: int, into: Tensor) -> None:
        """Bytes [first, first + len(into)) of a tensor of `nbytes` bytes into a uint8 tensor on any device.

        Raises OSError, and Damaged where the file is too short or a checksum differs.
        """
        end = first + len(into)
        assert 0 <= first <= end <= nbytes
        for number in range(first // BLOCK, -(-end // BLOCK)):
            start, stop = number * BLOCK, min((number + 1) * BLOCK, nbytes)
            # A block that is wanted whole is read where it belongs.
            whole = first <= start and stop <= end and into.device.type == "cpu"
            block = into[start - first : stop - first] if whole else self._block[: stop - start]
            content = memoryview(block.numpy())
            stream.seek(stored.start + start)
            if _fill(stream, content) < stop - start:
                raise Damaged("it is shorter than what was written")
            if whole:
                self._sums.append((self._beside.submit(checksum, content), stored.sums[number]))
            else:
                _compare(checksum(content), stored.sums[number])
                low, high = max(start, first), min(stop, end)
                into[low - first : high - first].copy_(block[low - start : high - start])


def _compare(found: int, expected: int) -> None:
    if found != expected:
        raise Damaged("its checksum is not what was written")


def _fill(stream: BinaryIO, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        got = stream.readinto(buffer[done:])  # type: ignore[attr-defined]
        if not got:
            break
        done += got
    return done
