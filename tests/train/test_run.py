"""Whole runs through the command line: interrupted, killed, joined to torchrun. Each starts real ranks."""

from __future__ import annotations

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
from train.commands import FIELDS, Command, last_words, lines, parameters, text


@pytest.fixture
def folder(tmp_path):
    return text(tmp_path)


@pytest.mark.timeout(300)  # machines are shared
def test_an_interrupted_run_goes_on_to_the_same_numbers(folder, ranks, tmp_path_factory):
    """Interrupted by SIGINT, then finished: bit for bit the run that nobody disturbed, and no step told twice."""
    words = ("steps=240", "checkpoint.every=120", "validation.every=4", "layout.dp=2")
    run, undisturbed = load_run(None, [*FIELDS, *words]), text(tmp_path_factory.mktemp("undisturbed"))
    out, _ = ranks.run(2, last_words, run, undisturbed)
    assert "bigrams" in out and "sample:" in out

    with Command(folder, *words) as command:
        command.until("step 5/")
        command.process.send_signal(signal.SIGINT)
        assert command.end() == 130, command.err
    assert "Traceback" not in command.err and "stopped after step" in command.err
    reached = folders.steps(folder / "run" / "checkpoints")[-1]
    assert 5 <= reached < 240
    speaks, _ = ranks.attempt(2, last_words, run, folder)
    assert speaks.ok, speaks
    assert f"resumed after step {reached}" in speaks.stderr
    for split in ("train", "validation"):
        ours, theirs = lines(folder, split), lines(undisturbed, split)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        assert [line["loss"] for line in ours] == [line["loss"] for line in theirs]
    ours, theirs = parameters(folder, 240), parameters(undisturbed, 240)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_context_ranks_train_what_one_device_does(folder, ranks):
    """Packed texts; two steps, then again from there: the same losses, sample and checkpoint, whatever cp is."""
    (folder / "shelf").mkdir()
    for index in range(30):
        (folder / "shelf" / f"{index}.txt").write_text(f"text {index}: " + f"{index * index} " * (index % 9))
    fields = [*FIELDS, "data={path: shelf, seq_len: 16, packing: documents}", "precision=float64"]
    fields += ["lr_schedule.decay=constant", "lr_schedule.decay_steps=0", "validation.every=2"]
    (alone,) = ranks.run(1, last_words, load_run(None, [*fields, "layout.dp=1", "steps=4", "out=alone"]), folder)
    for steps in (2, 4):
        run = load_run(None, [*fields, "layout={dp: 1, cp: 2}", f"steps={steps}"])
        speaks, other = ranks.attempt(2, last_words, run, folder, axes={"cp": 2})
        assert speaks.ok and other.ok, speaks
    assert "resumed after step 2" in speaks.stderr
    assert speaks.value == alone.replace("alone/", "run/").replace("in alone)", "in run)")
    for split in ("train", "validation"):
        ours, theirs = lines(folder, split), lines(folder, split, "alone")
        assert [line["step"] for line in ours] == [line["step"] for line in theirs] != []
        assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-10)
    ours, theirs = parameters(folder, 4), parameters(folder, 4, "alone")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-8, atol=1e-12)


def test_sigterm_to_one_rank_saves_and_ends_all(folder):
    with Command(folder, "steps=100000") as command:
        command.until("step 5/")
        os.kill(command.ranks()[-1], signal.SIGTERM)
        assert command.end() == 143, command.err
    assert checkpoint.newest(folder / "run" / "checkpoints").step >= 5


@pytest.mark.parametrize("layout", ["{dp: 2}", "{dp: 1, pp: 2}"])
def test_a_killed_rank_ends_all_and_is_named(folder, layout):
    """Within 15 seconds, whether the others wait for it in a sum or for a message; nothing of the run is left."""
    with Command(folder, "steps=100000", "checkpoint.every=4", f"layout={layout}", "model.layers=2") as command:
        command.until("saved")
        ranks = command.ranks()
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        began = time.monotonic()
        assert command.end() == 1
        assert time.monotonic() - began < 15
    assert re.search(r"rank 1 was killed by SIGKILL.* at step \d+", command.err), command.err
    assert re.search(r"rank 0 was .*at step \d+", command.err), command.err
    named = re.findall(r"^  logs: (.*)$", command.err, flags=re.MULTILINE)
    assert all(Path(where).is_dir() for where in named), command.err
    assert "Traceback" not in command.err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert checkpoint.newest(folder / "run" / "checkpoints").step % 4 == 0


@pytest.mark.parametrize("how", [">&-", ">/dev/full", "2>&-"])
def test_streams_that_take_nothing(folder, how):
    """A run trains whoever listens; what it has to say at its end must reach somebody, or it has failed."""
    command = f'exec {sys.executable} -m meshwright train "$@" {how}'
    done = subprocess.run(
        ["sh", "-c", command, "sh", *FIELDS, "steps=2", "layout.dp=1"],
        cwd=folder, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    err = done.stderr
    assert checkpoint.newest(folder / "run" / "checkpoints").step == 2
    assert [line["step"] for line in lines(folder)] == [1, 2]
    assert "Traceback" not in err and "internal error" not in err and "OSError" not in err
    if how == "2>&-":
        assert (done.returncode, err) == (0, "") and "bigrams" in done.stdout
    else:
        assert done.returncode == 1 and "rank 0 failed at step 2, telling the result" in err
        assert "all steps are done, but standard output cannot be written: " in err


def test_torchrun_joins(folder):
    plain = (field for field in FIELDS if not field.startswith("lr_schedule."))
    (folder / "run.yaml").write_text("\n".join(field.replace("=", ": ", 1) for field in plain))
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "meshwright", "train")
    done = subprocess.run(
        [sys.executable, *command, "run.yaml", "steps=3"],
        cwd=folder, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "dp=2" in done.stderr, done.stderr
    assert [line["step"] for line in lines(folder)] == [1, 2, 3]
