"""What a person sees while a run is training: a live line on a terminal, a plain line a step elsewhere."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

RECENT = 20  # steps whose median time the time left is reckoned from


class Progress:
    """Shows steps and messages on `stream`, by default stderr. A stream that breaks is given up; the run goes on.

    `quiet` shows no steps, and of messages only warnings. Without `lead`, for ranks that do not speak, nothing is
    ever shown. `message` may be used outside the `with` block too.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        quiet: bool,
        stream: TextIO | None = None,
        lead: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._total = total_steps
        self._quiet = quiet
        self._stream = stream or sys.stderr
        self._silent = not lead
        self._clock = clock
        self._last: float | None = None
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._last = self._clock()
        if not self._silent and not self._quiet:
            self._attempt(self._open)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        live, self._live = self._live, None
        if live is not None:
            self._attempt(live.stop)

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """`step` (from 1) is done. `loss` in nats a token, `tokens_per_second` of all ranks together."""
        now = self._clock()
        if self._last is not None:
            self._recent.append(now - self._last)
        self._last = now
        if self._silent or self._quiet:
            return
        words = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  {self._left(step)} left"
        if self._live is None:
            self._line(f"step {step}/{self._total}  {words}")
        else:
            self._attempt(lambda: self._show(step, words))

    def message(self, text: str) -> None:
        """Show `text`, above the live line if there is one."""
        if self._silent or (self._quiet and not text.startswith("warning")):
            return
        if self._live is None:
            self._line(text)
        else:
            live = self._live
            self._attempt(lambda: live.console.print(Text(text, style="yellow" if text.startswith("warning") else "")))

    def _left(self, step: int) -> str:
        if not self._recent:
            return "?"
        seconds = round(statistics.median(self._recent) * max(self._total - step, 0))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

    # -- the stream -----------------------------------------------------------------------------------------------

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._silent = True

    def _line(self, text: str) -> None:
        self._attempt(lambda: self._stream.write(f"{text}\n") and self._stream.flush())

    def _open(self) -> None:
        if not self._stream.isatty() or os.environ.get("TERM", "") in ("dumb", "unknown"):
            return
        console = _Console(file=self._stream, highlight=False, emoji=False, markup=False)
        # What others print to stderr goes above the line; stdout may lead elsewhere and is left alone.
        live = Live(
            console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=self._stream is sys.stderr
        )
        live.start()
        self._live = live

    def _show(self, step: int, words: str) -> None:
        assert self._live is not None
        row = Table.grid(padding=(0, 1))
        row.add_row(Text(f"{step}/{self._total}"), ProgressBar(self._total, step, width=24), Text(words))
        self._live.update(row, refresh=True)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # not the end of the process: `Progress` gives the stream up
