"""The whole of a proof through the launcher: it passes, or says how its ranks ended and where their logs are."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import RunSpec
from meshwright.verify.run import Unfinished, verify

RUN = RunSpec(layout=Layout(dp=2))
WORKER = str(Path(__file__).with_name("proof_worker.py"))


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left(scratch: Path) -> list[Path]:
    return list(scratch.glob("meshwright-verify-*"))


def test_a_proof_passes_and_leaves_nothing(scratch: Path) -> None:
    report = verify(RUN, steps=1)
    assert report.passed, report.findings
    assert report.worst < 1e-10
    assert {c.what: c.found for c in report.states}["other, bytes"] == 0
    assert left(scratch) == []


def test_masks_that_depend_on_the_layout_are_refused() -> None:
    model = PRESETS["gpt2-tiny"].model_copy(update={"resid_dropout": 0.1, "attn_dropout": 0.2})
    run = RunSpec(layout=Layout(dp=2), model=model, dropout="torch")
    with pytest.raises(UserError, match=r"^dropout: .*model\.attn_dropout=0 model\.resid_dropout=0$"):
        verify(run, worker=WORKER)


def test_where_nothing_is_dropped_nobody_asks_who_would() -> None:
    assert verify(RUN.model_copy(update={"dropout": "torch"}), steps=1).passed


def test_dtypes_are_kept_where_they_go_with_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what does not go with it otherwise is refused in words."""
    run = RunSpec(layout=Layout(dp=2), precision="fp16", grad_dtype="fp16", reduce_dtype="bf16")
    kept = {"fp16": ("fp16", "bf16"), "bf16": ("auto", "bf16"), "fp32": ("auto", "bf16"), "float64": ("auto", "auto")}

    class Started(Exception):
        pass

    def start(run: RunSpec, *_: object, **__: object) -> None:
        raise Started(run.grad_dtype, run.reduce_dtype)

    monkeypatch.setattr("meshwright.verify.run.run_ranks", start)
    for precision, dtypes in kept.items():
        with pytest.raises(Started) as caught:
            verify(run, precision=precision)
        assert caught.value.args == dtypes
    with pytest.raises(UserError, match="loss=chunked does not go with precision=fp16"):
        verify(RunSpec(layout=Layout(dp=2), loss="chunked"), precision="fp16")


def ended(how: str, monkeypatch: pytest.MonkeyPatch) -> Unfinished:
    monkeypatch.setenv("PROOF_END", how)
    with pytest.raises(Unfinished) as caught:
        verify(RUN, worker=WORKER)
    return caught.value


def test_the_logs_of_a_failure_are_kept_and_named(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    end = ended("raise", monkeypatch)
    (folder,) = left(scratch)
    assert end.code == 1
    assert str(end).endswith(f"failed before the proof was complete; what they left is in {folder}")
    told = capfd.readouterr().err
    paths = [Path(path) for path in re.findall(rf"{re.escape(str(folder))}\S*\w", told)]
    assert paths and all(path.exists() for path in paths), told


@pytest.mark.parametrize(("how", "code"), [("refuse", 2), ("130", 130), ("143", 143)])
def test_other_ends_are_passed_on(scratch: Path, monkeypatch: pytest.MonkeyPatch, how: str, code: int) -> None:
    end = ended(how, monkeypatch)
    assert end.code == code
    assert len(left(scratch)) == (code == 2)
