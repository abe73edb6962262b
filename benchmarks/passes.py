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
from collections.abc import Callable, Iterator
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


class Loads:
    """The file of `write` below `folder`, and the library's, in many ways into `tensors`."""

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.folder, self.tensors = folder, tensors
        self.file, self.plain = folder / "rank-00000.safetensors", folder / "plain"
        size, stored = tensorfile.write(self.file, list(tensors.items()))
        save_file(tensors, self.plain)
        self.parts = [Part.whole(name, tensor) for name, tensor in tensors.items()]
        boxes = {p.name: StoredBox(p.box, self.file.name, p.name, stored[p.name]) for p in self.parts}
        entries = {p.name: Entry(p.tensor.dtype, p.shape, (boxes[p.name],)) for p in self.parts}
        self.found = Manifest({}, {self.file.name: size}, entries)
        self.places = sorted(
            (s.start, memoryview(tensorfile.as_bytes(tensors[name]).numpy())) for name, s in stored.items()
        )

    def ways(self) -> dict[str, Callable[[], None]]:
        return {
            "load_file and a copy": self.library,
            "read": lambda: self.read(False),
            "read, and a checksum of all 1.6 MB": lambda: self.read(True),
            "read, and a checksum after each 254 KiB": self.by_parts,
            "the same by a buffer, and a copy out of it": self.through_a_buffer,
            "checkpoint.read": lambda: checkpoint.read(self.folder, self.parts, self.found),
            "a checksum of the mapped file, and a copy": lambda: self.mapped(False),
            "the same, populated first": lambda: self.mapped(True),
            "mapped: each 254 KiB a copy, then a checksum": lambda: self.copied_then_summed(False),
            "the same, each box populated first": lambda: self.copied_then_summed(True),
            "checksums alone": self.sums,
            "checksums alone, of a buffer in the cache": lambda: self.from_the_cache(checksum),
            "copies alone, out of a buffer in the cache": lambda: self.from_the_cache(None),
        }

    def library(self) -> None:
        for name, tensor in load_file(self.plain).items():
            self.tensors[name].copy_(tensor)

    def read(self, summed: bool) -> None:
        with open(self.file, "rb", buffering=0) as stream:
            for start, into in self.places:
                stream.seek(start)
                stream.readinto(into)
                if summed:
                    checksum(into)

    def by_parts(self) -> None:
        with open(self.file, "rb", buffering=0) as stream:
            for start, into in self.places:
                stream.seek(start)
                checksum(into, stream.readinto)  # type: ignore[attr-defined]

    def through_a_buffer(self) -> None:
        buffer = memoryview(bytearray(PART))
        with open(self.file, "rb", buffering=0) as stream:
            for start, into in self.places:
                stream.seek(start)
                for there in _parts(into):
                    stream.readinto(buffer[: len(there)])
                    checksum(buffer[: len(there)])
                    there[:] = buffer[: len(there)]

    def sums(self) -> None:
        for _, into in self.places:
            checksum(into)

    def from_the_cache(self, summed: Callable[[memoryview], int] | None) -> None:
        buffer = memoryview(bytearray(PART))
        for _, into in self.places:
            for there in _parts(into):
                came = buffer[: len(there)]
                if summed:
                    summed(came)
                else:
                    there[:] = came

    def copied_then_summed(self, populated: bool) -> None:
        with open(self.file, "rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as whole:
            for start, into in self.places:
                if populated:
                    whole.madvise(POPULATE_READ, *_pages(start, into))
                content = memoryview(whole)[start : start + len(into)]
                for there, came in zip(_parts(into), _parts(content), strict=True):
                    there[:] = came
                    checksum(came)
                    came.release()
                content.release()

    def mapped(self, populated: bool) -> None:
        with open(self.file, "rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as whole:
            for start, into in self.places:
                if populated:
                    whole.madvise(POPULATE_READ, *_pages(start, into))
                content = np.frombuffer(whole, np.uint8, len(into), start)
                checksum(memoryview(content))
                np.frombuffer(into, np.uint8)[:] = content
                del content
                whole.madvise(mmap.MADV_DONTNEED, *_pages(start, into))


def _parts(content: memoryview) -> Iterator[memoryview]:
    return (content[first : first + PART] for first in range(0, len(content), PART))


def _pages(start: int, into: memoryview) -> tuple[int, int]:
    """Offset and length of the pages that hold a box at `start`."""
    page = start // mmap.PAGESIZE * mmap.PAGESIZE
    return page, start + len(into) - page


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
    ways = Loads(folder, tensors).ways() | saving(folder, tensors)
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
