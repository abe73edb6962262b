"""`meshwright verify` prints a proof's report and answers with its exit code. The proof itself: tests/verify."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import meshwright.verify.run
from meshwright.cli.main import run
from meshwright.spec.run import RunSpec
from meshwright.verify.activations import Difference
from meshwright.verify.compare import Comparison
from meshwright.verify.report import Check, Report
from meshwright.verify.run import Unfinished

EQUAL = Report(
    run=RunSpec(),
    steps=2,
    bound=1e-10,
    tensors=[Comparison("gradient", f"w{i}", 0, 1, 1e-15, 1.0, 1.0) for i in range(15)],
    scalars=[Check("loss, step 1", 5.5, 5.5, 0, True)],
    traffic=[Check("all_reduce over dp: payload bytes", 1000, 1000, 0, True)],
    states=[Check("parameters, bytes", 4096, 4096, 0, True)],
    activations=[Check("activations, bytes", 100, 101, 0, True)],
    activation_differences=[],
    findings=[],
)
WORSE = Comparison("gradient", "model.norm.weight", 1, 2, 0.5, 2.0, 1.0, since=1, since_ranks=(0, 1))
DIFFERENT = replace(
    EQUAL,
    tensors=[WORSE, *EQUAL.tensors],
    traffic=[Check("all_reduce over dp: payload bytes", 1000, 3000, 1, False)],
    findings=["gradients differ: model.norm.weight [0]", "1 of them are too large by exactly dp = 2"],
)


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `verify` was asked for, and (under "report") what it answers."""
    asked: dict[str, Any] = {"report": EQUAL}

    def verify(run: RunSpec, **options: Any) -> Report:
        asked.update(run=run, **options)
        if "raises" in asked:
            raise asked["raises"]
        options["begins"]()
        report: Report = asked["report"]
        return report

    monkeypatch.setattr(meshwright.verify.run, "verify", verify)
    return asked


def test_equal_is_0(proof: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("equal: 15 tensors over 2 steps, worst difference 1.0e-15 (at most 1e-10)")
    assert "comparing 3 steps of a small llama model on 2 ranks with one device, in float64, on random tokens" in err
    assert out.splitlines()[-1].endswith("traffic and memory as predicted, activations within 5%")
    assert "w9" in out and "w10" not in out and "5 better ones not shown; -v" in out
    assert "DIFFERS" not in out
    assert "difference: ‖a − b‖ / ‖b‖" in out
    assert (proof["run"].layout.dp, proof["steps"], proof["precision"], proof["as_is"]) == (2, 3, "float64", False)


@pytest.mark.parametrize("words", [["device=cuda"], ["model=gpt2-tiny", "model.embd_dropout=0.1", "dropout=torch"]])
def test_what_is_refused_is_not_announced(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", *words]) == 2
    err = capsys.readouterr().err
    assert "comparing" not in err and err.startswith("meshwright: error: d")


def test_a_difference_is_3_and_named(proof: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    proof["report"] = DIFFERENT
    words = ["verify", "layout.dp=3", "--steps", "2", "--precision", "fp32", "--as-is"]
    assert run(words) == 3
    out, err = capsys.readouterr()
    assert (proof["run"].layout.dp, proof["steps"], proof["precision"], proof["as_is"]) == (3, 2, "fp32", True)
    assert "the run's own model on 3 ranks" in err
    lines = [line.split() for line in out.splitlines()]
    assert ["gradient", "model.norm.weight", "DIFFERS", "from", "step", "1", "5.0e-01", "2", "1", "2", "1"] in lines
    assert ["all_reduce", "over", "dp:", "payload", "bytes", "DIFFERS", "1,000", "3,000", "1"] in lines
    assert out.index("model.norm.weight") < out.index("w0")
    assert out.splitlines()[-3].startswith("different: 16 tensors over 2 steps, worst difference 5.0e-01")
    assert out.splitlines()[-2:] == [f"  {finding}" for finding in DIFFERENT.findings]


def test_quiet_and_verbose(proof: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    proof["report"] = DIFFERENT
    assert run(["verify", "-q"]) == 3
    out, err = capsys.readouterr()
    assert (err, len(out.splitlines())) == ("", 3)
    run(["verify", "-v"])
    out, _ = capsys.readouterr()
    assert "w14" in out and "not shown" not in out


@pytest.mark.parametrize("report", [EQUAL, DIFFERENT])
def test_json(proof: dict[str, Any], capsys: pytest.CaptureFixture[str], report: Report) -> None:
    proof["report"] = report
    assert run(["verify", "--json"]) == (0 if report.passed else 3)
    out, _ = capsys.readouterr()
    assert json.loads(out) == json.loads(json.dumps(report.to_dict()))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "the ranks failed before the proof was complete; what they left is in /tmp/proof"),
        (2, "the ranks found wrong input before the proof was complete; what they left is in /tmp/proof"),
        (130, "the ranks were interrupted before the proof was complete"),
        (143, "the ranks were terminated before the proof was complete"),
    ],
)
def test_how_the_ranks_ended_is_how_the_command_ends(
    proof: dict[str, Any], capsys: pytest.CaptureFixture[str], code: int, words: str
) -> None:
    proof["raises"] = Unfinished(code, Path("/tmp/proof"))
    assert run(["verify", "-q"]) == code
    assert capsys.readouterr() == ("", f"meshwright: verify: {words}\n")


def test_the_fields_of_json(proof: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Programs rely on these names: add some, but change none."""
    lacking = replace(WORSE, difference=math.inf, ratio=math.nan, cosine=math.nan)
    left_over = Difference("mlp", 8, 16, ("gate, 8 bytes",), ("float32[4], 16 bytes",))
    proof["report"] = replace(EQUAL, tensors=[lacking], activation_differences=[left_over], findings=["why"])
    run(["verify", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {
        "run", "steps", "bound", "passed", "worst", "findings",
        "tensors", "scalars", "traffic", "states", "activations", "activation_differences",
    }  # fmt: skip
    assert told["tensors"] == [
        {
            "kind": "gradient", "name": "model.norm.weight", "passed": False, "since": 1, "since_ranks": [0, 1],
            "rank": 1, "step": 2, "difference": "inf", "ratio": "nan", "cosine": "nan", "bound": 0.0,
        }
    ]  # fmt: skip
    check = {"what": "parameters, bytes", "expected": 4096, "found": 4096, "rank": 0, "passed": True}
    assert told["states"] == [check]
    assert all(set(c) == set(check) for kind in ("scalars", "traffic", "activations") for c in told[kind])
    assert told["activation_differences"] == [
        {
            "where": "mlp", "predicted": 8, "measured": 16,
            "only_predicted": ["gate, 8 bytes"], "only_measured": ["float32[4], 16 bytes"],
        }
    ]  # fmt: skip
    assert told["run"]["model"]["family"] == "llama" and told["findings"] == ["why"]
    assert told["worst"] == "inf"


@pytest.mark.parametrize(
    ("words", "dtypes", "said"),
    [
        ("--precision bf16 reduce_dtype=bf16", ("bf16", "auto", "bf16"), "in bf16 with reduce_dtype=bf16, on random"),
        (
            "--precision bf16 reduce_dtype=bf16 grad_dtype=bf16",  # which does not go with the default precision
            ("bf16", "bf16", "bf16"),
            "in bf16 with grad_dtype=bf16 and reduce_dtype=bf16, on random tokens\n",
        ),
        ("--precision fp32 reduce_dtype=bf16", ("fp32", "auto", "bf16"), "in fp32 with reduce_dtype=bf16, on random"),
        (
            "precision=fp16 grad_dtype=fp16",
            ("float64", "auto", "auto"),
            "in float64, on random tokens; the run's own precision=fp16 with grad_dtype=fp16 is not compared, "
            "--precision fp16 does\n",
        ),
        (
            "reduce_dtype=bf16",
            ("float64", "auto", "auto"),
            "; the run's own precision=fp32 with reduce_dtype=bf16 is not compared, --precision fp32 does\n",
        ),
        (
            "precision=fp16 grad_dtype=fp16 reduce_dtype=bf16 --precision bf16",
            ("bf16", "auto", "bf16"),
            "in bf16 with reduce_dtype=bf16, on random tokens; the run's own precision=fp16 with grad_dtype=fp16 and "
            "reduce_dtype=bf16 is not compared",
        ),
        ("precision=bf16", ("float64", "auto", "auto"), "; the run's own precision=bf16 is not compared"),
        ("precision=bf16 --precision bf16", ("bf16", "auto", "auto"), "in bf16, on random tokens\n"),
        ("layout.dp=1", ("float64", "auto", "auto"), "on 1 rank with one device, in float64, on random tokens\n"),
    ],
)
def test_what_is_compared_of_the_runs_dtypes(
    proof: dict[str, Any], capsys: pytest.CaptureFixture[str], words: str, dtypes: tuple[str, ...], said: str
) -> None:
    assert run(["verify", *words.split()]) == 0
    compared = proof["run"]
    assert (proof["precision"], compared.grad_dtype, compared.reduce_dtype) == dtypes
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--precision fp16 loss=chunked",
            "loss=chunked --precision fp16: loss=chunked does not go with precision=fp16",
        ),
        ("--precision fp32 grad_dtype=bf16", "grad_dtype=bf16 does not go with precision=fp32"),
        ("grad_dtype=bf16", "grad_dtype=bf16 does not go with precision=fp32"),
    ],
)
def test_a_precision_that_does_not_go_with_the_run(
    proof: dict[str, Any], capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    assert run(["verify", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_under_torchrun_it_is_refused(
    proof: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("meshwright.train.report._leave", lambda code: None)
    monkeypatch.setenv("RANK", "0")
    assert run(["verify"]) == 2
    assert "verify starts its own ranks; call it without torchrun" in capsys.readouterr().err
    assert "run" not in proof


def test_too_many_ranks_are_not_started(proof: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--ranks", "1000000"]) == 2
    said = capsys.readouterr().err
    assert "1000000 ranks are too many for this machine" in said
    assert said.endswith(", a smaller layout of the same axes proves as much\n")
    assert "run" not in proof


@pytest.mark.parametrize("option", ["-q", "--json"])
def test_a_stdout_that_takes_nothing(
    proof: dict[str, Any], option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert run(["verify", option]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "meshwright: failed: standard output cannot be written: no space left on device"
