"""What each pass over a shard's bytes costs, in this process's seconds of computing: docs/decisions/one-pass.md.

    python benchmarks/passes.py [--megabytes 320] [--rounds 9] [--folder DIR]

Boxes of 1.6 MB, in turn by every way, in the page cache; medians.
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
from safetensors.torch import load_file, save_file

from meshwright.train import checkpoint, tensorfile
from meshwright.train.checksum import checksum
from meshwright.train.manifest import Entry, Manifest, StoredBox
from meshwright.train.parts import Part
from meshwright.train.storage import _check_finite
from meshwright.train.tensorfile import BLOCK

BOX = 400_000  # floats
POPULATE_READ = 22  # MADV_POPULATE_READ


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
        "read and a checksum": lambda: read(True),
        "checkpoint.read": lambda: checkpoint.read(folder, parts, found),
        "a checksum of the mapped file, and a copy": lambda: mapped(False),
        "the same, populated first": lambda: mapped(True),
        "checksums alone": lambda: [checksum(into) for _, into in places] and None,
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", help="on the disk in question; by default a temporary one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="passes-", dir=options.folder))
    try:
        tensors = {f"{i:04d}": torch.randn(BOX) for i in range(options.megabytes * 10**6 // (4 * BOX))}
        ways = loading(folder, tensors) | saving(folder, tensors)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(options.rounds + 1):
            for name, way in ways.items():
                (folder / "saved").unlink(missing_ok=True)
                began = time.process_time()
                way()
                if number:  # the first makes what is used again
                    seconds[name].append(time.process_time() - began)
        for name, each in seconds.items():
            print(f"{name:45} {statistics.median(each) * 1e3:6.1f} ms ({min(each) * 1e3:.1f} to {max(each) * 1e3:.1f})")
        print(f"load average {os.getloadavg()[0]:.1f}")
    finally:
        shutil.rmtree(folder)
