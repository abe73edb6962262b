"""`layout=auto`: what is planned for, what is said, and what the run then is."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.common import read
from meshwright.cli.main import run as command
from meshwright.cli.planned import cluster_of, planned
from meshwright.spec.devices import cluster
from meshwright.spec.errors import UserError
from meshwright.spec.load import load_run
from meshwright.train import probe

TINY = ("model=llama-tiny", "data.seq_len=64", "batch.sequences=8", "layout=auto")


def test_the_run_gets_a_layout_for_all_devices_and_keeps_the_rest(capsys: pytest.CaptureFixture[str]):
    found = planned(read([*TINY, "cluster=4xcpu", "optimizer.lr=0.01"]), None, quiet=False)
    assert found is not None
    assert found.layout.world == 4
    assert (found.batch.sequences, found.optimizer.lr, found.data.seq_len) == (8, 0.01, 64)
    err = " ".join(capsys.readouterr().err.split())
    assert "planning for 4 × CPU core (4xcpu)" in err
    assert "chose" in err and "s a step, the least of" in err


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]):
    assert planned(read([*TINY, "cluster=2xcpu"]), None, quiet=True) is not None
    assert capsys.readouterr().err == ""


def test_ranks_are_part_of_the_cluster():
    run = load_run(None, ["cluster=4x8xh100"])
    assert cluster_of(run, None) == cluster("4x8xh100")
    assert [(part.nodes, part.per_node) for part in (cluster_of(run, n) for n in (2, 8, 16))] == [
        (1, 2),
        (1, 8),
        (2, 8),
    ]
    for ranks in (12, 64):
        with pytest.raises(UserError, match=r"are not whole nodes of 8, of which there are 4; use (8|32)"):
            cluster_of(run, ranks)


def test_without_a_cluster_it_is_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "cores", lambda: 3)
    run = load_run(None, ["device=cpu"])
    assert (cluster_of(run, None).devices, cluster_of(run, 5).devices, cluster_of(run, 5).cores) == (3, 5, 3)


def test_a_cluster_that_cannot_be_read_ends_early(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "c.yaml").write_text("device: h100\nnodes: 0\n")
    assert command(["train", *TINY, f"cluster={tmp_path}/c.yaml"]) == 2
    assert "c.yaml line 2: nodes: 0 is not a whole number" in " ".join(capsys.readouterr().err.split())


def test_what_fits_nowhere_is_told_and_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = tmp_path / "run"
    code = command(["train", "model=llama3-70b", "layout=auto", "cluster=rtx4090", f"out={out}", "precision=bf16"])
    assert code == 3
    err = " ".join(capsys.readouterr().err.split())
    assert "no layout of" in err and "nearest:" in err
    assert not out.exists()


def test_shows_what_is_chosen(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert command(["train", *TINY, "cluster=2xcpu", "--show"]) == 0
    file = tmp_path / "run.yaml"
    file.write_text(capsys.readouterr().out)
    assert load_run(file).layout.world == 2


@pytest.mark.parametrize("name", ["predict", "verify"])
def test_other_commands_say_who_plans(name: str, capsys: pytest.CaptureFixture[str]):
    assert command([name, "layout=auto"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "layout=auto: auto is planned by `meshwright train`" in err


def test_a_planned_layout_has_no_fields_of_its_own(capsys: pytest.CaptureFixture[str]):
    assert command(["train", "layout=auto", "layout.tp=2"]) == 2
    assert 'layout is "auto"' in " ".join(capsys.readouterr().err.split())
