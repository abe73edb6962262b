"""No damage goes unseen, and all of it is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import run as command
from meshwright.convert.checking import check
from meshwright.convert.contents import find, inspect
from meshwright.convert.importing import import_folder
from meshwright.spec.errors import RunError, UserError
from meshwright.train import folders as train_folders
from meshwright.train import manifestfile

sys.path.insert(0, str(Path(__file__).parent))
from folders import LLAMA, folder

STEP = "step-00000000"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("whole")
    import_folder(folder(where / "in", LLAMA), where / "run")
    return where / "run"


@pytest.fixture
def saved(whole, tmp_path) -> Path:
    """The checkpoint's own folder, to be damaged."""
    subprocess.run(["cp", "-r", str(whole), str(tmp_path)], check=True)
    return tmp_path / "run" / "checkpoints" / STEP


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def changed(saved: Path, change) -> None:
    """Write the manifest anew, with its checksum, after `change` to what it says."""
    plain = manifestfile.read(saved)
    change(plain)
    (saved / manifestfile.NAME).write_text(json.dumps(plain | {"crc32": manifestfile.checksum(plain)}))


def test_a_whole_one(saved):
    told = []
    verdict = check(saved, lambda done, total: told.append((done, total)))
    size = (saved / "rank-00000.safetensors").stat().st_size
    assert verdict.findings == () and (verdict.path, verdict.tensors, verdict.files) == (saved, 63, 1)
    assert verdict.bytes == told[-1][0] <= size == told[-1][1]


def test_no_flipped_bit_goes_unseen(saved):
    """Of the header, of every tensor, and of the manifest."""
    for file, every in ((saved / "rank-00000.safetensors", 401), (saved / "manifest.json", 997)):
        for place in [*range(0, file.stat().st_size, every), 0, 9, file.stat().st_size - 1]:
            flip(file, place)
            assert any(str(file) in line for line in check(saved).findings), (file, place)
            flip(file, place)
    assert check(saved).findings == ()


def test_all_damage_is_named(saved):
    plain = manifestfile.read(saved)
    for name in ("model/model.norm.weight", "exp_avg/lm_head.weight"):
        flip(saved / "rank-00000.safetensors", plain["tensors"][name]["boxes"][0]["start"])
    findings = check(saved).findings
    assert len(findings) == 2
    assert all("rank-00000.safetensors is damaged: " in line for line in findings)
    told = "\n".join(findings)
    assert "model/model.norm.weight, the box at [0] of [12]: 1 of 1 blocks are not what was written" in told
    assert "exp_avg/lm_head.weight, the box at [0, 0] of [37, 12]" in told


def test_files_that_are_missing_or_short(saved):
    file = saved / "rank-00000.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    findings = check(saved).findings
    assert len(findings) == 2
    assert re.search(r"is damaged: [\d,]+ bytes, [\d,]+ were written$", findings[0]) and "1 of 1 blocks" in findings[1]
    os.truncate(file, 3)
    assert len(check(saved).findings) == 2 + 63  # its length, its header, and every tensor
    os.remove(file)
    assert check(saved).findings == (f"{file} is missing",)
    os.remove(saved / "manifest.json")
    assert check(saved.parent.parent).findings == (f"{saved / 'manifest.json'} is missing",)


def test_gaps_and_overlaps(saved):
    def shorter(plain):
        plain["tensors"]["model/model.norm.weight"]["shape"] = [13]

    def twice(plain):
        boxes = plain["tensors"]["model/lm_head.weight"]["boxes"]
        boxes.append(boxes[0])

    def elsewhere(plain):
        plain["tensors"]["model/lm_head.weight"]["boxes"][0]["file"] = "other"

    for change, wrong in (
        (shorter, "model/model.norm.weight is not whole: 12 of 13 elements are there"),
        (twice, "model/lm_head.weight is not whole: the boxes at [0, 0] and [0, 0] overlap"),
        (elsewhere, f"{saved / 'other'} is not among the files that the manifest lists"),
    ):
        before = (saved / manifestfile.NAME).read_text()
        changed(saved, change)
        assert wrong in check(saved).findings
        (saved / manifestfile.NAME).write_text(before)


def test_a_header_that_hides_a_tensor(saved):
    """The bytes are there and their checksums right, but other programs would not find them."""
    file = saved / "rank-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"model/lm_head.weight@0,0", b"model/lm_head.weight@0,1"))
    (finding,) = check(saved).findings
    assert finding == f"{file} is damaged: its header is wrong about model/lm_head.weight@0,0"


def test_a_folder_that_was_renamed(saved, tmp_path, monkeypatch):
    """It would be passed over by a run, or, were it not, be gone on from as another step."""
    renamed = saved.rename(train_folders.place(saved.parent, 25))
    for path in (renamed, tmp_path / "run", tmp_path / "run" / "checkpoints"):
        assert check(path).findings == (f"{renamed} holds step 0: somebody has renamed it",)
    monkeypatch.chdir(renamed)
    assert check(Path(".")).findings and command(["checkpoint", "verify", "."]) == 3
    for fine in ("superseded-step-00000000-2", "former-step-00000000", "kept"):
        renamed = renamed.rename(saved.parent / fine)
        assert check(renamed).findings == ()


def test_an_older_one_is_named_where_the_newest_is_damaged(saved, tmp_path, capsys):
    run = tmp_path / "run"
    for step in (10, 20, 30):
        later = train_folders.place(saved.parent, step)
        subprocess.run(["cp", "-r", str(saved), str(later)], check=True)
        changed(later, lambda plain, step=step: plain["meta"].update(step=step))
    flip(later / "rank-00000.safetensors", -1)
    flip(train_folders.place(saved.parent, 20) / "manifest.json", 50)
    ten = train_folders.place(saved.parent, 10)
    hint = f"; the newest before it that looks whole is {ten}; name that folder"
    assert command(["checkpoint", "export", str(run), str(tmp_path / "out")]) == 1
    assert f"rank-00000.safetensors is damaged: its checksum is not what was written{hint}" in capsys.readouterr().err
    flip(later / "manifest.json", 50)
    for words in (["export", str(run), str(tmp_path / "out")], ["inspect", str(saved.parent)]):
        assert command(["checkpoint", *words]) == 1
        err = capsys.readouterr().err
        assert str(later / "manifest.json") in err and hint in err
    # Who names one folder is not told of others.
    assert command(["checkpoint", "inspect", str(later)]) == 1 and "before it" not in capsys.readouterr().err
    os.remove(ten / "rank-00000.safetensors")
    os.remove(saved / "manifest.json")
    assert command(["checkpoint", "inspect", str(run)]) == 1
    assert "and no older one there looks whole" in capsys.readouterr().err


def test_where_the_newest_is(saved, tmp_path):
    assert find(saved) == find(saved.parent) == find(saved.parent.parent) == saved
    train_folders.place(saved.parent, 25).mkdir()
    assert find(tmp_path / "run").name == "step-00000025" and find(saved) == saved
    for path, wrong in ((tmp_path / "none", "no such folder"), (tmp_path, "no checkpoint there")):
        with pytest.raises(UserError, match=wrong):
            find(path)


def test_inspect(saved):
    found = inspect(saved.parent.parent)
    tensor = found.tensors["exp_avg/lm_head.weight"]
    assert (tensor.dtype, tensor.shape, tensor.boxes, tensor.files, tensor.bytes) == ("F32", (37, 12), 1, 1, 37 * 48)
    assert found.of_kind == dict.fromkeys(("model", "exp_avg", "exp_avg_sq"), 4 * found.parameters)
    assert (found.step, found.run["model"]["vocab"]) == (0, 37)
    os.remove(saved / "manifest.json")
    with pytest.raises(RunError, match=r"manifest\.json is missing"):
        inspect(saved)


@pytest.mark.parametrize(
    ("lose", "said"),
    [
        (lambda meta: meta.pop("run"), "run: field required"),
        (lambda meta: meta["run"].pop("precision"), "run precision: field required"),
        (lambda meta: meta.update(updates=None), "updates: input should be a valid integer"),
    ],
)
def test_one_that_no_run_has_written(saved, lose, said, capsys):
    """Whole, and of no use: each command says so, none of them with a traceback."""
    changed(saved, lambda plain: lose(plain["meta"]))
    for words in (["inspect"], ["export", "--tokenizer", "none"]):
        out = [str(saved.parent / "out")] * (words[0] == "export")
        assert command(["checkpoint", words[0], str(saved), *out, *words[1:]]) == 1
        assert f"the checkpoint was not written by a run: {said}" in capsys.readouterr().err


def test_neither_imports_torch(saved):
    script = (
        "import sys; from meshwright.cli.main import run; "
        f"codes = [run(['checkpoint', word, {str(saved)!r}]) for word in ('inspect', 'verify')]; "
        "print(codes, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0] False"


def test_commands_and_exit_codes(saved, tmp_path, capsys):
    run = str(tmp_path / "run")
    assert command(["checkpoint", "inspect", "--json", run]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["step"] == 0 and plain["parameters"] * 4 == plain["bytes"]["model"]
    assert plain["tensors"]["model/lm_head.weight"]["shape"] == [37, 12]
    assert command(["checkpoint", "inspect", run]) == 0
    out = capsys.readouterr().out
    assert f"llama, 2 layers of 12, {plain['parameters']:,} parameters" in out
    assert "model.layers.*.mlp.up_proj.weight (2)" in out and "20 × 12" in out
    assert command(["checkpoint", "verify", run]) == 0
    assert capsys.readouterr().out.startswith(f"whole: {saved}, 63 tensors, ")
    flip(saved / "rank-00000.safetensors", -1)
    assert command(["checkpoint", "verify", run]) == 3
    assert capsys.readouterr().out.startswith(f"damaged: {saved}, 1 finding\n  {saved}/rank-00000.safetensors is dam")
    assert command(["checkpoint", "export", run, str(tmp_path / "out")]) == 1
    assert "meshwright: failed: " in capsys.readouterr().err and not (tmp_path / "out").exists()
    for words in (
        ["inspect", str(tmp_path)],
        ["verify", str(tmp_path)],
        ["export", run, str(tmp_path)],
        ["export", run, str(tmp_path / "out"), "--shard-size", "5 apples"],
        ["import", str(tmp_path), str(tmp_path / "other")],
        ["mend", run],
    ):
        assert command(["checkpoint", *words]) == 2, words
        assert capsys.readouterr().err.count("\n") <= 4
