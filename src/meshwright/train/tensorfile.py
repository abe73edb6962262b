"""Tensors into a safetensors file and out of it in one pass each, with a checksum of every block on the way.

The format: 8 bytes N, little-endian; N bytes of JSON, name → dtype, shape, data_offsets; then the tensors' bytes.
(https://github.com/huggingface/safetensors#format). The library's own writer needs tensors that share no storage, so
it would cost a copy of all of them, and a second reading for checksums; its reader maps the file, so that a damaged
disk shows as a signal and not as an error. docs/decisions/one-pass.md has what else was tried.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from meshwright.train.checksum import checksum

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
BLOCK = 1 << 22
"""Bytes of a tensor under one checksum: what must be read to trust a part of it."""
_ALIGN = 8
_LIBC = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE: the file is as long as what has been written
_FLUSH_EVERY = 1 << 26  # bytes; so that the last flush, which tells of no advance, has little to do on a slow disk


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor's bytes begin in its file, and the `checksum` of each BLOCK of them."""

    start: int
    sums: tuple[int, ...]


class Damaged(Exception):
    """Bytes are not those that were written."""


@dataclass(frozen=True)
class Stream:
    """A tensor that is written without being in memory as a whole.

    runs: makes its elements anew, in C order, as consecutive parts on any device; each but the last has a multiple of
    BLOCK bytes, and may lie where the one before lay. check: is given the elements of each block before it is
    written, and may raise what ends the writing.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    runs: Callable[[], Iterator[Tensor]]
    check: Callable[[Tensor], None] = lambda block: None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(
    path: Path,
    tensors: Sequence[tuple[str, Tensor]],
    advance: Callable[[], None] = lambda: None,
    check: Callable[[str, Tensor], None] = lambda name, tensor: None,
) -> tuple[int, dict[str, Stored]]:
    """Write `tensors` by name, on any device and with any strides, and flush them to the disk.

    `advance` is called after each block; `check`, of each block's name and elements before it is written, may raise
    what ends the writing. Returns the file's bytes and where each tensor lies. Takes memory only for a tensor that is
    not contiguous or not on the CPU. Raises OSError, and KeyError for a dtype that the format lacks.
    """
    return write_streams(path, [_stream(name, tensor, check) for name, tensor in tensors], advance)


def _stream(name: str, tensor: Tensor, check: Callable[[str, Tensor], None]) -> Stream:
    def runs() -> Iterator[Tensor]:
        yield tensor.detach().cpu().contiguous()

    return Stream(name, tensor.dtype, tuple(tensor.shape), runs, lambda block: check(name, block))


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
    header = _header(ordered, metadata)
    size = len(header) + sum(stream.nbytes for stream in ordered)
    with open(path, "wb", buffering=0) as file, _Flushing(file.fileno()) as flushing:
        _reserve(file.fileno(), size)
        _put(file, memoryview(header))
        for stream in ordered:
            start = file.tell()
            # All that is done to a block is done while it is in the processor's cache.
            sums: list[int] = []
            for block in _blocks(stream):
                sums.append(checksum(block))
                _put(file, block)
                flushing.written(len(block))
                advance()
            assert file.tell() - start == stream.nbytes, stream.name
            stored[stream.name] = Stored(start, tuple(sums))
        assert file.tell() == size
        flushing.join()
        os.fsync(file.fileno())
    return size, stored


def _reserve(descriptor: int, nbytes: int) -> None:
    """Have the disk set `nbytes` aside, where it can: writing them takes a quarter less, and a full disk is noticed at
    once. Raises OSError where there is no room."""
    # Not posix_fallocate, which writes to every page where the file system cannot, and makes the file look whole.
    fallocate = getattr(_LIBC, "fallocate", None)
    if fallocate is not None and fallocate(descriptor, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))


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
        flat = run.cpu().view(-1)
        content, item = memoryview(as_bytes(flat).numpy()), flat.element_size()
        part = len(content)
        for start in range(0, part, BLOCK):
            stream.check(flat[start // item : -(-(start + BLOCK) // item)])
            yield content[start : start + BLOCK]


def as_bytes(contiguous: Tensor) -> Tensor:
    """A contiguous tensor as uint8, 1-dim; a view."""
    # One element is contiguous whatever its strides, which `view` minds.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def _put(stream: BinaryIO, content: memoryview) -> None:
    while content:
        content = content[stream.write(content) :]


class Reader:
    """Reads parts of stored tensors, each block against its checksum on the way. Holds one block in memory."""

    def __init__(self) -> None:
        self._block = torch.empty(BLOCK, dtype=torch.uint8)

    def read(self, stored: Stored, nbytes: int, first: int, into: Tensor) -> Iterator[Callable[[BinaryIO], None]]:
        """What reads bytes [first, first + len(into)) of a tensor of `nbytes` bytes into a uint8 tensor on any device:
        to be called with the tensor's file, in turn, a block each.

        A call raises OSError, and Damaged where the file is too short or a checksum differs.
        """
        end = first + into.numel()
        assert 0 <= first <= end <= nbytes
        on_host = memoryview(into.numpy()) if into.device.type == "cpu" else None
        for number in range(first // BLOCK, -(-end // BLOCK)):
            start, stop = number * BLOCK, min((number + 1) * BLOCK, nbytes)
            place, wanted = stored.start + start, stored.sums[number]
            # A block that is wanted whole is read where it belongs.
            if on_host is not None and first <= start and stop <= end:
                yield functools.partial(_read_block, place, wanted, on_host[start - first : stop - first])
                continue
            low, high = max(start, first), min(stop, end)
            taken, target = slice(low - start, high - start), into[low - first : high - first]
            yield functools.partial(self._read_some, place, wanted, stop - start, taken, target)

    def _read_some(self, place: int, wanted: int, nbytes: int, taken: slice, into: Tensor, stream: BinaryIO) -> None:
        block = self._block[:nbytes]
        _read_block(place, wanted, memoryview(block.numpy()), stream)
        into.copy_(block[taken])


def _read_block(place: int, wanted: int, into: memoryview, stream: BinaryIO) -> None:
    stream.seek(place)
    if checksum(into, functools.partial(_fill, stream)) != wanted:
        raise Damaged("its checksum is not what was written")


def _fill(stream: BinaryIO, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        got = stream.readinto(buffer[done:] if done else buffer)  # type: ignore[attr-defined]
        if not got:
            raise Damaged("it is shorter than what was written")
        done += got
