"""A folder is whole or not there; and neither way needs memory for a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.cli.main import run as main
from meshwright.convert.exporting import export
from meshwright.convert.importing import import_folder
from meshwright.spec.errors import RunError, UserError

sys.path.insert(0, str(Path(__file__).parent))
from folders import LLAMA, folder, weights


@pytest.fixture
def run(tmp_path):
    import_folder(folder(tmp_path / "in", LLAMA), tmp_path / "run")
    return tmp_path / "run"


def test_runs_that_end_anywhere_in_a_tensor(tmp_path, monkeypatch):
    """Runs of 16 elements of rows of 12 or 20: parts of rows, whole rows, parts of rows."""
    for where in ("train.tensorfile.BLOCK", "train.manifest.BLOCK", "convert.importing.RUN", "convert.exporting.RUN"):
        monkeypatch.setattr(f"meshwright.{where}", 16)
    import_folder(folder(tmp_path / "in", LLAMA), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", dtype="bf16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in weights(LLAMA).items())


@pytest.mark.parametrize("size", ["1B", "exact", "one less", "largest"])
def test_the_edges_of_a_shards_size(tmp_path, run, size):
    """A file holds one tensor at least, and as many bytes as it may at most."""
    expected = weights(LLAMA)
    nbytes = [tensor.nbytes for tensor in expected.values()]
    most = {"1B": 1, "exact": sum(nbytes), "one less": sum(nbytes) - 1, "largest": max(nbytes)}[size]
    command = ["checkpoint", "export", str(run), str(tmp_path / "out"), "-q", "--shard-size", f"{most}B"]
    assert main(command) == 0
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    held = [load_file(file) for file in files]
    assert len(files) == {"1B": len(expected), "exact": 1, "one less": 2}.get(size, len(files))
    assert all(len(one) == 1 or sum(t.nbytes for t in one.values()) <= most for one in held)
    found = {name: tensor for one in held for name, tensor in one.items()}
    assert found.keys() == expected.keys() and sum(map(len, held)) == len(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    index = tmp_path / "out" / "model.safetensors.index.json"
    if size == "exact":
        assert [file.name for file in files] == ["model.safetensors"] and not index.exists()
    else:
        about = json.loads(index.read_text())
        assert about["metadata"]["total_size"] == sum(nbytes)
        assert all(name in load_file(tmp_path / "out" / file) for name, file in about["weight_map"].items())


def test_what_is_there_is_not_overwritten(tmp_path, run):
    for made in ("out", "dangling"):
        path = tmp_path / made
        path.mkdir() if made == "out" else path.symlink_to("nowhere")
        with pytest.raises(UserError, match=f"{made}: is there already, and is not overwritten"):
            export(run, path)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path, run, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    before = sorted(os.listdir(tmp_path))
    for call in ("os.fsync", "shutil.copyfile"):
        with monkeypatch.context() as patch:
            patch.setattr(f"meshwright.convert.config.{call}", full)
            tokenizer = str(tmp_path / "in" / "config.json")
            with pytest.raises(RunError, match="out could not be written: No space left on device"):
                export(run, tmp_path / "out", tokenizer=tokenizer)
        assert sorted(os.listdir(tmp_path)) == before


def test_what_killed_exports_left_is_cleared(tmp_path, run):
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    mine, others = tmp_path / f".saving-{os.getppid()}-out", tmp_path / f".saving-{child}-other"
    for path in (tmp_path / f".saving-{child}-out", mine, others):
        path.mkdir()
    export(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.glob(".saving-*")) == sorted([mine.name, others.name])


def test_a_number_that_the_dtype_cannot_hold(tmp_path):
    tensors = weights(LLAMA)
    tensors["model.norm.weight"][3] = 1e5
    import_folder(folder(tmp_path / "in", LLAMA, tensors), tmp_path / "run")
    with pytest.raises(RunError, match=r"model.norm.weight has numbers that float16 cannot hold"):
        export(tmp_path / "run", tmp_path / "out", dtype="fp16")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".saving-*"))
    export(tmp_path / "run", tmp_path / "out", dtype="bf16")


def test_a_damaged_checkpoint_is_named(tmp_path, run):
    file = run / "checkpoints" / "step-00000000" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match=r"rank-00000.safetensors is damaged: its checksum is not what was written"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_is_gone(tmp_path, run):
    with pytest.raises(UserError, match=r"tokenizer gone.json is not there .* give --tokenizer PATH"):
        export(run, tmp_path / "out", tokenizer="gone.json")


MEASURED = """
import sys
from pathlib import Path
from meshwright.convert import exporting, importing
from meshwright.convert.exporting import export
from meshwright.convert.importing import import_folder
from meshwright.train import manifest, tensorfile

exporting.RUN = importing.RUN = manifest.BLOCK = tensorfile.BLOCK = 1 << 20

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

def grown(work):
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = peak()
    work()
    return peak() - before

here = Path(sys.argv[1])
import_folder(here / "small", here / "small-run")
export(here / "small-run", here / "small-out", dtype="bf16")
print(grown(lambda: import_folder(here / "large", here / "large-run")))
print(grown(lambda: export(here / "large-run", here / "large-out", dtype="bf16")))
"""


def test_memory_does_not_grow_with_the_model(tmp_path):
    config = LLAMA | {"vocab_size": 50_000, "hidden_size": 256, "tie_word_embeddings": False}
    tensors = weights(config)
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert size > 100e6
    folder(tmp_path / "small", LLAMA)
    folder(tmp_path / "large", config, tensors)
    script = tmp_path / "measured.py"
    script.write_text(MEASURED)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    for grown in map(int, done.stdout.split()):
        assert grown < 0.3 * size, (grown, size)
    found = load_file(tmp_path / "large-out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in tensors.items())
