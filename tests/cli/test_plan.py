"""`meshwright plan`: tables for people, JSON for programs, runs for trainers, and words for what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from meshwright.cli.main import run
from meshwright.predict.plan.answer import plan
from meshwright.spec.devices import cluster
from meshwright.spec.load import load_run
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import RunSpec

SMALL = ["plan", "--model", "gpt2", "--cluster", "4xa100", "--seq", "1024", "--batch", "16", "--top", "3"]


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert run(words) == code, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_the_table_has_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *SMALL, "--tokens", "10B")
    assert "124,439,808 parameters, bf16" in out and "4 × A100" in out
    asked = RunSpec.model_validate(
        {
            "model": PRESETS["gpt2"], "precision": "bf16", "data": {"seq_len": 1024},
            "batch": {"sequences": 16, "micro": 1},
        }
    )  # fmt: skip
    found = plan(asked, cluster("4xa100"), top=3)
    assert f"{found.result.layouts:,} layouts, of which {found.result.fitting:,} fit" in out
    for number, choice in enumerate(found.choices, 1):
        row = next(line for line in out.splitlines() if re.match(rf"{number}  \S*=", line))
        assert f"{choice.time.tokens_per_second:,.0f}" in row and f"{choice.time.utilisation:.1%}" in row
        assert f"{choice.days(10e9):,.1f}" in row
    for word in ("states", "activations", "logits", "buffers", "allowance", "bubble", "exposed", "days", "MFU"):
        assert word in out
    assert "one device is enough" in out and "LoRA" in out and "QLoRA" in out
    assert "rule" in out and "exact" in out


def test_json_is_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, *SMALL, "--json", "--tokens", "1B"))
    times = [choice["time"]["seconds"] for choice in found["choices"]]
    assert len(times) == 3 and times == sorted(times)
    assert found["devices"] == 4 and found["layouts"] >= found["fitting"] >= found["simulated"] >= 3
    for choice in found["choices"]:
        memory = choice["memory"]
        parts = sum(
            memory[name] for name in ("states", "activations", "logits", "gathered units", "buffers", "temporaries")
        )
        assert parts == memory["total"] <= memory["needed"] <= memory["capacity"] and choice["fits"]
        assert choice["days"] > 0


def test_tokens_are_read_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--model",
        "gpt2",
        "--cluster",
        "2xa100",
        "--seq",
        "1024",
        "--json",
        "--top",
        "1",
        "--with",
        "tp=1,pp=1",
    ]
    assert json.loads(printed(capsys, *words, "--batch-tokens", "64Ki"))["sequences"] == 64
    assert json.loads(printed(capsys, *words, "--batch-tokens", "64k"))["sequences"] == 62
    assert "4X" in refused(capsys, *words, "--batch-tokens", "4X")
    assert "half a sequence" in refused(capsys, *words, "--batch-tokens", "100")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cluster", "4xh100"], "--batch 512"),
        (["--cluster", "0x8xh100", "--batch", "8"], "0 nodes"),
        (["--cluster", "4xh1000", "--batch", "8"], "no device h1000"),
        (["--cluster", "4xh100", "--batch", "8", "--batch-tokens", "4M"], "give one"),
        (["--cluster", "4xh100", "--batch", "8", "--explain", "tp=3"], "tp=3"),
        (["--cluster", "4xh100", "--batch", "8", "--with", "tensor=2"], "no field of a layout"),
        (["--cluster", "4xh100", "--batch", "8", "--emit", "slurm"], "megatron, torchtitan"),
        (["--cluster", "4xh100", "--batch", "8", "layout.tp=2"], "--with tp=2"),
        (["--cluster", "no/such.yaml", "--batch", "8"], "no/such.yaml"),
        (["--cluster", "4xh100", "--batch", "0"], "1 or more"),
    ],
)
def test_wrong_input_is_told_in_words(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert said in refused(capsys, "plan", "--model", "gpt2", *words)


def test_where_nothing_fits_it_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "llama2-13b", "--cluster", "1xrtx4090", "--batch", "8", "--seq", "512"]
    out = printed(capsys, *words, code=3)
    assert "Nothing fits" in out and "more than" in out and "The smallest change first" in out
    assert re.search(r"\d+ devices in \d+ nodes", out) and "devices of" in out


def test_a_layout_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, *SMALL, "--explain", "tp=4")
    assert "sums over tensor ranks" in out and "longer" in out and "tp=4" in out
    data = json.loads(printed(capsys, *SMALL, "--explain", "tp=4", "--json"))
    assert data["explained"]["layout"]["tp"] == 4
    assert data["explained"]["time"]["seconds"] >= data["choices"][0]["time"]["seconds"]


def test_the_winner_is_written_as_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "best.yaml"
    assert run([*SMALL, "--emit", str(file)]) == 0
    out, err = capsys.readouterr()
    assert str(file) in err and "Time of a step" in out
    written = load_run(file)
    data = json.loads(printed(capsys, *SMALL, "--json"))
    assert written.layout.model_dump(mode="json") == data["choices"][0]["layout"]
    assert written.batch.micro == data["choices"][0]["micro"] and written.data.seq_len == 1024


@pytest.mark.parametrize("trainer", ["megatron", "torchtitan", "deepspeed", "nanotron"])
def test_the_winner_is_written_for_trainers(capsys: pytest.CaptureFixture[str], trainer: str) -> None:
    out = printed(capsys, *SMALL, "--with", "tp=2,pp=1", "--emit", trainer)
    assert "Time of a step" not in out and "2" in out
    if trainer == "nanotron":
        assert yaml.safe_load(out)["parallelism"]["tp"] == 2


def test_a_run_file_says_the_rest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: gpt2\ndata: {seq_len: 512}\nbatch: {sequences: 8}\nprecision: fp32\nlayout: {dp: 3}\n")
    found = json.loads(printed(capsys, "plan", str(file), "--cluster", "2xa100", "--json", "--top", "1"))
    assert (found["seq_len"], found["sequences"], found["precision"]) == (512, 8, "fp32")


def test_the_command_starts_without_torch() -> None:
    code = (
        "import sys; from meshwright.cli.main import run; "
        f"code = run({SMALL!r}); assert code == 0 and 'torch' not in sys.modules, code"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
