"""What we write is what the safetensors library reads, and what we read is what was written or an error."""

from __future__ import annotations

import ctypes
import errno
import os
import types
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from meshwright.train import tensorfile
from meshwright.train.checksum import COLUMNS, checksum
from meshwright.train.tensorfile import Damaged, Reader

DTYPES = list(tensorfile.DTYPES)


@pytest.mark.parametrize("block", [5, 1 << 22])
def test_the_library_reads_every_dtype_and_shape(tmp_path, monkeypatch, block):
    monkeypatch.setattr(tensorfile, "BLOCK", block)
    flat = torch.arange(24.0)
    tensors = {str(dtype): (torch.arange(5) % 2).to(dtype) for dtype in DTYPES}
    tensors |= {
        "view": flat[3:15].view(3, 4),
        "turned": flat[3:15].view(3, 4).t(),
        "strided": flat[::5],
        "number": torch.tensor(7.0),
        "empty": torch.empty(0, 3),
        "grad": torch.ones(2, requires_grad=True),
        "naïve/名": torch.ones(1, dtype=torch.int8),
    }
    size, stored = tensorfile.write(tmp_path / "t", list(tensors.items()))
    assert size == (tmp_path / "t").stat().st_size
    found = load_file(tmp_path / "t")
    assert found.keys() == tensors.keys() == stored.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        ours = torch.empty_like(tensor.detach(), memory_format=torch.contiguous_format)
        read(tmp_path / "t", stored[name], ours.reshape(-1).view(torch.uint8))
        assert torch.equal(ours, tensor), name


def read(path, stored, into, nbytes=None, first=0):
    with open(path, "rb", buffering=0) as stream:
        for step in Reader().read(stored, len(into) if nbytes is None else nbytes, first, into):
            step(stream)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9))
def test_any_run_of_bytes(tmp_path_factory, first, length, block):
    content = torch.arange(40, dtype=torch.uint8)
    path = tmp_path_factory.mktemp("runs") / "t"
    length = min(length, 40 - first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorfile, "BLOCK", block)
        _, stored = tensorfile.write(path, [("a", content), ("b", content)])
        assert len(stored["b"].sums) == -(-40 // block)
        into = torch.full((length + 2,), 255, dtype=torch.uint8)
        read(path, stored["b"], into[1:-1], 40, first)
    assert into.tolist() == [255, *range(first, first + length), 255]


def test_damage_is_seen_in_the_block_it_is_in_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "BLOCK", 10)
    content = torch.arange(40, dtype=torch.uint8)
    _, stored = tensorfile.write(tmp_path / "t", [("a", content)])
    raw = bytearray((tmp_path / "t").read_bytes())
    raw[stored["a"].start + 13] ^= 4
    (tmp_path / "t").write_bytes(raw)
    into = torch.empty(10, dtype=torch.uint8)
    for first in (0, 20, 30):
        read(tmp_path / "t", stored["a"], into, 40, first)
    for first in (5, 10, 19):  # part of the damaged block, though not always the damaged byte
        with pytest.raises(Damaged, match="checksum"):
            read(tmp_path / "t", stored["a"], into, 40, first)
    os.truncate(tmp_path / "t", stored["a"].start + 39)
    with pytest.raises(Damaged, match="shorter"):
        read(tmp_path / "t", stored["a"], into, 40, 30)


def test_a_checksum_is_what_it_says():
    """Column sums by hand, of words that do not fill the last row, and of bytes that do not fill the last word."""
    content = bytes((i * 7 + i // 1000) % 256 for i in range(4 * COLUMNS * 2 + 4 * 5 + 3))
    sums = [0] * COLUMNS
    for number, start in enumerate(range(0, len(content), 4)):
        sums[number % COLUMNS] += int.from_bytes(content[start : start + 4].ljust(4, b"\0"), "little")
    expected = zlib.crc32(b"".join((s % 2**32).to_bytes(4, "little") for s in sums))
    assert checksum(memoryview(content)) == expected
    shifted = memoryview(b"x" + content)[1:]  # not aligned to words
    assert checksum(shifted) == expected


@pytest.mark.parametrize("size", [0, 3, 4 * COLUMNS, 4 * COLUMNS * 200 + 7])
def test_a_block_may_come_while_it_is_summed_up(size):
    """Every byte is there before it is looked at, in parts that a processor's cache holds."""
    torch.manual_seed(0)
    whole = memoryview(torch.randint(1, 256, (size,), dtype=torch.uint8).numpy())
    block, sizes = memoryview(bytearray(size)), []

    def come(part):
        part[:] = whole[sum(sizes) :][: len(part)]
        sizes.append(len(part))

    assert checksum(block, come) == checksum(whole)
    assert block == whole and max(sizes, default=0) <= 1 << 18


PAGE = 4096


@pytest.mark.parametrize("pages", [1024, 3])
def test_what_disks_do_changes_a_checksum(pages):
    torch.manual_seed(0)
    whole = bytearray(torch.randint(0, 256, (pages * PAGE,), dtype=torch.uint8).numpy().tobytes())
    before = checksum(memoryview(whole))
    last = (pages - 1) * PAGE
    for one, other in ((0, last), (PAGE, last), (0, PAGE)):
        swapped = bytearray(whole)
        swapped[one : one + PAGE], swapped[other : other + PAGE] = whole[other : other + PAGE], whole[one : one + PAGE]
        copied = bytearray(whole)
        copied[one : one + PAGE] = whole[other : other + PAGE]
        zeroed = bytearray(whole)
        zeroed[one : one + PAGE] = bytes(PAGE)
        for spoilt in (swapped, copied, zeroed):
            assert checksum(memoryview(spoilt)) != before
    for place in (0, 1, 4 * COLUMNS, len(whole) - 1):
        for bit in range(8):
            whole[place] ^= 1 << bit
            assert checksum(memoryview(whole)) != before
            whole[place] ^= 1 << bit
    assert checksum(memoryview(whole[1:] + whole[:1])) != before


def test_nothing_at_all(tmp_path):
    tensorfile.write(tmp_path / "t", [])
    assert load_file(tmp_path / "t") == {}


def test_wide_items_lie_aligned(tmp_path):
    tensors = {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(2, dtype=torch.float64), "c": torch.ones(1)}
    _, stored = tensorfile.write(tmp_path / "t", list(tensors.items()))
    content = (tmp_path / "t").read_bytes()
    assert (8 + int.from_bytes(content[:8], "little")) % 8 == 0 and stored["b"].start % 8 == 0
    with safe_open(tmp_path / "t", "pt") as file:
        assert list(file.offset_keys()) == ["b", "c", "a"]


def test_a_dtype_that_the_format_lacks(tmp_path):
    with pytest.raises(KeyError):
        tensorfile.write(tmp_path / "t", [("a", torch.ones(1, dtype=torch.complex128))])


def test_a_write_tells_that_it_advances_and_flushes_on_the_way(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "BLOCK", 100)
    monkeypatch.setattr(tensorfile, "_FLUSH_EVERY", 1000)
    done, flushed = [], []
    monkeypatch.setattr(tensorfile.os, "fdatasync", lambda _: flushed.append((tmp_path / "t").stat().st_size))
    tensorfile.write(tmp_path / "t", [("a", torch.ones(1000))], advance=lambda: done.append(1))
    assert len(done) == 40
    assert len(flushed) == 4 and flushed[0] >= 1000


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_flush_that_fails_on_the_way_fails_the_write(tmp_path, monkeypatch, nth):
    """The kernel tells of a page that could not be written once only."""
    monkeypatch.setattr(tensorfile, "BLOCK", 100)
    monkeypatch.setattr(tensorfile, "_FLUSH_EVERY", 1000)
    calls = iter(range(1, 100))

    def failing(descriptor):
        if next(calls) == nth:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(tensorfile.os, "fdatasync", failing)
    with pytest.raises(OSError, match="Input/output"):
        tensorfile.write(tmp_path / "t", [("a", torch.ones(1000))])


def test_a_disk_without_room_is_noticed_at_once(tmp_path, monkeypatch):
    """And one that cannot set room aside, or a system that cannot ask, is written to all the same."""

    def answer(code):
        def fallocate(*_):
            ctypes.set_errno(code)
            return -1

        return types.SimpleNamespace(fallocate=fallocate)

    for code in (errno.ENOSPC, errno.EDQUOT):
        monkeypatch.setattr(tensorfile, "_LIBC", answer(code))
        with pytest.raises(OSError, match=os.strerror(code)):
            tensorfile.write(tmp_path / "t", [("a", torch.ones(1000))])
        assert (tmp_path / "t").stat().st_size == 0
    for other in (answer(errno.EOPNOTSUPP), types.SimpleNamespace()):
        monkeypatch.setattr(tensorfile, "_LIBC", other)
        tensorfile.write(tmp_path / "t", [("a", torch.ones(1000))])
        assert torch.equal(load_file(tmp_path / "t")["a"], torch.ones(1000))


def test_a_short_write_is_gone_on_with(tmp_path, monkeypatch):
    """write(2) may take less than it is given, as on a disk that is nearly full."""
    content = torch.arange(100, dtype=torch.uint8)

    class Short:
        def __init__(self, stream):
            self.stream = stream

        def write(self, content):
            return self.stream.write(content[:7])

    plain = tensorfile._put
    monkeypatch.setattr(tensorfile, "_put", lambda stream, content: plain(Short(stream), content))
    tensorfile.write(tmp_path / "t", [("a", content)])
    assert torch.equal(load_file(tmp_path / "t")["a"], content)
