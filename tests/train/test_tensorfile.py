"""What we write is what the safetensors library reads."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from meshwright.train import tensorfile

DTYPES = list(tensorfile._DTYPES)


@pytest.mark.parametrize("chunk", [5, 1 << 22])
def test_the_library_reads_every_dtype_and_shape(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(tensorfile, "_CHUNK", chunk)
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
    size, checksum = tensorfile.write(tmp_path / "t", tensors)
    assert (size, checksum) == tensorfile.checksum(tmp_path / "t")
    assert size == (tmp_path / "t").stat().st_size
    found = load_file(tmp_path / "t")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_nothing_at_all(tmp_path):
    tensorfile.write(tmp_path / "t", {})
    assert load_file(tmp_path / "t") == {}


def test_wide_items_lie_aligned(tmp_path):
    tensors = {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(2, dtype=torch.float64), "c": torch.ones(1)}
    tensorfile.write(tmp_path / "t", tensors)
    content = (tmp_path / "t").read_bytes()
    assert (8 + int.from_bytes(content[:8], "little")) % 8 == 0
    with safe_open(tmp_path / "t", "pt") as file:
        assert list(file.offset_keys()) == ["b", "c", "a"]


def test_a_dtype_that_the_format_lacks(tmp_path):
    with pytest.raises(KeyError):
        tensorfile.write(tmp_path / "t", {"a": torch.ones(1, dtype=torch.complex128)})


def test_a_write_tells_that_it_advances_and_flushes_on_the_way(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "_CHUNK", 100)
    monkeypatch.setattr(tensorfile, "_FLUSH_EVERY", 1000)
    done, flushed = [], []
    monkeypatch.setattr(tensorfile.os, "fdatasync", lambda _: flushed.append((tmp_path / "t").stat().st_size))
    tensorfile.write(tmp_path / "t", {"a": torch.ones(1000)}, advance=lambda: done.append(1))
    assert len(done) == 41  # the header and 4,000 bytes
    assert len(flushed) == 4 and flushed[0] >= 1000
