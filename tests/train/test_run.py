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

from meshwright.spec.load import load_run
from meshwright.train import checkpoint, folders
from train.commands import last_words

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


def parameters(folder: Path, step: int, out: str = "run") -> dict[str, torch.Tensor]:
    return checkpoint.load(folders.path(folder / out / "checkpoints", step))[0]


def metrics(folder: Path, split: str = "train", out: str = "run") -> list[dict]:
    lines = [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


def children(process: subprocess.Popen) -> list[int]:
    """The ranks' process ids, in order of rank."""
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    return sorted(map(int, found.stdout.split()))


def interrupted(folder: Path, number: signal.Signals, *fields: str, after: str = "step 5/") -> tuple[int, str, str]:
    process = start(folder, *fields)
    wait_for(process, after)
    process.send_signal(number)
    return finish(process)


@pytest.mark.timeout(400)  # three whole runs, and machines are shared
def test_an_interrupted_run_goes_on_to_the_same_numbers(folder, tmp_path_factory):
    """Interrupted by SIGINT, then finished: bit for bit the run that nobody disturbed, and no step told twice."""
    undisturbed = tmp_path_factory.mktemp("undisturbed")
    (undisturbed / "text.txt").write_text((folder / "text.txt").read_text())
    code, out, err = finish(start(undisturbed, "steps=240", "checkpoint.every=120"))
    assert code == 0, err
    assert "bigrams" in out and "sample:" in out

    code, _, err = interrupted(folder, signal.SIGINT, "steps=240", "checkpoint.every=120")
    assert code == 130, err
    assert "Traceback" not in err and "stopped after step" in err
    reached = folders.steps(folder / "run" / "checkpoints")[-1]
    assert 5 <= reached < 240
    code, _, err = finish(start(folder, "steps=240", "checkpoint.every=120"))
    assert code == 0, err
    assert f"resumed after step {reached}" in err
    for split in ("train", "validation"):
        ours, theirs = metrics(folder, split), metrics(undisturbed, split)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        assert [line["loss"] for line in ours] == [line["loss"] for line in theirs]
    ours, theirs = parameters(folder, 240), parameters(undisturbed, 240)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_context_ranks_train_what_one_device_does(folder, ranks):
    """Packed texts; two steps, then the command again: the same losses, sample and checkpoint, whatever cp is."""
    (folder / "shelf").mkdir()
    for index in range(30):
        (folder / "shelf" / f"{index}.txt").write_text(f"text {index}: " + f"{index * index} " * (index % 9))
    fields = ["data={path: shelf, seq_len: 16, packing: documents}", "precision=float64", "device=cpu"]
    fields += ["lr_schedule.decay=constant", "lr_schedule.decay_steps=0", "validation.every=2"]
    (alone,) = ranks.run(
        1, last_words, load_run(None, [*FIELDS, *fields, "layout.dp=1", "steps=4", "out=alone"]), folder
    )
    run = load_run(None, [*FIELDS, *fields, "layout={dp: 1, cp: 2}", "steps=2"])
    ranks.run(2, last_words, run, folder, axes={"cp": 2})
    code, out, err = finish(start(folder, *fields, "layout={dp: 1, cp: 2}", "steps=4"))
    assert code == 0 and "layout   cp=2, ring in zigzag parts: 2 ranks, float64" in err, err
    assert "resumed after step 2" in err
    assert out == alone.replace("alone/", "run/").replace("in alone)", "in run)")
    for split in ("train", "validation"):
        ours, theirs = metrics(folder, split), metrics(folder, split, "alone")
        assert [line["step"] for line in ours] == [line["step"] for line in theirs] != []
        assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-10)
    ours, theirs = parameters(folder, 4), parameters(folder, 4, "alone")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-8, atol=1e-12)


def test_sigterm_to_one_rank_saves_and_ends_all(folder):
    process = start(folder, "steps=100000")
    wait_for(process, "step 5/")
    os.kill(children(process)[-1], signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 143, err
    assert checkpoint.newest(folder / "run" / "checkpoints").step >= 5


def test_a_killed_rank_ends_all_and_is_named(folder):
    process = start(folder, "steps=100000", "checkpoint.every=4")
    wait_for(process, "saved")
    ranks = children(process)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    code, _, err = finish(process)
    assert time.monotonic() - began < 15
    assert code == 1
    assert re.search(r"rank 1 was killed by SIGKILL.* at step \d+", err), err
    named = re.findall(r"^  logs: (.*)$", err, flags=re.MULTILINE)
    assert all(Path(where).is_dir() for where in named), err
    assert "Traceback" not in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert checkpoint.newest(folder / "run" / "checkpoints").step % 4 == 0


def test_a_run_that_diverges_stops_in_words(folder):
    code, _, err = finish(start(folder, "steps=50", "optimizer.lr=1e30", "max_skips=2", "lr_schedule.warmup=0"))
    assert code == 1
    assert "not finite in 3 steps in a row (max_skips=2)" in err and "Traceback" not in err
    assert err.count("skipped on all ranks") == 3


@pytest.mark.parametrize("how", [">&-", ">/dev/full", "2>&-"])
def test_streams_that_take_nothing(folder, how):
    """A run trains whoever listens; what it has to say at its end must reach somebody, or it has failed."""
    command = f'exec {sys.executable} -m meshwright train "$@" {how}'
    process = subprocess.Popen(
        ["sh", "-c", command, "sh", *FIELDS, "steps=2", "layout.dp=1"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    code, out, err = finish(process)
    assert checkpoint.newest(folder / "run" / "checkpoints").step == 2
    assert [line["step"] for line in metrics(folder)] == [1, 2]
    assert "Traceback" not in err and "internal error" not in err and "OSError" not in err
    if how == "2>&-":
        assert (code, err) == (0, "") and "bigrams" in out
    else:
        assert code == 1 and "rank 0 failed at step 2, telling the result" in err
        assert "all steps are done, but standard output cannot be written: " in err


def test_a_checkpoint_of_another_model_is_refused_once(folder):
    assert finish(start(folder, "steps=2"))[0] == 0
    code, _, err = finish(start(folder, "steps=3", "model.ffn=32"))
    assert code == 2
    assert err.count("another model: model.ffn=24 (this run: 32)") == 1 and "Traceback" not in err


def test_torchrun_joins(folder):
    (folder / "run.yaml").write_text("\n".join(field.replace("=", ": ", 1) for field in FIELDS[:4]) + "\nout: run\n")
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "meshwright", "train")
    process = subprocess.Popen(
        [sys.executable, *command, "run.yaml", "steps=3"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    code, _, err = finish(process)
    assert code == 0, err
    assert "dp=3" in err and [line["step"] for line in metrics(folder)] == [1, 2, 3]
