"""Real ranks that end in every way a rank can end. What they do is in launch_worker.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from meshwright.spec.errors import RunError, UserError
from meshwright.spec.exits import RanksEnded
from meshwright.train import watch
from meshwright.train.launch import launch
from meshwright.train.postmortem import Failure
from meshwright.train.report import ERROR_FILE, LAUNCHED, lost_peer, record_failure, run_guarded
from meshwright.train.signals import LAUNCHER_PID, StopFlag

WORKER = str(Path(__file__).with_name("launch_worker.py"))


class Ranks:
    """Launches a case of the worker and keeps what it said."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capfd = folder, capfd
        self.out = self.err = ""

    def __call__(self, case: str, *argv: str, ranks: int = 2, **options: object) -> int:
        self.capfd.readouterr()
        words = [case, str(self.folder), *argv]
        code = launch(words, ranks=ranks, folder=self.folder / "out", entry=WORKER, **options)  # type: ignore[arg-type]
        self.out, self.err = self.capfd.readouterr()
        assert not self.alive(), "processes left behind"
        return code

    def alive(self) -> list[int]:
        return [pid for file in self.folder.glob("*.pid") if running(pid := int(file.read_text()))]

    def saved(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("saved*"))

    def logs(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in (self.folder / "out").glob("logs/*/*")}


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Ranks:
    return Ranks(tmp_path, capfd)


# -- all is well -----------------------------------------------------------------------------------------------------


def test_rank_0_speaks_and_the_others_write_to_their_logs(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert ranks("hello", "a=$$b", "${local_rank}") == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert ranks.out == f"out of rank 0 ['a=$$b', '${{local_rank}}'] OMP={threads}\n"
    assert ranks.err == "err of rank 0\n"
    assert ranks.logs() == {"rank1.log": f"out of rank 1 ['a=$$b', '${{local_rank}}'] OMP={threads}\nerr of rank 1\n"}


def test_threads_set_by_the_user_stay(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert ranks("hello", ranks=1) == 0
    assert "OMP=3" in ranks.out


def test_a_module_is_started_like_a_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(["terse"], ranks=1, folder=tmp_path / "out", entry="platform") == 0
    assert "Linux" in capfd.readouterr().out
    assert not (tmp_path / "out").exists(), "a launch that leaves no logs leaves no folder"


def test_signal_handlers_and_environment_are_given_back(ranks: Ranks) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), dict(os.environ)
    ranks("hello")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), dict(os.environ)) == before


def test_an_answer_of_no_is_no_failure(ranks: Ranks) -> None:
    assert ranks("answer_no") == 3
    assert ranks.err == ""


# -- a rank fails ----------------------------------------------------------------------------------------------------


def test_an_error_names_rank_step_collective_and_who_waited(ranks: Ranks) -> None:
    assert ranks("raises") == 1
    lines = ranks.err.splitlines()
    assert lines[:3] == [
        "meshwright: rank 1 failed at step 7, after all_reduce zero.reduce (dp)",
        "  ValueError: the {loss} is odd",
        "  rank 0 was waiting in all_reduce zero.reduce (dp) at step 7",
    ]
    assert "last words" in lines[-1] and "Traceback" not in ranks.err
    trace = Path(lines[3].removeprefix("  traceback: "))
    assert "raise ValueError" in trace.read_text()


def test_debug_shows_the_traceback(ranks: Ranks) -> None:
    assert ranks("raises", debug=True) == 1
    assert ranks.err.count("Traceback (most recent call last)") == 1


def test_a_killed_rank_takes_the_run_down(ranks: Ranks) -> None:
    assert ranks("killed") == 1
    assert ranks.err.splitlines()[:2] == [
        "meshwright: rank 1 was killed by SIGKILL at step 7, after all_reduce zero.reduce (dp)",
        "  rank 0 was waiting in all_reduce zero.reduce (dp) at step 7",
    ]


def test_a_rank_killed_before_it_communicates(ranks: Ranks) -> None:
    assert ranks("killed_in_import") == 1
    assert ranks.err.splitlines()[:2] == [
        "meshwright: rank 1 was killed by SIGKILL while it was starting",
        "  rank 0 was starting",
    ]


@pytest.mark.parametrize(
    ("case", "first"),
    [("killed_and_echo", "rank 1 was killed by SIGKILL"), ("raises_and_echo", "rank 1 failed")],
)
def test_the_first_failure_is_named_not_those_it_caused(ranks: Ranks, case: str, first: str) -> None:
    assert ranks(case) == 1
    assert ranks.err.startswith(f"meshwright: {first} at step 7")
    assert "rank 0 was waiting in all_reduce zero.reduce (dp) at step 7" in ranks.err
    assert "onnection" not in ranks.err


def test_a_sigkill_comes_before_an_error_it_may_have_caused() -> None:
    killed = Failure(1, -signal.SIGKILL, seen=10.1)
    error = Failure(0, 1, seen=10.1, error={"message": "a peer is gone, in words of its own", "time": 10.0})
    aborted = Failure(2, -signal.SIGABRT, seen=9.9)
    assert [f.rank for f in sorted([aborted, error, killed], key=Failure.order)] == [1, 0, 2]


def test_a_rank_that_ignores_sigterm_is_killed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PATIENCE", 0.5)
    assert ranks("stubborn") == 1
    assert ranks.err.startswith("meshwright: rank 1 exited with code 5 at step 7")


def test_wrong_input_is_said_once(ranks: Ranks) -> None:
    assert ranks("wrong_input") == 2
    assert ranks.err == "meshwright: error: layout.dp: 3 does not divide 4; use 1, 2 or 4\n"
    assert not (ranks.folder / "out").exists()


def test_a_folder_that_cannot_be_made_is_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"out: .* cannot be written"):
        launch([], ranks=1, folder=tmp_path / "file" / "run", entry="platform")


def test_a_rank_killed_in_a_real_collective(ranks: Ranks) -> None:
    assert ranks("gloo", ranks=3) == 1
    assert ranks.err.splitlines()[:3] == [
        "meshwright: rank 1 was killed by SIGKILL at step 7 while in all_reduce step.metrics (dp)",
        "  rank 0 was waiting in all_reduce step.metrics (dp) at step 7",
        "  rank 2 was at step 7, loading data",
    ]


def test_who_calls_may_ask_for_the_code_as_an_exception(ranks: Ranks) -> None:
    for case, code in (("answer_no", 3), ("wrong_input", 2), ("raises", 1), ("terminated", 143)):
        with pytest.raises(RanksEnded, match=f"exit code {code}") as ended:
            ranks(case, check=True)
        assert ended.value.code == code
        for file in ranks.folder.glob("*ready*"):
            file.unlink()
    assert ranks("hello", check=True) == 0


READER = "import sys, pathlib; from meshwright.train.launch import launch; case, w, f = sys.argv[1:]\n"
READER += "sys.exit(launch([case, f], ranks=2, folder=pathlib.Path(f, 'out'), entry=w))"


def test_a_reader_that_goes_away_is_no_failure(tmp_path: Path) -> None:
    command = [sys.executable, "-c", READER, "reader_goes", WORKER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        launcher.stdout.close()
        (tmp_path / "gone").touch()
        assert launcher.stderr.read() == ""
    assert launcher.returncode == 141
    assert (tmp_path / "saved1").exists(), "the other rank was left to finish"


def test_another_pipe_that_breaks_is_a_failure(ranks: Ranks) -> None:
    assert ranks("breaks_another_pipe", ranks=1) == 1
    assert "BrokenPipeError" in ranks.err


# -- a run is stopped ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "code"), [("interrupted", 130), ("terminated", 143), ("interrupted_twice_at_once", 130)]
)
def test_a_signal_to_the_launcher_lets_the_ranks_save(ranks: Ranks, case: str, code: int) -> None:
    assert ranks(case) == code
    assert ranks.saved() == ["saved0", "saved1"]
    assert ranks.err.count("\n") == 1 and "the ranks finish this step, save and end" in ranks.err


def test_a_signal_to_one_rank_stops_all(ranks: Ranks) -> None:
    assert ranks("one_rank_told") == 143
    assert ranks.saved() == ["saved0", "saved1"] and ranks.err == ""


@pytest.mark.parametrize("case", ["stops_slowly", "saves_slowly"])
def test_ranks_that_make_progress_are_waited_for(ranks: Ranks, case: str) -> None:
    assert ranks(case, grace=0.5) == 130
    assert ranks.saved() == ["saved0", "saved1"]


def test_ranks_that_make_no_progress_are_not(ranks: Ranks) -> None:
    assert ranks("does_not_stop", grace=0.5) == 130
    assert ranks.saved() == [] and "no progress in 0.5 s: ranks killed" in ranks.err


def test_a_second_interrupt_stops_at_once(ranks: Ranks) -> None:
    assert ranks("second_interrupt", quiet=True) == 130
    assert ranks.err == ""


def test_a_signal_that_comes_before_the_ranks_are_ready(ranks: Ranks) -> None:
    assert ranks("told_too_early") == 143
    assert "stopped before the ranks could save" in ranks.err


def test_a_failure_while_stopping_is_a_failure(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PATIENCE", 0.5)
    assert ranks("save_fails") == 1
    assert "rank 1 failed" in ranks.err and "No space left on device" in ranks.err


def test_ranks_die_with_their_launcher_and_only_with_theirs(tmp_path: Path) -> None:
    code = "import sys, pathlib; from meshwright.train.launch import launch; w, f = sys.argv[1:]\n"
    code += "sys.exit(launch(['lingers', f], ranks=2, folder=pathlib.Path(f, 'out'), entry=w))"
    runs = [Ranks(tmp_path / name, None) for name in ("a", "b")]  # type: ignore[arg-type]
    for run in runs:
        run.folder.mkdir()
    env = os.environ | {"TMPDIR": str(tmp_path)}  # a killed launcher leaves its black boxes
    launchers = [subprocess.Popen([sys.executable, "-c", code, WORKER, str(run.folder)], env=env) for run in runs]
    try:
        _until(lambda: all(len(list(run.folder.glob("ready*"))) == 2 for run in runs))
        ports = {run.folder.joinpath(f"port{rank}").read_text() for run in runs for rank in range(2)}
        assert len(ports) == 2, "two launches at once, each with a port of its own"
        launchers[0].kill()
        launchers[0].wait()
        _until(lambda: not runs[0].alive())
        assert len(runs[1].alive()) == 2
        (runs[1].folder / "go").touch()
        assert launchers[1].wait(30) == 0
    finally:
        for launcher in launchers:
            launcher.kill()
        for pid in runs[0].alive() + runs[1].alive():
            os.kill(pid, signal.SIGKILL)


def test_a_rank_whose_launcher_is_gone_does_not_start() -> None:
    env = os.environ | {LAUNCHER_PID: "1" if os.getpid() != 1 else "2"}
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.train.rank", "-m", "platform"], env=env, capture_output=True
    )
    assert done.returncode == 137 and done.stdout == b""


def _until(condition: object, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


# -- the rank's side -------------------------------------------------------------------------------------------------


def test_the_stop_flag_keeps_the_first_signal_and_gives_the_handlers_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopFlag() as flag:
        flag.install()
        assert flag.requested is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # within the second: the same stop, delivered twice
        assert flag.requested == signal.SIGTERM
        flag._since -= 2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


def _raise(exc: BaseException) -> int:
    raise exc


@pytest.mark.parametrize(
    ("exc", "code", "said"),
    [
        (UserError("data.path: no such file; name one"), 2, "meshwright: error: data.path: no such file; name one\n"),
        (RunError("loss is nan"), 1, "meshwright: failed: loss is nan\n"),
        (KeyError("x"), 1, "meshwright: internal error: KeyError: 'x'\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(3), 3, ""),
    ],
)
def test_exceptions_become_exit_codes(
    exc: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", ERROR_FILE, LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    assert run_guarded(lambda: _raise(exc)) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("main", "code", "error"),
    [
        ("1 / 0", 1, "meshwright: rank 1 internal error: ZeroDivisionError: division by zero\n"),
        ("0", 0, ""),
        ("143", 143, ""),
    ],
)
def test_a_rank_leaves_without_teardown(main: str, code: int, error: str) -> None:
    """Also one that is done: a thread of the backend may still be letting go of a tensor."""
    script = "import atexit; from meshwright.train.report import run_guarded; atexit.register(print, 'torn down')\n"
    script += f"print('said'); raise SystemExit(run_guarded(lambda: {main}))"
    env = os.environ | {"RANK": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "said\n", error)


def test_the_first_record_stays_and_torch_can_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    record_failure(RunError("first"), step=4)
    record_failure(RunError("second"))
    assert json.loads((tmp_path / "error.json").read_text())["meshwright"]["step"] == 4
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert failure.message["message"] == "first" and abs(failure.timestamp - time.time()) < 60
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


@pytest.mark.parametrize("file", ["no/folder/error.json", "folder"])
def test_an_error_that_cannot_be_recorded_is_told_all_the_same(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing half-written stays, and neither the error nor its exit code is lost."""
    (tmp_path / "folder").mkdir(mode=0o500)
    before = sorted(tmp_path.rglob("*"))
    for name in ("RANK", LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / file))
    assert run_guarded(lambda: _raise(RunError("full disk"))) == 1
    assert capsys.readouterr().err == "meshwright: failed: full disk\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_fills_up_while_an_error_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        record_failure(RunError("first"))
    assert list(tmp_path.iterdir()) == [], "nothing, or the whole"
    record_failure(RunError("second"))
    assert json.loads((tmp_path / "error.json").read_text())["meshwright"]["message"] == "second"


def test_one_rank_says_what_all_have_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under torchrun, whichever comes first; and an echo is never the earliest failure in torch's summary."""
    monkeypatch.delenv(LAUNCHED, raising=False)
    monkeypatch.setattr("meshwright.train.report._leave", lambda code: None)
    echo = RunError("lost")
    echo.__cause__ = RuntimeError("Connection reset by peer")
    said = []
    for rank, error in (("2", UserError("out: no")), ("0", UserError("out: no")), ("1", echo), ("3", RunError("own"))):
        (tmp_path / rank).mkdir()
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv(ERROR_FILE, str(tmp_path / rank / "error.json"))
        run_guarded(lambda error=error: _raise(error))  # type: ignore[misc]
        said.append(capsys.readouterr().err)
    assert said == ["meshwright: error: out: no\n", "", "", "meshwright: rank 3 failed: own\n"]
    when = {
        r: int(json.loads((tmp_path / r / "error.json").read_text())["message"]["extraInfo"]["timestamp"])
        for r in "0123"
    }
    assert when["1"] > when["0"] or when["1"] > when["2"]


def test_echoes_are_told_by_what_lies_behind_them() -> None:
    behind = RunError("all_reduce failed")
    behind.__cause__ = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    assert lost_peer(behind) and lost_peer(RuntimeError("Timed out waiting 1000ms for recv"))
    assert not lost_peer(RuntimeError("ProcessGroupGloo: invalid tensor size")) and not lost_peer(ValueError("nan"))
