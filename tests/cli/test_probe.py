"""`meshwright probe`: what it writes, and what it refuses before it measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.spec.clusterfile import load_cluster
from meshwright.spec.devices import cluster
from meshwright.train import probe


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, str]]:
    """What was asked to be measured."""
    asked: list[tuple[int | None, str]] = []

    def instead(ranks, *, device, effort, say):
        asked.append((ranks, device))
        say("measuring")
        return cluster(f"{ranks or 2}xcpu")

    monkeypatch.setattr(probe, "probe", instead)
    return asked


def test_writes_a_cluster_file(tmp_path: Path, measured: list, capsys: pytest.CaptureFixture[str]):
    assert run(["probe", "--ranks", "4", "-o", str(tmp_path / "c.yaml")]) == 0
    assert measured == [(4, "auto")]
    assert load_cluster(str(tmp_path / "c.yaml")) == cluster("4xcpu")
    out, err = capsys.readouterr()
    assert out == ""
    assert "measuring" in err and "c.yaml: 4 × CPU core" in err


def test_prints_instead(measured: list, capsys: pytest.CaptureFixture[str]):
    assert run(["probe", "-o", "-", "-q"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("device:") and err == ""


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-o", "{folder}"], "is a folder; name a file in it"),
        (["-o", "{folder}/none/c.yaml"], "there is no folder"),
        (["--ranks", "100000"], "too many for this machine"),
        (["--ranks", "0"], "0 is not in the range"),
    ],
)
def test_refuses_before_it_measures(
    tmp_path: Path, measured: list, capsys: pytest.CaptureFixture[str], words: list[str], why: str
):
    assert run(["probe", *(word.format(folder=tmp_path) for word in words)]) == 2
    assert why in " ".join(capsys.readouterr().err.split())
    assert measured == []
