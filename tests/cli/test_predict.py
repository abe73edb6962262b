"""`meshwright predict` prints what `predict` foretells: to people as tables, to programs as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.main import run
from meshwright.cli.tables import flops, size
from meshwright.predict.report import predict
from meshwright.spec.load import load_run


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["predict", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_json_is_the_prediction(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: gpt2\nbatch: {sequences: 6}\n")
    found = json.loads(printed(capsys, "--json", str(file), "data.seq_len=128", "--ranks", "3"))
    expected = predict(load_run(file, ["data.seq_len=128"]), 3).to_dict()
    assert found == json.loads(json.dumps(expected))
    assert (found["ranks"], found["parameters"]["total"]) == (3, 124_439_808)


def test_tables_hold_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layout.dp=3", "batch.sequences=2"]
    out = printed(capsys, *words)
    foretold = predict(load_run(None, words))
    lines = [line.split() for line in out.splitlines()]
    for name, number in foretold.memory.categories.items():
        assert [*name.split(), f"{number:,}"] in [line[: len(name.split()) + 1] for line in lines]
    copy = foretold.memory.host["checkpoint copy"]
    assert copy > 0 and ["checkpoint", "copy,", "on", "the", "host", f"{copy:,}"] in [line[:6] for line in lines]
    for row in foretold.traffic:
        assert [row.key.operation, row.key.axis, row.key.reason, row.key.phase, str(row.count)] in [
            x[:5] for x in lines
        ]
    assert f"{foretold.parameters.total:,}" in out
    assert "blocks.0 to blocks.3, each" in out
    assert "data ranks 2 to 2 have no sequence of the batch's 2; batch.sequences=3 or more" in out
    assert not any("…" in line for line in out.splitlines())


def test_quiet_and_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    assert "blocks." not in printed(capsys, "-q")
    assert "blocks.2 " in printed(capsys, "-v")


def test_one_rank_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "traffic  none" in printed(capsys, "--ranks", "1")


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1234567, "1.23 MB"), (999_999_999, "1 GB"), (2.5e20, "250 EB")],
)
def test_sizes_are_decimal(number: float, words: str) -> None:
    assert size(number) == words
    assert flops(number) == words.replace("B", "FLOPs")
