"""An hour's worth in small: ranks, the command itself and savers are killed at random moments, and nothing is lost.

The moments follow from a seed. MESHWRIGHT_SURVIVAL=N makes it N times as long, with another seed each time.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from meshwright.spec.load import load_run
from meshwright.train import folders
from train.commands import FIELDS, Command, last_words, lines, parameters, running, text

STEPS = 300
RUN = (f"steps={STEPS}", "checkpoint.every=11", "layout.zero=1")
WORDS = (*RUN, "--max-restarts", "2")
ROUNDS = int(os.environ.get("MESHWRIGHT_SURVIVAL", "1"))
WAYS = ("rank", "saver", "command")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory, ranks):
    folder = text(tmp_path_factory.mktemp("quiet"))
    ranks.run(2, last_words, load_run(None, [*FIELDS, *RUN, "layout.dp=2"]), folder)
    return folder


def strike(command: Command, way: str, step: int, dice: random.Random) -> None:
    """Kill, by and by after `step`; a saver while it writes."""
    saved = Path(command.folder) / "run" / "checkpoints"
    command.until(lambda: command.step >= step)
    if way == "saver":
        command.until(lambda: any(saved.glob(".saving-*-step-*")))
    else:
        time.sleep(dice.uniform(0, 0.05))
    victims, said = command.ranks(), len(command.said)
    victim = command.process.pid if way == "command" else dice.choice(victims)
    os.kill(victim, signal.SIGKILL)
    end = time.monotonic() + 20
    while any(map(running, victims if way == "command" else [victim])):
        assert time.monotonic() < end, f"{way} killed, others live"
        time.sleep(0.02)
    if way != "command":
        command.until("warning: restart", after=said)


@pytest.mark.timeout(300 * ROUNDS)
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_run_that_is_killed_again_and_again_ends_like_a_quiet_one(seed, tmp_path, quiet):
    dice = random.Random(seed)
    folder = text(tmp_path)
    moments = sorted(dice.sample(range(15, STEPS - 30), len(WAYS)))
    ways = dice.sample(WAYS, len(WAYS))
    todo = list(zip(ways, moments, strict=True))
    code, starts = 137, 0
    while code == 137:
        starts += 1
        with Command(folder, *WORDS) as command:
            while todo:
                way, step = todo.pop(0)
                strike(command, way, step, dice)
                if way == "command":
                    break
            code = {-signal.SIGKILL: 137}.get(status := command.end(), status)
    assert code == 0, command.err
    assert starts == 2, "restarts were not the command's"
    ours, theirs = parameters(folder, STEPS), parameters(quiet, STEPS)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for split in ("train", "validation"):
        assert [(n["step"], n["loss"]) for n in lines(folder, split)] == [
            (n["step"], n["loss"]) for n in lines(quiet, split)
        ]
    assert folders.steps(folder / "run" / "checkpoints") == folders.steps(quiet / "run" / "checkpoints")
    leftovers = [path.name for path in (folder / "run" / "checkpoints").iterdir() if path.name.startswith(".")]
    assert not leftovers
