"""Tensors into a safetensors file and out of it in one pass each, with a checksum of every block on the way.

The format: 8 bytes N, little-endian; N bytes of JSON, name → dtype, shape, data_offsets; then the tensors' bytes.
(https://github.com/huggingface/safetensors#format). The library's own writer needs tensors that share no storage, so
it would cost a copy of all of them, and a second reading for checksums; its reader maps the file, so that a damaged
disk shows as a signal and not as an error.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
BLOCK = 1 << 22
"""Bytes of a tensor under one checksum: what must be read to trust a part of it."""
_ALIGN = 8
_FLUSH_EVERY = 1 << 28  # bytes; so that the last flush, which tells of no advance, has little to do on a slow disk


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor's bytes begin in its file, and the CRC-32 of each BLOCK of them."""

    start: int
    crc32: tuple[int, ...]


class Damaged(Exception):
    """Bytes are not those that were written."""


@dataclass(frozen=True)
class Stream:
    """A tensor that is written without being in memory as a whole.

    runs: makes its elements anew, in C order, as consecutive parts on any device; each but the last has a multiple of
    BLOCK bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    runs: Callable[[], Iterator[Tensor]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(
    path: Path, tensors: Sequence[tuple[str, Tensor]], advance: Callable[[], None] = lambda: None
) -> tuple[int, dict[str, Stored]]:
    """Write `tensors` by name, on any device and with any strides, and flush them to the disk.

    `advance` is called after each block. Returns the file's bytes and where each tensor lies. Takes memory only for a
    tensor that is not contiguous or not on the CPU. Raises OSError, and KeyError for a dtype that the format lacks.
    """
    return write_streams(path, [_stream(name, tensor) for name, tensor in tensors], advance)


def _stream(name: str, tensor: Tensor) -> Stream:
    return Stream(name, tensor.dtype, tuple(tensor.shape), lambda: iter((tensor.detach().cpu().contiguous(),)))


def write_streams(
    path: Path,
    streams: Sequence[Stream],
    advance: Callable[[], None] = lambda: None,
    metadata: Mapping[str, str] | None = None,
) -> tuple[int, dict[str, Stored]]:
    """The same for tensors that come in parts. metadata: goes into the file's header."""
    # Wide items first keep every tensor aligned to its item, which readers ask for.
    ordered = sorted(streams, key=lambda stream: (-stream.dtype.itemsize, stream.name))
    stored: dict[str, Stored] = {}
    flushed = 0
    with open(path, "wb") as file:
        file.write(_header(ordered, metadata))
        for stream in ordered:
            start = file.tell()
            sums = []
            for block in _blocks(stream):
                sums.append(zlib.crc32(block))
                file.write(block)
                if file.tell() - flushed >= _FLUSH_EVERY:
                    file.flush()
                    os.fdatasync(file.fileno())
                    flushed = file.tell()
                advance()
            assert file.tell() - start == stream.nbytes, stream.name
            stored[stream.name] = Stored(start, tuple(sums))
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return size, stored


def _header(streams: Sequence[Stream], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for stream in streams:
        start, end = end, end + stream.nbytes
        about = {"dtype": DTYPES[stream.dtype], "shape": list(stream.shape), "data_offsets": [start, end]}
        entries[stream.name] = about
    words = json.dumps(entries).encode()
    words += b" " * (-len(words) % _ALIGN)
    return len(words).to_bytes(8, "little") + words


def _blocks(stream: Stream) -> Iterator[memoryview]:
    part = 0
    for run in stream.runs():
        assert part % BLOCK == 0 and run.dtype == stream.dtype, stream.name
        content = _bytes(run.cpu())
        part = len(content)
        for start in range(0, part, BLOCK):
            yield content[start : start + BLOCK]


def _bytes(contiguous: Tensor) -> memoryview:
    return memoryview(contiguous.reshape(-1).view(torch.uint8).numpy())


class Reader:
    """Reads parts of stored tensors, each block against its checksum. Holds one block in memory."""

    def __init__(self) -> None:
        self._block = torch.empty(BLOCK, dtype=torch.uint8)

    def read(self, stream: BinaryIO, stored: Stored, nbytes: int, first: int, into: Tensor) -> None:
        """Bytes [first, first + len(into)) of a tensor of `nbytes` bytes into a uint8 tensor on any device.

        Raises OSError, and Damaged where the file is too short or a checksum differs.
        """
        end = first + len(into)
        assert 0 <= first <= end <= nbytes
        for number in range(first // BLOCK, -(-end // BLOCK)):
            start, stop = number * BLOCK, min((number + 1) * BLOCK, nbytes)
            block = self._block[: stop - start]
            stream.seek(stored.start + start)
            if _fill(stream, memoryview(block.numpy())) < stop - start:
                raise Damaged("it is shorter than what was written")
            if zlib.crc32(memoryview(block.numpy())) != stored.crc32[number]:
                raise Damaged("its checksum is not what was written")
            low, high = max(start, first), min(stop, end)
            into[low - first : high - first].copy_(block[low - start : high - start])


def _fill(stream: BinaryIO, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        got = stream.readinto(buffer[done:])  # type: ignore[attr-defined]
        if not got:
            break
        done += got
    return done
