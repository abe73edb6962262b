"""What is shown on a terminal, in a file, and to nobody."""

from __future__ import annotations

import io
import re

import pytest

from meshwright.train.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def __init__(self, error: Exception, terminal: bool) -> None:
        super().__init__()
        self.error, self.terminal, self.broken = error, terminal, False
        self.refused = 0

    def isatty(self) -> bool:
        if self.closed:
            self._refuse()
        return self.terminal

    def write(self, text: str) -> int:
        self._refuse()
        return super().write(text)

    def flush(self) -> None:
        self._refuse()

    def _refuse(self) -> None:
        if self.broken:
            self.refused += 1
            raise self.error


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")


def test_plain_lines() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(200, quiet=False, stream=out, clock=clock)
    progress.message("resumed")
    with progress:
        for step, seconds in ((10, 60.0), (11, 0.5), (12, 0.4)):  # the first is slow, the median is not
            clock.now += seconds
            progress.step(step, 3.21, 5300.4)
        progress.message("saved")
    progress.message("done")
    shown = out.getvalue().splitlines()
    assert shown[0] == "resumed"
    assert shown[3] == "step 12/200  loss 3.2100  5,300 tokens/s  1:34 left"
    assert shown[4:] == ["saved", "done"]


@pytest.mark.parametrize(("seconds", "left"), [(1.0, "0:09"), (10.0, "1:30"), (1000.0, "2:30:00")])
def test_time_left(seconds: float, left: str) -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(10, quiet=False, stream=out, clock=clock) as progress:
        clock.now += seconds
        progress.step(1, float("nan"), 1.0)
    assert out.getvalue() == f"step 1/10  loss nan  1 tokens/s  {left} left\n"


def test_old_steps_are_forgotten() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(100, quiet=False, stream=out, clock=clock) as progress:
        for step in range(1, 91):
            clock.now += 100.0 if step <= 60 else 1.0
            progress.step(step, 1.0, 1.0)
    assert out.getvalue().endswith("0:10 left\n")


def test_quiet_shows_warnings_alone() -> None:
    out = io.StringIO()
    with Progress(2, quiet=True, stream=out) as progress:
        progress.step(1, 1.0, 1.0)
        progress.message("saved")
        progress.message("warning: look")
    assert out.getvalue() == "warning: look\n"


@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_other_ranks_show_nothing(quiet: bool, kind: type[io.StringIO]) -> None:
    out = kind()
    with Progress(2, quiet=quiet, stream=out, lead=False) as progress:
        progress.step(1, 1.0, 1.0)
        progress.message("warning: look")
    assert out.getvalue() == ""


def test_live_line() -> None:
    out = Terminal()
    with Progress(4, quiet=False, stream=out) as progress:
        progress.step(1, 3.25, 5300)
        progress.message("[saved] step 1")
        progress.step(4, 2.5, 5300)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    for words in ("1/4", "loss 3.2500", "5,300 tokens/s", "0:00 left", "━"):
        assert words in shown
    # The message is printed above the line, which is then drawn again.
    assert shown.index("[saved] step 1") < shown.rindex("loss 3.2500") < shown.index("loss 2.5000")
    assert shown.endswith("\n")
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1  # the cursor comes back


def test_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        out = Terminal()
        with Progress(4, quiet=False, stream=out) as progress:
            progress.step(2, 3.25, 5300)
            progress.message("warning: look")
        return out.getvalue()

    coloured = re.compile(r"\x1b\[[0-9;]*(3[0-9]|9[0-7])[0-9;]*m")
    assert coloured.search(shown())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured.search(shown())
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "I/O"), ValueError("I/O operation on closed file.")])
@pytest.mark.parametrize("when", ["before", "inside", "end"])
def test_a_broken_stream_is_given_up_and_training_goes_on(terminal: bool, error: Exception, when: str) -> None:
    out = Broken(error, terminal)
    progress = Progress(4, quiet=False, stream=out)
    done = []
    out.broken = when == "before"
    progress.message("hello")
    with progress:
        progress.step(1, 1.0, 1.0)
        out.broken = when != "end"
        progress.step(2, 1.0, 1.0)
        progress.message("warning: look")
        done.append("trained")
        out.broken = True
    progress.message("bye")
    refused = out.refused
    out.broken = False
    progress.message("again")
    assert done == ["trained"]
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    words = ["hello", "1/4", "2/4", "warning: look", "bye", "again"]
    assert [word for word in words if word in shown] == {"before": [], "inside": words[:2], "end": words[:4]}[when]
    # Tried when it broke, perhaps once more to leave a terminal as it was, and then left alone.
    assert 1 <= refused <= 4 and out.refused == refused


def test_a_failing_run_leaves_the_terminal_whole() -> None:
    out = Terminal()
    with pytest.raises(RuntimeError), Progress(4, quiet=False, stream=out) as progress:
        progress.step(1, 1.0, 1.0)
        raise RuntimeError
    assert out.getvalue().count("\x1b[?25h") == 1


def test_a_closed_stream_is_left_alone() -> None:
    out = Broken(ValueError("I/O operation on closed file."), terminal=False)
    out.close()
    out.broken = True
    with Progress(4, quiet=False, stream=out) as progress:
        progress.step(1, 1.0, 1.0)
        progress.step(2, 1.0, 1.0)
        progress.message("warning: look")
    assert out.refused == 1
