"""`meshwright train --max-restarts`: what starts the ranks again, from where, how often, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from meshwright.spec.load import load_run
from meshwright.train import folders
from train.commands import FIELDS, Command, last_words, lines, running, text


@pytest.fixture
def folder(tmp_path):
    return text(tmp_path)


def test_a_killed_rank_starts_all_again_until_restarts_are_used_up(folder):
    """Killed at two moments: the first costs a restart, the second ends the run as it would have without."""
    with Command(folder, "steps=100000", "checkpoint.every=5", "--max-restarts", "1", "-q") as command:
        command.until(lambda: len(folders.steps(folder / "run" / "checkpoints")) > 0)
        first = command.ranks()
        os.kill(first[1], signal.SIGKILL)
        command.until("warning: restart 1: goes on after step")
        second = command.ranks()
        assert len(second) == 2 and not set(first) & set(second) and not any(map(running, first))
        command.until(lambda: len(lines(folder)) > 40)
        os.kill(second[0], signal.SIGABRT)
        assert command.end() == 1
        assert not any(map(running, second))
    err = command.err.splitlines()
    assert [line.split(" at step")[0] for line in err if "was killed" in line] == [
        "meshwright: rank 1 was killed by SIGKILL",
        "meshwright: rank 0 was killed by SIGABRT",
    ]
    report = err[next(i for i, line in enumerate(err) if "SIGABRT" in line and "killed" in line) :]
    assert report[1].startswith("  rank 1 was "), "not what rank 0 said of the first failure"
    assert err.count("meshwright: restart 1 of 1") == 1 and "Traceback" not in command.err
    (restart,) = lines(folder, "restart")
    assert restart["restarts"] == 1 and 0 < restart["seconds"] < 60 and restart["step"] % 5 == 0
    steps = [line["step"] for line in lines(folder)]
    assert steps == list(range(1, len(steps) + 1)), "each step once, in order, whatever was trained again"


def trained(ranks, folder, *words):
    """There has been a run of one rank in the folder."""
    ranks.run(1, last_words, load_run(None, [*FIELDS, "validation.every=0", "layout.dp=1", *words]), folder)


def test_what_a_launch_was_told_to_ignore_is_not_what_it_has_made(folder, ranks):
    """resume=never: begins anew once, and at a restart goes on from its own checkpoints."""
    trained(ranks, folder, "steps=10", "checkpoint.every=5")
    again = ("steps=100000", "checkpoint.every=5", "checkpoint.resume=never", "layout.dp=1", "--max-restarts", "1")
    with Command(folder, *again) as command:
        command.until(lambda: 15 in folders.steps(folder / "run" / "checkpoints"))
        os.kill(command.ranks()[0], signal.SIGKILL)
        command.until("warning: restart 1: goes on after step")
        (said,) = (line for line in command.said if "warning: restart 1" in line)
        assert int(said.split("after step ")[1].split(",")[0]) >= 15
        command.process.send_signal(signal.SIGTERM)
        assert command.end() == 143
    assert (folder / "run" / "checkpoints" / "superseded-step-00000010").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("optimizer.lr=1e30", "max_skips=1", "lr_schedule.warmup=0"), 1, "not finite in 2 steps in a row"),
        (("model.ffn=32",), 2, "another model: model.ffn=24 (this run: 32)"),
    ],
)
def test_what_would_fail_again_is_not_started_again(words, code, said, folder, ranks):
    if code == 2:
        trained(ranks, folder, "steps=2")
    with Command(folder, "steps=20", "validation.every=0", "layout.dp=2", "--max-restarts", "3", *words) as command:
        assert command.end() == code
    assert said in command.err and "restart 1" not in command.err and "Traceback" not in command.err
    assert command.err.count(said) == 1 or code == 1, "wrong input is the same on all ranks"
    assert command.err.count("skipped on all ranks") == (2 if code == 1 else 0)


def test_a_stop_while_the_ranks_start(folder):
    """SIGTERM to a rank within its first milliseconds, when it can do nothing about it: no failure, no restart."""
    with Command(folder, "steps=5", "--max-restarts", "3") as command:
        command.until(lambda: len(command.ranks()) == 2)
        os.kill(command.ranks()[1], signal.SIGTERM)
        assert command.end() == 143
    assert "restart" not in command.err and "Traceback" not in command.err


def test_a_stop_before_there_are_ranks(folder):
    with Command(folder, "steps=5") as command:
        command.until("reading text.txt")
        command.process.send_signal(signal.SIGTERM)
        assert command.end() == 143
    assert "Traceback" not in command.err and not folders.steps(folder / "run" / "checkpoints")


def torchrun(folder, options, *words, stderr=subprocess.PIPE):
    command = ["torch.distributed.run", *options, "--max-restarts", "3", "-m", "meshwright", "train"]
    return subprocess.Popen(
        [sys.executable, "-m", *command, *FIELDS, "steps=100000", *words],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr, text=True,
    )  # fmt: skip


def ranks_of(process):
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    return sorted(map(int, found.stdout.split()))


def test_under_torchrun_a_stop_is_an_end_and_ranks_die_with_it(folder):
    """Ranks that were asked to stop end with 0 under any launcher; then it does not start them again."""
    options = ("--standalone", "--nproc-per-node", "2")
    process = torchrun(folder, options)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "step 5/" in line:
                break
        os.kill(ranks_of(process)[-1], signal.SIGTERM)
        err = process.communicate(timeout=90)[1]
        assert process.returncode == 0 and "stopped after step" in err
        assert folders.steps(folder / "run" / "checkpoints")
        process = torchrun(folder, ("--standalone", "--nproc-per-node", "1"))
        assert process.stderr is not None
        for line in process.stderr:
            if "step " in line and "/100000" in line:
                break
        ranks = ranks_of(process)
        assert len(ranks) == 1
        process.kill()
        process.communicate()
        end = time.monotonic() + 10
        while any(map(running, ranks)):
            assert time.monotonic() < end, "torchrun was killed, its ranks run on"
            time.sleep(0.05)
    finally:
        process.kill()
