"""Several nodes, of which one dies and comes back: two launchers on this machine, each with one rank."""

from __future__ import annotations

import itertools
import re
import signal
import time
from pathlib import Path

import pytest

from meshwright.spec.errors import RunError, UserError
from meshwright.train import folders
from meshwright.train.launch import launch
from meshwright.train.lock import HeldError, locked
from meshwright.train.nodes import Nodes
from train.commands import Command, free_port, lines, listening, running, text

WORKER = str(Path(__file__).with_name("launch_worker.py"))


@pytest.mark.timeout(400)  # ranks start six times, and machines are shared
def test_a_node_dies_and_comes_back(tmp_path):
    """Killed with its launcher: the other goes on alone within 90 s. It comes back, of a lower address: both go on.
    It is stopped in order: the other goes on again. At last the other is stopped too."""
    folder = text(tmp_path)
    meeting = ("--ranks", "1", "--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    words = (*meeting, "steps=1000000", "checkpoint.every=20", "validation.every=0", "comm_timeout=600")
    saved = folder / "run" / "checkpoints"
    with Command(folder, *words, "--local-addr", "127.0.0.2") as first:
        first.until("reading")
        with Command(folder, *words, "--local-addr", "127.0.0.3") as second:
            first.until(lambda: second.ranks() != [])  # the first may have begun alone
            (lost,) = second.ranks()
            begun = (folders.steps(saved), len(first.said))
            # A whole checkpoint: its folder is there before it is.
            first.until(lambda: folders.steps(saved) not in ([], begun[0]) and len(first.said) > begun[1] + 40)
            said = len(first.said)
            killed = time.monotonic()
            second.process.kill()
            second.process.wait()
            first.until(lambda: not running(lost), 10)  # ranks die with their launcher
            first.until(": goes on after step", after=said)
            assert time.monotonic() - killed < 90
        assert "changed since that checkpoint: layout.dp: 2 → 1" in first.err
        reached = lines(folder)[-1]["step"]
        first.until(lambda: lines(folder)[-1]["step"] > reached + 20)

        with Command(folder, *words, "--local-addr", "127.0.0.1") as second:
            first.until("a node has come: the ranks finish this step, save, and start again with it")
            second.until("changed since that checkpoint: layout.dp: 1 → 2")  # its rank is rank 0 now
            second.until(": goes on after step")
            second.until(lambda: any("step " in line and "tokens/s" in line for line in second.said))
            said = len(first.said)
            second.process.send_signal(signal.SIGTERM)
            assert second.end(20) == 143, "it waits for nobody"
            first.until("another node was stopped: the ranks start again without it")
            first.until(": goes on after step", after=said)
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 143
    assert "Traceback" not in first.err + second.err
    steps = [line["step"] for line in lines(folder)]
    assert steps == list(range(1, len(steps) + 1)), "each step once, in order"
    counted = [line["tokens"] for line in lines(folder)]
    assert min(b - a for a, b in itertools.pairwise(counted)) > 6 * 15, "the global batch, by whatever ranks"
    restarts = [line["restarts"] for line in lines(folder, "restart")]
    assert len(restarts) >= 3 and restarts == list(range(1, len(restarts) + 1))


def node(number, _, folder, port, case, says=("", ""), restarts=0):
    """One of two launchers, the first of which has the store; its rank does a case of launch_worker.py."""
    while number and not listening(port):
        time.sleep(0.01)
    try:
        return launch(
            [case, str(folder), says[number]], ranks=1, folder=folder / f"out{number}", entry=WORKER,
            max_restarts=restarts, nodes=Nodes.of("2", f"127.0.0.1:{port}", "run"),
        )  # fmt: skip
    except RunError as error:
        return str(error)


@pytest.mark.parametrize(("case", "code"), [("hello", 0), ("all_told", 143)])
def test_nodes_end_together(ranks, tmp_path, case, code):
    """Done, with 0 on both; asked to stop on one, where both are needed, with 143 on both."""
    found = ranks.attempt(2, node, tmp_path, free_port(), case, ("", ""), 2, bare=True)
    assert [each.value for each in found] == [code, code], found
    assert not any(word in each.stderr for each in found for word in ("Traceback", "restart"))


@pytest.mark.parametrize("says", [("fails", ""), ("", "fails")])
def test_a_rank_of_a_node_that_fails_for_good_ends_all(ranks, tmp_path, says):
    """On the node with the store, which ends with it, and on the other: both say what happened."""
    found = ranks.attempt(2, node, tmp_path, free_port(), "one_node_fails", says, bare=True)
    failing, other = sorted(found, key=lambda each: says[each.rank], reverse=True)
    assert failing.value == 1 and "was killed by SIGKILL at step 7" in failing.stderr
    assert other.value == "launch: the run has ended on another node, which says why", other
    assert not any("Traceback" in each.stderr for each in found)


@pytest.mark.parametrize(
    ("count", "endpoint", "said"),
    [
        ("0", "a:1", "--nnodes 0: write a number"),
        ("3:2", "a:1", "--nnodes 3:2: write a number"),
        ("many", "a:1", "--nnodes many: write a number"),
        ("2", None, "--nnodes needs --rdzv-endpoint"),
        ("2", "node0", "--rdzv-endpoint node0: write HOST:PORT"),
    ],
)
def test_what_cannot_meet_is_refused(count, endpoint, said):
    with pytest.raises(UserError, match=re.escape(said)):
        Nodes.of(count, endpoint, "name")


def test_a_folder_is_held_for_all_launchers_of_a_run(tmp_path):
    with locked(tmp_path, "the run a at b:1"), locked(tmp_path, "the run a at b:1"):
        (tmp_path / "kept").touch()
        for other in ("", "the run b at b:1"):
            with pytest.raises(HeldError, match="another run is in"), locked(tmp_path, other):
                pass
