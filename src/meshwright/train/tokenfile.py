"""Token files: 1-D .npy arrays of integers, read through a memory map and written whole or not at all.

Those written here end with the CRC-32 of their tokens, four bytes that readers of .npy files leave alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from meshwright.spec.errors import UserError

CHUNK = 1 << 22  # tokens read or converted at once
_CRC_BYTES = 4
_ASIDE = ".writing-"
_STALE = 3600.0  # seconds without a write after which a file aside belongs to a process that died


def smallest(highest: int) -> np.dtype:
    """The smallest of uint8, uint16 and uint32 that holds ids up to `highest`."""
    return next(np.dtype(t) for t in (np.uint8, np.uint16, np.uint32) if highest <= np.iinfo(t).max)


def chunks(tokens: NDArray[np.integer]) -> Iterator[NDArray[np.integer]]:
    """`tokens` in parts of at most CHUNK."""
    for start in range(0, len(tokens), CHUNK):
        yield tokens[start : start + CHUNK]


def extremes(tokens: NDArray[np.integer]) -> tuple[int, int]:
    """The lowest and the highest id, of at least one."""
    both = [(int(part.min()), int(part.max())) for part in chunks(tokens)]
    return min(low for low, _ in both), max(high for _, high in both)


def open_tokens(path: Path) -> NDArray[np.integer]:
    """The token file a user named, memory-mapped. Raises UserError where it is not a whole, non-empty one."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if not size:
                raise UserError(f"data.path: {path} is empty; name a .npy file of token ids")
            shape, dtype, offset = _header(stream)
    except OSError as error:
        raise UserError(
            f"data.path: {path}: {(error.strerror or str(error)).lower()}; name a .npy file that can be read"
        ) from None
    except (ValueError, SyntaxError, EOFError):
        raise UserError(
            f"data.path: {path} is not a whole .npy file; write token ids with numpy.save, or give text another ending"
        ) from None
    if dtype.hasobject:
        raise UserError(f"data.path: {path} holds pickled objects, which are never loaded; save token ids as integers")
    if dtype.kind not in "iu":
        raise UserError(f"data.path: {path} holds {dtype}; token ids are integers, such as uint16")
    if len(shape) != 1:
        raise UserError(f"data.path: {path} has {len(shape)} dimensions {shape}; token ids have one, save them flat")
    if not shape[0]:
        raise UserError(f"data.path: {path} holds no tokens; name a .npy file of token ids")
    there = (size - offset) // dtype.itemsize
    if there < shape[0]:
        raise UserError(f"data.path: {path} is cut short, it holds {there} of {shape[0]} tokens; copy it again")
    return np.load(path, mmap_mode="r", allow_pickle=False)


def starts_beside(tokens: Path) -> Path:
    """The file that says where documents begin in the token file `tokens`: "ids-documents.npy" beside "ids.npy".

    1-D, integers: the place of each document's first token, ascending from 0.
    """
    return tokens.with_name(f"{tokens.stem}-documents.npy")


def open_starts(path: Path, tokens: int) -> NDArray[np.integer]:
    """Where documents begin in `tokens` tokens, as a user says, memory-mapped. Raises UserError for what cannot be."""
    if not path.exists():
        raise UserError(
            f"data.packing: documents of a .npy token file begin where {path} says, and there is none; save the place "
            "of each one's first token there, ascending from 0, or use data.packing=none"
        )
    starts = open_tokens(path)
    ascends = all(bool((starts[at + 1 : at + 1 + CHUNK] > starts[at : at + CHUNK][: len(starts) - at - 1]).all())
                  for at in range(0, len(starts), CHUNK))  # fmt: skip
    if int(starts[0]) or not ascends or int(starts[-1]) >= tokens:
        raise UserError(
            f"data.packing: {path} must hold the place of each document's first token, ascending from 0 and below the "
            f"{tokens} tokens that there are; write it again, or use data.packing=none"
        )
    return starts


def _header(stream: BinaryIO) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape, dtype and the offset of the data. Raises ValueError for what is no .npy file."""
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version}")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    return shape, dtype, stream.tell()


def is_whole(path: Path) -> bool:
    """Whether `path` is a token file written by `write`, of the length its header says."""
    try:
        with path.open("rb") as stream:
            shape, dtype, offset = _header(stream)
            return os.fstat(stream.fileno()).st_size == offset + shape[0] * dtype.itemsize + _CRC_BYTES
    except (OSError, ValueError, SyntaxError, EOFError, IndexError):
        return False


def is_sound(path: Path) -> bool:
    """Whether the tokens of a whole file are those that `write` wrote. Reads it through."""
    found = 0
    try:
        with path.open("rb") as stream:
            shape, dtype, _ = _header(stream)
            left = shape[0] * dtype.itemsize
            while left and (part := stream.read(min(left, CHUNK))):
                found = zlib.crc32(part, found)
                left -= len(part)
            return not left and stream.read() == found.to_bytes(_CRC_BYTES, "little")
    except (OSError, ValueError, SyntaxError, EOFError, IndexError):
        return False


def length(path: Path) -> int:
    """Tokens in a whole token file."""
    with path.open("rb") as stream:
        return int(_header(stream)[0][0])


def digest(path: Path) -> bytes:
    """16 bytes that tell the tokens of a whole file, and their dtype, from any others. Reads it through."""
    tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    found = hashlib.blake2b(f"{tokens.dtype.str} {len(tokens)}".encode(), digest_size=16)
    for part in chunks(tokens):
        found.update(np.ascontiguousarray(part).data)
    return found.digest()


def write(path: Path, parts: Iterable[NDArray[np.integer]], dtype: np.dtype) -> None:
    """Write `parts`, one after the other, as one token file of `dtype`: beside `path`, then renamed.

    Raises UserError, naming the folder, where that is not allowed or the disk is full.
    """
    aside = path.with_name(f"{_ASIDE}{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear_stale(path.parent)
        with aside.open("xb") as stream:
            _write(stream, parts, dtype)
        os.replace(aside, path)
    except OSError as error:
        raise UserError(
            f"out: {path.parent}: token files cannot be written: {(error.strerror or str(error)).lower()}; "
            "make room or set out to a folder that can be written"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


def _write(stream: BinaryIO, parts: Iterable[NDArray[np.integer]], dtype: np.dtype) -> None:
    count = checksum = 0
    _write_header(stream, count, dtype)
    data = stream.tell()
    for part in parts:
        content = memoryview(np.ascontiguousarray(part, dtype=dtype)).cast("B") if len(part) else b""
        stream.write(content)
        checksum = zlib.crc32(content, checksum)
        count += len(part)
    stream.write(checksum.to_bytes(_CRC_BYTES, "little"))
    stream.seek(0)
    _write_header(stream, count, dtype)
    # The format pads headers so that a growing first dimension fits.
    assert stream.tell() == data
    stream.flush()
    os.fsync(stream.fileno())


def _write_header(stream: BinaryIO, count: int, dtype: np.dtype) -> None:
    about = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    npy.write_array_header_1_0(stream, about)


def _clear_stale(folder: Path) -> None:
    for path in folder.glob(f"{_ASIDE}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE:
                path.unlink()
