"""What happened, as an exit code and a line on stderr."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from meshwright.cli.errors import guarded
from meshwright.cli.main import COMMANDS, run
from meshwright.spec.errors import RunError, UserError
from meshwright.spec.exits import RanksEnded


def raising(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("out: a file"), 2, "meshwright: error: out: a file\n"),
        (RunError("rank 1 is gone"), 1, "meshwright: failed: rank 1 is gone\n"),
        (ZeroDivisionError("a\nb"), 1, "meshwright: internal error: ZeroDivisionError: a b (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, "meshwright: interrupted\n"),
        (click.UsageError("no"), 2, "Error: no\n"),
        (click.exceptions.Exit(3), 3, ""),
        (RanksEnded(1), 1, "meshwright: failed: the ranks ended with exit code 1\n"),
        (RanksEnded(2), 2, ""),  # a rank has said it
        (RanksEnded(130), 130, "meshwright: interrupted\n"),
        (RanksEnded(143), 143, "meshwright: terminated\n"),
        (
            BrokenPipeError("a rank's"),
            1,
            "meshwright: internal error: BrokenPipeError: a rank's (--debug shows where)\n",
        ),
    ],
)
def test_exceptions(error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(error)) == code
    assert capsys.readouterr() == ("", said)


def test_tracebacks_only_with_debug(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (UserError("x"), RunError("x"), ValueError("x")):
        guarded(raising(error))
        assert "Traceback" not in capsys.readouterr().err
        guarded(raising(error), debug=True)
        said = capsys.readouterr().err
        assert "Traceback" in said and "in command" in said and "--debug" not in said


def test_what_commands_return() -> None:
    assert guarded(lambda: None) == 0
    assert guarded(lambda: 3) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bogus"], "no command 'bogus'; there are train, predict, plan, verify"),
        (["predict", "--bogus"], "No such option '--bogus'"),
        (["train", "--lr", "3"], "Fields are given without dashes: optimizer.lr=…"),
        (["train", "--every=3"], "validation.every=… or checkpoint.every=…"),
        (["train", "-q", "-v"], "-q and -v exclude each other"),
        (["train", "--ranks", "0"], "0 is not in the range"),
        (["verify", "--precision", "int8"], "'int8' is not one of 'float64', 'fp32'"),
        (["predict", "a.yaml", "b.yaml"], "a.yaml b.yaml: more than one run file"),
        (["predict", "none.yaml"], "none.yaml: no such run file; name a YAML file"),
        (["predict", "steps"], "steps: no value; write steps=…"),
        (["predict", "lrr=3"], "lrr=3: no such field; did you mean optimizer.lr?"),
        (["predict", "layout.dp=4", "--ranks", "3"], "is not the number of ranks, 3; use dp=3 or dp=auto, or 4 ranks"),
    ],
)
def test_wrong_input(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err


def test_help_names_every_command_and_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(command in said for command in COMMANDS)
    for command in COMMANDS:
        assert run([command, "-h"]) == 0
        said = capsys.readouterr().out
        example = {"checkpoint": "inspect runs/demo", "schedule": "1f1b --stages 4", "probe": "--ranks 4"}.get(
            command, "run.yaml"
        )
        assert f"meshwright {command} {example}" in said
        assert "exit codes:" in said.lower()
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("meshwright 0.")


def meshwright(*words: str, env: dict[str, str] | None = None, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | (env or {}), check=False, **options
    )


def test_a_process_ends_with_the_code(tmp_path: Path) -> None:
    ended = meshwright("train", "lrr=3", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "meshwright: error: command line: lrr=3: no such field; did you mean optimizer.lr?\n"
    assert list(tmp_path.iterdir()) == []


def test_a_rank_of_torchrun_says_it_once() -> None:
    world = {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    ended = meshwright("train", "layout.dp=2", env=world)
    assert ended.returncode == 2
    assert "is not the number of ranks, 3" in ended.stderr
    other = meshwright("train", "layout.dp=2", env=world | {"RANK": "1", "LOCAL_RANK": "1"})
    assert (other.returncode, other.stderr) == (2, "")


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [sys.executable, "-m", "meshwright", "predict", "-v", "model.layers=3000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize("how", [">&-", ">/dev/full"])
@pytest.mark.parametrize("words", ["predict -q", "predict --json", "train --show", "--help", "--version"])
def test_a_stdout_that_takes_nothing(words: str, how: str) -> None:
    why = {">&-": "bad file descriptor", ">/dev/full": "no space left on device"}[how]
    for unbuffered in ("", "1"):
        ended = shell(f"{words} {how}", PYTHONUNBUFFERED=unbuffered)
        assert (ended.returncode, ended.stderr) == (
            1,
            f"meshwright: failed: standard output cannot be written: {why}\n",
        )


@pytest.mark.parametrize("how", ["2>&-", "2>/dev/full"])
def test_a_stderr_that_takes_nothing(how: str) -> None:
    """Results do not go there, and what cannot be said is left to the exit code."""
    ended = shell(f"predict -q {how}")
    assert (ended.returncode, ended.stderr) == (0, "") and "parameters" in ended.stdout
    for words in ("predict lr=3", "predict --bogus"):
        ended = shell(f"{words} {how}")
        assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "")


def shell(words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = f"exec {sys.executable} -m meshwright {words}"
    return subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=60, env=os.environ | env, check=False
    )


@pytest.mark.parametrize(
    ("words", "without"),
    [("--help", ("torch", "pydantic", "rich", "yaml")), ("predict", ("torch",)), ("train --show", ("torch",))],
)
def test_what_is_not_imported(words: str, without: tuple[str, ...]) -> None:
    program = (
        "import sys; from meshwright.cli.main import run; code = run(sys.argv[1:]); "
        "print(code, *sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *words.split()], capture_output=True, text=True, timeout=60, check=True
    )
    code, *modules = ended.stderr.split()
    assert code == "0" and "meshwright" in modules
    assert not set(without) & set(modules)
