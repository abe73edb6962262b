"""What is damaged, or of another format, is named and passed over. One rank."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
from safetensors.torch import load_file
from tests.train.saving import save

from meshwright.convert.checking import check
from meshwright.convert.contents import inspect
from meshwright.spec.errors import RunError
from meshwright.train import checkpoint, manifestfile, storage
from meshwright.train.checkpoint import Newest
from meshwright.train.parts import Part


def truncate(file):
    os.truncate(file, os.path.getsize(file) - 1)


def flip(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, os.remove], ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json"])
def test_damage_is_named_and_what_a_look_finds_passed_over(tmp_path, damage, name):
    save(tmp_path, 10)
    damaged = save(tmp_path, 20) / name
    damage(damaged)
    if damage is flip and name == "manifest.json":
        damaged.write_text(json.dumps(["no", "checkpoint"]))
    with pytest.raises(RunError, match=name) as told:
        checkpoint.load(damaged.parent)
    assert str(told.value).startswith(str(damaged)) and "char" not in str(told.value)
    found = checkpoint.newest(tmp_path)
    if damage is flip and name != "manifest.json":
        assert found.step == 20, "checksums are taken when it is read; the ranks then go on to the next, see test_loop"
        assert checkpoint.newest(tmp_path, before=20) == Newest(10, ())
    else:
        assert found.step == 10 and str(damaged) in found.skipped[0]


def test_no_flipped_byte_of_the_tensors_goes_unseen(tmp_path):
    where = save(tmp_path, 10)
    file = where / "rank-00000.safetensors"
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")  # what comes before is for other programs; we go by the manifest
    assert load_file(file).keys() == {"model/a@0,0", "exp_avg/a@0"}
    for place in range(begin, len(whole)):
        for bit in (1, 4, 128):
            content = bytearray(whole)
            content[place] ^= bit
            file.write_bytes(content)
            with pytest.raises(RunError, match="checksum"):
                checkpoint.load(where)


def test_no_flipped_bit_of_the_manifest_goes_unseen(tmp_path):
    file = save(tmp_path, 10) / "manifest.json"
    whole = file.read_bytes()
    for place in range(len(whole)):
        for bit in (1, 4, 128):
            content = bytearray(whole)
            content[place] ^= bit
            file.write_bytes(content)
            with pytest.raises(RunError):
                checkpoint.load(file.parent)


@pytest.mark.parametrize("content", ["5", "null", "[]", "{}", '"format crc32"', "\udc80", '{"crc32": 1}'])
def test_a_manifest_that_is_none(tmp_path, content):
    file = save(tmp_path, 10) / "manifest.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    assert checkpoint.newest(tmp_path).step is None


MISFITS = {
    "tensors model/a dtype: input should be 'F64', ": lambda plain: tensor(plain).update(dtype="F8_E4M3"),
    "tensors model/a boxes: field required": lambda plain: tensor(plain).pop("boxes"),
    "tensors model/a shape: input should be a valid list": lambda plain: tensor(plain).update(shape=None),
    "tensors model/a boxes 0 start: input should be a valid integer": lambda plain: box(plain).update(start="0"),
    "model/a has 0 checksums for 24 bytes": lambda plain: box(plain).update(sums=[]),
    "model/a has 2 checksums for 24 bytes": lambda plain: box(plain)["sums"].append(3),
    "model/a has a box that lies outside of rank-00000.safetensors": lambda plain: box(plain).update(start=2**70),
    "meta: field required": lambda plain: plain.pop("meta"),
    "files: input should be a valid dictionary": lambda plain: plain.update(files=[]),
}


def tensor(plain):
    return plain["tensors"]["model/a"]


def box(plain):
    return tensor(plain)["boxes"][0]


@pytest.mark.parametrize("wrong", MISFITS)
def test_a_manifest_that_says_what_it_cannot_is_damaged_whatever_its_checksum(tmp_path, wrong):
    """Some other program wrote it. Nobody falls over it, and nobody calls it whole."""
    save(tmp_path, 10)
    where = save(tmp_path, 20)
    plain = manifestfile.read(where)
    MISFITS[wrong](plain)
    manifestfile.write(where / "manifest.json", plain)
    said = f"{where}/manifest.json is damaged: {wrong}"
    found = checkpoint.newest(tmp_path)
    assert found.step == 10 and found.skipped[0].startswith(said)
    assert len(check(where).findings) == 1 and check(where).findings[0].startswith(said)
    with pytest.raises(RunError, match=re.escape(said)):
        inspect(where)


@pytest.mark.parametrize("shape", [(3, 3), (1, 3), (6,), ()])
def test_what_is_of_another_shape_is_not_filled_in_part(tmp_path, shape):
    where, part = save(tmp_path, 10), Part.whole("model/a", torch.full(shape, 7.0))
    with pytest.raises(RunError, match=re.escape(f"the checkpoint's model/a is (2, 3), needed {shape}")):
        checkpoint.read(where, [Part.whole("exp_avg/a", torch.zeros(3)), part])
    assert torch.equal(part.tensor, torch.full(shape, 7.0))


def test_a_manifest_of_a_later_version_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.manifest, "VERSION", 2)
    where = save(tmp_path, 10)
    monkeypatch.undo()
    with pytest.raises(RunError, match="of version 2 of the format; this release reads 1"):
        checkpoint.load(where)


def test_one_of_an_older_release_is_named_as_such(tmp_path):
    old = tmp_path / "step-00000010"
    old.mkdir()
    (old / "meta.json").write_text("{}")
    (old / "tensors.safetensors").write_bytes(b"")
    found = checkpoint.newest(tmp_path)
    assert found == Newest(None, (f"{old} is of an older release; this one does not read its format",))
    with pytest.raises(RunError, match="of an older release"):
        checkpoint.load(old)
