"""Whole commands on a tiny model, in folders of their own: to be signalled, killed, started again, and compared."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from meshwright.spec.run import RunSpec
from meshwright.train import checkpoint, folders
from meshwright.train.loop import Loop
from meshwright.train.signals import StopFlag

FIELDS = [
    "model={layers: 1, hidden: 16, heads: 2, kv_heads: 1, ffn: 24}",
    "data={path: text.txt, seq_len: 16}",
    "batch={sequences: 6, micro: 2}",
    "validation={every: 50, sequences: 5}",
    "lr_schedule.warmup=2",
    "device=cpu",
    "out=run",
]


def text(folder: Path) -> Path:
    (folder / "text.txt").write_text("".join(f"line {i}: {i * i}\n" for i in range(400)))
    return folder


class Command:
    """`meshwright train` in a folder, and what it says as it says it."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        environment = os.environ | {"NO_COLOR": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meshwright", "train", *FIELDS, *words],
            cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # its ranks die with it
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(iter(self.process.stderr.readline, ""))

    @property
    def err(self) -> str:
        return "".join(self.said)

    @property
    def step(self) -> int:
        """The last step that it has told, of the ranks that run now."""
        for line in reversed(self.said):
            if line.startswith("step ") and "tokens/s" in line:
                return int(line[5:].partition("/")[0])
            if "warning: restart" in line:
                break
        return 0

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def ranks(self) -> list[int]:
        """Process ids, in the order in which they were started."""
        found = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False)
        return sorted(map(int, found.stdout.split()))

    def until(self, words: str | Callable[[], bool], seconds: float = 100, *, after: int = 0) -> None:
        """Wait until `words` are said, among the lines from `after` on, or until it says so."""
        end = time.monotonic() + seconds
        done = words if callable(words) else lambda: any(words in line for line in self.said[after:])
        while not done():
            assert time.monotonic() < end and not self.over, f"{words!r} never came:\n{self.err}"
            time.sleep(0.005)

    def end(self, seconds: float = 100) -> int:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end:\n{self.err}") from None
        self._reader.join(5)
        return code


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def listening(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parameters(folder: Path, step: int, out: str = "run") -> dict[str, torch.Tensor]:
    return checkpoint.load(folders.path(folder / out / "checkpoints", step))[0]


def lines(folder: Path, split: str = "train", out: str = "run") -> list[dict]:
    found = [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["split"] == split]


def last_words(mesh, run: RunSpec, folder: Path) -> str:
    """What the command does on a rank, without a process of its own; what it says at the end. On the way it says what
    it would to stderr."""
    os.chdir(folder)
    with StopFlag() as stop, contextlib.redirect_stdout(io.StringIO()) as out:
        loop = Loop(run, mesh, stop, quiet=False)
        assert loop.run() == 0
        loop.farewell()
    return out.getvalue()
