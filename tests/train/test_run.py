"""Whole runs through the command line: interrupted, killed, resumed, joined to torchrun. Each starts real ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from meshwright.train import checkpoint

FIELDS = [
    "model={layers: 1, hidden: 16, heads: 2, kv_heads: 1, ffn: 24}",
    "data={path: text.txt, seq_len: 16}",
    "batch={sequences: 6, micro: 2}",
    "validation={every: 4, sequences: 5}",
    "lr_schedule.warmup=2",
    "out=run",
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i}: {i * i}\n" for i in range(400)))
    return tmp_path


def start(folder: Path, *fields: str, command: tuple[str, ...] = ("-m", "meshwright", "train")) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *command, *FIELDS, *fields],
        cwd=folder,
        env=os.environ | {"NO_COLOR": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, timeout: float = 90) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def wait_for(process: subprocess.Popen, words: str) -> str:
    seen = ""
    for line in process.stderr:
        seen += line
        if words in line:
            return seen
    raise AssertionError(f"{words!r} never came:\n{seen}")


def parameters(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoint.load(checkpoint.path(folder / "run" / "checkpoints", step))[0]


def metrics(folder: Path, split: str = "train") -> list[dict]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


def ranks_of(process: subprocess.Popen) -> list[int]:
    found = subprocess.run(["pgrep", "-f", f"meshwright.train.rank.*{'train'}"], capture_output=True, text=True, check=False)
    return [pid for pid in map(int, found.stdout.split()) if parent(pid) == process.pid]


def parent(pid: int) -> int:
    try:
        return int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])
    except FileNotFoundError:
        return 0


def test_an_interrupted_run_goes_on_to_the_same_numbers(folder, tmp_path_factory):
    """Interrupted, then terminated, then finished: bit for bit the run that nobody disturbed, no step told twice."""
    quiet = tmp_path_factory.mktemp("quiet")
    (quiet / "text.txt").write_text((folder / "text.txt").read_text())
    undisturbed = start(quiet, "steps=4000", "validation.every=0", "checkpoint.every=0")
    process = start(folder, "steps=4000", "validation.every=0", "checkpoint.every=0")
    reached = []
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        wait_for(process, "step " if not reached else "resumed after step")
        time.sleep(0.5)
        process.send_signal(number)
        status, _, err = finish(process)
        assert status == code, err
        assert "Traceback" not in err
        reached.append(checkpoint.steps(folder / "run" / "checkpoints")[-1])
        process = start(folder, "steps=4000", "validation.every=0", "checkpoint.every=0")
    assert 0 < reached[0] < reached[1] < 4000, reached
    undisturbed.send_signal(signal.SIGINT)
    undisturbed.wait(60)
    process.send_signal(signal.SIGTERM)
    finish(process)
    last = reached[1]
    again = start(quiet, f"steps={last}", "lr_schedule={decay: constant, decay_steps: 0}", "out=again", "checkpoint.every=0")
    again.kill()
    steps = [line["step"] for line in metrics(folder) if line["step"] <= last]
    assert steps == list(range(1, last + 1))
    expected = {line["step"]: line["loss"] for line in metrics(quiet)}
    shared = [line for line in metrics(folder) if line["step"] in expected]
    assert len(shared) > 3
    assert all(line["loss"] == expected[line["step"]] for line in shared)
