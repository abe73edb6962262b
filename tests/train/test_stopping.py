"""SIGTERM or SIGINT to one rank, at every moment of a run: all ranks save and leave together, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.spec.load import load_run
from meshwright.spec.run import RunSpec
from meshwright.train import checkpoint, folders
from meshwright.train.loop import Loop
from meshwright.train.metrics import Metrics
from meshwright.train.signals import StopFlag
from meshwright.train.stopping import StoppedEarlyError
from meshwright.train.storage import Writer
from meshwright.train.trainer import Trainer

FIELDS = [
    "model={layers: 1, hidden: 16, heads: 2, kv_heads: 1, ffn: 24}",
    "data={path: text.txt, seq_len: 16}",
    "batch={sequences: 6, micro: 2}",
    "validation={every: 2, sequences: 12}",
    "lr_schedule.warmup=0",
    "layout.dp=2",
    "checkpoint={every: 3, keep: 9}",
    "steps=6",
    "out=run",
]
EARLY, STEPS = "early", 6

# When the signal comes: at the beginning of a function (negative: at its end), in its how-manieth call; and the step
# after which the run stops.
MOMENTS: dict[str, tuple[Any, str, int, int | str]] = {
    "data is prepared": (Loop, "_held_out", 1, EARLY),
    "the model is built": (Trainer, "__init__", 1, EARLY),
    "a checkpoint is looked for": (Loop, "_resume", 1, EARLY),
    "the first step": (Trainer, "accumulate", 1, 1),
    "an update": (Trainer, "update", 2, 2),
    "validation": (Trainer, "evaluate", 1, 2),
    "a save in the background": (Writer, "write_data", 1, 3),
    "validation after a save": (Trainer, "evaluate", 3, 6),
    "the very end": (Trainer, "evaluate", -3, 6),
    "the last step": (Trainer, "accumulate", STEPS, 6),
    "the last update": (Trainer, "update", STEPS, 6),
}


def run_of(*fields: str) -> RunSpec:
    return load_run(None, [*FIELDS, *fields])


@contextlib.contextmanager
def signalled(owner: Any, name: str, call: int, number: int) -> Iterator[None]:
    """Within, this process gets the signal at the beginning of a call of that function, or at its end."""
    real: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def told(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), number)
        done = real(*args, **options)
        if calls == -call:
            os.kill(os.getpid(), number)
        return done

    with mock.patch.object(owner, name, told):
        yield


def life(mesh, run: RunSpec, folder: Path, moment: str | None, whom: int, number: int) -> tuple[int | str, list[str]]:
    """How the run ends and what rank 0 says, where rank `whom` is signalled at the moment."""
    os.chdir(folder)
    said: list[str] = []
    here = contextlib.nullcontext()
    if moment is not None and mesh.rank == whom:
        owner, name, call, _ = MOMENTS[moment]
        here = signalled(owner, name, call, number)
    Metrics._open_board = lambda self: None  # type: ignore[method-assign]  # seconds, only to be imported
    with (
        StopFlag() as stop,
        here,
        mock.patch("meshwright.train.progress.Progress.message", lambda _, text: said.append(text)),
    ):
        try:
            code: int | str = Loop(run, mesh, stop, quiet=False).run()
        except StoppedEarlyError as early:
            code = f"early {early.signal}"
        mesh.world_group.barrier("end")
    return code, said


def metrics(folder: Path) -> list[tuple[int, str, float]]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return sorted((line["step"], line["split"], line["loss"]) for line in lines if line["split"] != "checkpoint")


@pytest.fixture(scope="module")
def quiet(ranks, tmp_path_factory):
    """The run that nobody disturbs: its parameters and its metrics."""
    folder = tmp_path_factory.mktemp("quiet")
    (folder / "text.txt").write_text("".join(f"line {i}: {i * i}\n" for i in range(400)))
    ranks.run(2, life, run_of(), folder, None, 0, 0)
    return checkpoint.load(folders.path(folder / "run" / "checkpoints", STEPS))[0], metrics(folder)


@pytest.mark.parametrize(
    ("moment", "zero"), [*((moment, 0) for moment in MOMENTS), ("validation", 3), ("a save in the background", 3)]
)
def test_one_rank_is_told_and_all_save_and_leave(moment, zero, folder, ranks, quiet):
    """The signal comes to rank 1 alone; the same command then ends with the numbers of the quiet run."""
    run = run_of(f"layout.zero={zero}")
    told = ranks.run(2, life, run, folder, moment, 1, signal.SIGTERM)
    step = MOMENTS[moment][3]
    saved = folder / "run" / "checkpoints"
    if step == EARLY:
        assert [code for code, _ in told] == ["early 15"] * 2
        assert not saved.exists() or folders.steps(saved) == []
        assert any("stopped before the first step" in line for line in told[0][1])
        return
    assert [code for code, _ in told] == [143] * 2
    newest = checkpoint.newest(saved).step
    assert newest is not None
    assert newest == step or (step < newest and "background" in moment), "at the first point that all can leave at"
    assert f"stopped after step {newest}, as asked" in told[0][1][-1]
    if zero == 0:  # of another stage the numbers are others in the last bits
        assert [code for code, _ in ranks.run(2, life, run, folder, None, 0, 0)] == [0, 0]
        parameters, lines = quiet
        ours = checkpoint.load(folders.path(saved, STEPS))[0]
        assert all(torch.equal(ours[name], parameters[name]) for name in parameters)
        assert metrics(folder) == lines, "every step and every validation once, whatever was broken off"


def test_an_interrupt_is_told_from_a_termination(folder, ranks):
    codes = [code for code, _ in ranks.run(2, life, run_of(), folder, "the first step", 0, signal.SIGINT)]
    assert codes == [130, 130]
    codes = [code for code, _ in ranks.run(2, life, run_of(), folder, "the model is built", 0, signal.SIGINT)]
    assert codes == ["early 2"] * 2
