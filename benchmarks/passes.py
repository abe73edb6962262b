"""What each pass over a shard's bytes costs, in this process's seconds of computing: docs/decisions/one-pass.md.

    python benchmarks/passes.py [--ranks 1] [--megabytes 320] [--rounds 9] [--folder DIR]

Boxes of 1.6 MB, in turn by every way, there and back again, in the page cache; medians. With several ranks all of them
do the same at once, each with a file and tensors of its own, and rank 0's is told: they share the way to memory.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import race
from meshwright.train import checkpoint, tensorfile
from meshwright.train.checksum import COLUMNS, checksum
from meshwright.train.manifest import Entry, Manifest, StoredBox
from meshwright.train.parts import Part
from meshwright.train.storage import _check_finite
from meshwright.train.tensorfile import BLOCK

BOX = 400_000  # floats
POPULATE_READ = 22  # MADV_POPULATE_READ
PART = 63 * COLUMNS * 4  # bytes that `checksum` takes at once


def loading(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Callable[[], None]]:
    """The file of `write` below `folder`, and the library's, into `tensors`."""
    file, plain = folder / "rank-00000.safetensors", folder / "plain"
    size, stored = tensorfile.write(file, list(tensors.items()))
    save_file(tensors, plain)
    parts = [Part.whole(name, tensor) for name, tensor in tensors.items()]
    boxes = {p.name: StoredBox(p.box, file.name, p.name, stored[p.name]) for p in parts}
    entries = {p.name: Entry(p.tensor.dtype, p.shape, (boxes[p.name],)) for p in parts}
    found = Manifest({}, {file.name: size}, entries)
    places = sorted((s.start, memoryview(tensorfile.as_bytes(tensors[name]).numpy())) for name, s in stored.items())

    def library() -> None:
        for name, tensor in load_file(plain).items():
            tensors[name].copy_(tensor)

    def read(summed: bool) -> None:
        with open(file, "rb", buffering=0) as stream:
            for start, into in places:
                stream.seek(start)
                stream.readinto(into)
                if summed:
                    checksum(into)

    def by_parts() -> None:
        with open(file, "rb", buffering=0) as stream:
            for start, into in places:
                stream.seek(start)
                checksum(into, stream.readinto)  # type: ignore[attr-defined]

    def through_a_buffer() -> None:
        buffer = memoryview(bytearray(PART))
        with open(file, "rb", buffering=0) as stream:
            for start, into in places:
                stream.seek(start)
                for first in range(0, len(into), PART):
                    there = into[first : first + PART]
                    stream.readinto(buffer[: len(there)])
                    checksum(buffer[: len(there)])
                    there[:] = buffer[: len(there)]

    def from_the_cache(summed: Callable[[memoryview], int] | None) -> None:
        buffer = memoryview(bytearray(PART))
        for _, into in places:
            for first in range(0, len(into), PART):
                there = into[first : first + PART]
                came = buffer[: len(there)]
                if summed:
                    summed(came)
                else:
                    there[:] = came

    def copied_then_summed(populated: bool) -> None:
        with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as whole:
            for start, into in places:
                page = start // mmap.PAGESIZE * mmap.PAGESIZE
                if populated:
                    whole.madvise(POPULATE_READ, page, start + len(into) - page)
                content = memoryview(whole)[start : start + len(into)]
                copied = [into[i : i + PART] for i in range(0, len(into), PART)]
                for i, there in enumerate(copied):
                    came = content[i * PART : i * PART + len(there)]
                    there[:] = came
                    checksum(came)
                    came.release()
                content.release()

    def mapped(populated: bool) -> None:
        with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as whole:
            for start, into in places:
                page = start // mmap.PAGESIZE * mmap.PAGESIZE
                if populated:
                    whole.madvise(POPULATE_READ, page, start + len(into) - page)
                content = np.frombuffer(whole, np.uint8, len(into), start)
                checksum(memoryview(content))
                np.frombuffer(into, np.uint8)[:] = content
                del content
                whole.madvise(mmap.MADV_DONTNEED, page, start + len(into) - page)

    return {
        "load_file and a copy": library,
        "read": lambda: read(False),
        "read, and a checksum of all 1.6 MB": lambda: read(True),
        "read, and a checksum after each 254 KiB": by_parts,
        "the same by a buffer, and a copy out of it": through_a_buffer,
        "checkpoint.read": lambda: checkpoint.read(folder, parts, found),
        "a checksum of the mapped file, and a copy": lambda: mapped(False),
        "the same, populated first": lambda: mapped(True),
        "mapped: each 254 KiB a copy, then a checksum": lambda: copied_then_summed(False),
        "the same, each box populated first": lambda: copied_then_summed(True),
        "checksums alone": lambda: [checksum(into) for _, into in places] and None,
        "checksums alone, of a buffer in the cache": lambda: from_the_cache(checksum),
        "copies alone, out of a buffer in the cache": lambda: from_the_cache(None),
    }


def saving(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Callable[[], None]]:
    """`tensors` into a file that is not there yet."""
    file = folder / "saved"

    def library() -> None:
        save_file(tensors, file)
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def written(reserve: bool) -> None:
        with open(file, "wb", buffering=0) as stream:
            if reserve:
                tensorfile._reserve(stream.fileno(), sum(t.nbytes for t in tensors.values()))
            for tensor in tensors.values():
                content = memoryview(tensorfile.as_bytes(tensor).numpy())
                for start in range(0, len(content), BLOCK):
                    stream.write(content[start : start + BLOCK])
            os.fsync(stream.fileno())

    pairs = list(tensors.items())
    return {
        "save_file and a flush": library,
        "writes and a flush": lambda: written(False),
        "the same after fallocate": lambda: written(True),
        "tensorfile.write": lambda: tensorfile.write(file, pairs) and None,
        "tensorfile.write, and a look for not finite": lambda: (
            tensorfile.write(file, pairs, lambda: None, _check_finite) and None
        ),
    }


def contest(rank: int, megabytes: int, rounds: int, below: str) -> None:
    folder = Path(below) / str(rank)
    folder.mkdir()
    tensors = {f"{i:04d}": torch.randn(BOX) for i in range(megabytes * 10**6 // (4 * BOX))}
    ways = loading(folder, tensors) | saving(folder, tensors)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items() if number % 2 else reversed(ways.items()):
            (folder / "saved").unlink(missing_ok=True)
            dist.barrier()
            began = time.process_time()
            way()
            if number:  # the first makes what is used again
                seconds[name].append(time.process_time() - began)
    if rank == 0:
        for name, each in seconds.items():
            print(f"{name:45} {statistics.median(each) * 1e3:6.1f} ms ({min(each) * 1e3:.1f} to {max(each) * 1e3:.1f})")
        print(f"load average {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--megabytes", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", help="on the disk in question; by default a temporary one")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="passes-", dir=options.folder)
    try:
        race.start_ranks(options.ranks, contest, options.megabytes, options.rounds, folder)
    finally:
        shutil.rmtree(folder)
