"""`meshwright train` up to the ranks: what it checks, shows and starts. Training itself: tests/train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

import meshwright.train.launch
import meshwright.train.loop
import meshwright.train.text
from meshwright.cli.common import split
from meshwright.cli.main import run
from meshwright.cli.train import check_writable
from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.load import describe, load_run
from meshwright.spec.run import RunSpec
from meshwright.train.lock import locked
from meshwright.train.signals import StopFlag


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What was launched, with the run that the ranks would read; or the run of this process as a rank."""
    seen: dict[str, Any] = {}

    def launch(argv: list[str], **options: Any) -> int:
        seen.update(argv=argv, run=load_run(Path(argv[1])), **options)
        return 130

    def run_rank(run: RunSpec, stop: StopFlag, **options: Any) -> int:
        stop.restore()
        seen.update(rank=run, **options)
        return 3

    monkeypatch.setattr(meshwright.train.launch, "launch", launch)
    monkeypatch.setattr(meshwright.train.loop, "run_rank", run_rank)
    monkeypatch.setattr(meshwright.train.text, "prepare", lambda *a, say: seen.update(prepared=a))
    # These tests ask for ranks as they like, wherever they run.
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: None)
    monkeypatch.chdir(tmp_path)
    return seen


def test_the_ranks_get_the_resolved_run(started: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.yaml").write_text("model: gpt2-tiny\nout: runs/x\n")
    assert run(["train", "my.yaml", "model.layers=2", "--ranks", "3"]) == 130
    assert started["run"] == load_run(Path("my.yaml"), ["model.layers=2", "layout.dp=3"])
    assert (started["ranks"], started["folder"]) == (3, Path("runs/x"))
    assert started["argv"][2:] == []
    assert started["prepared"] == (started["run"].data, 256, Path("runs/x/data"))
    assert not Path(started["argv"][1]).exists()
    assert not Path("runs").exists()
    out, err = capsys.readouterr()
    assert out == ""
    assert "layout   dp=3: 3 ranks" in err and "memory" in err and "6 all_reduce over dp (zero.reduce)" not in err
    assert "Parameters" not in err


def test_options_reach_the_ranks(started: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    run(["train", "-q", "--debug"])
    assert capsys.readouterr().err == ""
    assert (started["argv"][2:], started["quiet"], started["debug"]) == (["--quiet", "--debug"], True, True)
    run(["train", "-v"])
    assert "Memory of a rank" in capsys.readouterr().err


def test_show_prints_the_resolved_run(started: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--show", "steps=77", "--ranks", "5"]) == 0
    out, _ = capsys.readouterr()
    Path("again.yaml").write_text(out)
    assert load_run(Path("again.yaml")) == RunSpec(steps=77, layout=Layout(dp=5))
    assert set(yaml.safe_load(out)) == set(RunSpec.model_fields)
    assert started == {}


def test_fields_lists_them_all_and_breaks_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--fields"]) == 0
    out, _ = capsys.readouterr()
    starts = [line.split(" ")[0] for line in out.splitlines()]
    assert [start for start in starts if start] == ["field", *(row.name for row in describe())]
    assert "[tp, cp, dp, pp]" in out
    shown = set(out.split())
    assert not [word for row in describe() for word in f"{row.takes} {row.description}".split() if word not in shown]


class TestRank:
    @pytest.fixture(autouse=True)
    def environment(self, started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("MESHWRIGHT_LAUNCHED", raising=False)
        # A rank that fails leaves at once; here it may not take the tests with it.
        monkeypatch.setattr("meshwright.train.report._leave", lambda code: None)

    def test_joins_torchrun(self, started: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["train", "-q"]) == 3
        assert started == {"rank": RunSpec(layout=Layout(dp=4)), "quiet": True}
        run(["train"])
        assert "dp=4: 4 ranks" in capsys.readouterr().err

    def test_only_one_rank_speaks(
        self, started: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MESHWRIGHT_LAUNCHED", "1")
        run(["train"])
        monkeypatch.delenv("MESHWRIGHT_LAUNCHED")
        monkeypatch.setenv("RANK", "3")
        run(["train"])
        assert capsys.readouterr() == ("", "")

    def test_another_number_of_ranks(self, started: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["train", "--ranks", "3"]) == 2
        assert "--ranks 3: 4 were started; leave --ranks out" in capsys.readouterr().err
        assert run(["train", "--bogus"]) == 2
        assert "No such option" in capsys.readouterr().err
        assert started == {}

    def test_of_srun(self, started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """Started by srun, it is one rank of several and starts none."""
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
        slurm = {"PROCID": "2", "STEP_NUM_TASKS": "3", "LOCALID": "0", "LAUNCH_NODE_IPADDR": "::1", "JOB_ID": "7"}
        for name, value in slurm.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        assert run(["train"]) == 3
        assert started == {"rank": RunSpec(layout=Layout(dp=3)), "quiet": False}

    def test_of_torchrun_holds_the_folder(
        self, started: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with locked(Path("runs/demo")):
            assert run(["train", "-q"]) == 2
            assert f"another run is in runs/demo: process {os.getpid()} on " in capsys.readouterr().err
            monkeypatch.setenv("RANK", "1")
            assert run(["train", "-q"]) == 3


def test_a_folder_that_another_run_holds(started: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with locked(Path("runs/demo")):
        assert run(["train"]) == 2
    assert "reading" not in (err := capsys.readouterr().err) and err.count("\n") == 1
    assert f"error: out: another run is in runs/demo: process {os.getpid()} on " in err
    assert started == {}
    assert run(["train"]) == 130
    assert not Path("runs").exists()


def test_a_device_that_is_not_there(started: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "device=cuda"]) == 2
    assert capsys.readouterr().err == (
        "meshwright: error: device: cuda is not there, torch finds no accelerator; use device=cpu or device=auto\n"
    )
    assert started == {} and not Path("runs").exists()


def test_too_many_ranks(started: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "layout.dp=100000"]) == 2
    assert "100000 ranks are too many for this machine" in capsys.readouterr().err
    assert started == {}


def test_data_is_judged_before_anything_starts(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(*_: Any, **__: Any) -> None:
        raise UserError("data.path: no such file")

    monkeypatch.setattr(meshwright.train.text, "prepare", prepare)
    assert run(["train"]) == 2
    assert capsys.readouterr().err == "reading stdlib\nmeshwright: error: data.path: no such file\n"
    assert "argv" not in started


def test_a_checkpoint_that_is_not_there_is_found_before_anything_starts(
    started: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/demo/checkpoints/step-00000025").mkdir(parents=True)
    assert run(["train", "checkpoint.resume=99"]) == 2
    assert capsys.readouterr().err == (
        "meshwright: error: checkpoint.resume=99: runs/demo/checkpoints has no checkpoint of step 99, "
        "only of 25; name one of these, or auto\n"
    )
    assert started == {}


def test_output_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path / "new" / "deep")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"out: .* cannot be a folder, .*file is a file; name another"):
            check_writable(path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="cannot be a folder"):
        check_writable(tmp_path / "dangling")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(UserError, match=r"cannot be written, .* does not allow it"):
        check_writable(tmp_path / "new")


def test_a_file_is_told_from_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=1").mkdir()
    Path("lr=1/run.yaml").touch()
    Path("run.yaml").touch()
    assert split(["steps=3", "lr=1/run.yaml"]) == (Path("lr=1/run.yaml"), ["steps=3"])
    assert split(["run.yaml", "data.path=a/b"]) == (Path("run.yaml"), ["data.path=a/b"])
    assert split(["a=b=c"]) == (None, ["a=b=c"])
    with pytest.raises(UserError, match=r"rum\.yaml: no such run file; did you mean run\.yaml"):
        split(["rum.yaml"])
