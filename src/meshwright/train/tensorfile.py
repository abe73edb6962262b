"""Tensors into a safetensors file in one pass: flat buffers' views as they are, the checksum taken on the way.

The format: 8 bytes N, little-endian; N bytes of JSON, name → dtype, shape, data_offsets; then the tensors' bytes.
(https://github.com/huggingface/safetensors#format). The library's own writer needs tensors that share no storage, so
it would cost a copy of all of them, and a second reading for the checksum: three times as long for 500 MB.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_CHUNK = 1 << 22  # bytes summed and written at once
_ALIGN = 8
_FLUSH_EVERY = 1 << 28  # bytes; so that the last flush, which tells of no advance, has little to do on a slow disk


def write(path: Path, tensors: Mapping[str, Tensor], advance: Callable[[], None] = lambda: None) -> tuple[int, int]:
    """Write `tensors` by name, on any device and with any strides, and flush them to the disk.

    `advance` is called after each few MB. Returns the file's bytes and CRC-32. Takes memory only for a tensor that is
    not contiguous or not on the CPU. Raises OSError, and KeyError for a dtype that the format lacks.
    """
    # Wide items first keep every tensor aligned to its item, which readers ask for.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    size = checksum = flushed = 0
    with open(path, "wb") as stream:
        for part in _parts([(name, tensors[name]) for name in order]):
            checksum = zlib.crc32(part, checksum)
            size += len(part)
            stream.write(part)
            if size - flushed >= _FLUSH_EVERY:
                stream.flush()
                os.fdatasync(stream.fileno())
                flushed = size
            advance()
        stream.flush()
        os.fsync(stream.fileno())
    return size, checksum


def checksum(path: Path) -> tuple[int, int]:
    """The bytes and CRC-32 of the file as it lies on the disk."""
    size = found = 0
    with open(path, "rb") as stream:
        while part := stream.read(_CHUNK):
            size += len(part)
            found = zlib.crc32(part, found)
    return size, found


def _parts(tensors: list[tuple[str, Tensor]]) -> Iterator[bytes | memoryview]:
    header, end = {}, 0
    for name, tensor in tensors:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % _ALIGN)
    yield len(words).to_bytes(8, "little") + words
    for _, tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        content = memoryview(flat.numpy())
        for start in range(0, len(content), _CHUNK):
            yield content[start : start + _CHUNK]
