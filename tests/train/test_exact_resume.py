"""Stopped at any step and gone on, a run is the run that nobody disturbed: samples, rates, losses, weights, moments."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from meshwright.spec.load import load_run
from meshwright.spec.run import RunSpec
from meshwright.train import checkpoint, folders, lossscale
from meshwright.train import loop as loops
from meshwright.train.loop import Loop
from meshwright.train.peak import Peak
from meshwright.train.signals import StopFlag

STEPS = 10  # of 5 samples each: 2.5 epochs of 20, so that one epoch ends within a step's and one within a run's
FIELDS = [
    "model={layers: 1, hidden: 16, heads: 2, kv_heads: 1, ffn: 24}",
    "data={path: text.txt, seq_len: 16, held_out: 0}",
    "batch={sequences: 5, micro: 2}",
    "validation.every=0",
    "lr_schedule.warmup=3",
    "checkpoint.every=100",
    f"steps={STEPS}",
    "out=run",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "".join(f"line {i}: {i * i}\n" for i in range(40))
    (tmp_path / "text.txt").write_text(text[: 16 * 19 + 8])
    return tmp_path


def run_of(*fields: str) -> RunSpec:
    return load_run(None, [*FIELDS, *fields])


def life(mesh, run: RunSpec, stop_after: int | None) -> list[tuple]:
    """Train until `stop_after` steps are done, by a signal to the last rank. What each step used and came to."""
    stop = StopFlag()
    loops.device_peak = lambda *_: Peak(1e12, "a test")  # measuring takes float16 seconds on a CPU
    loop = Loop(run, mesh, stop, quiet=True)
    told: list[tuple] = []
    batch = loop.data.batch
    taken: list[int] = []

    def noted(ids):
        taken.extend(ids.tolist())
        if stop_after == 1 and mesh.rank == mesh.world - 1:  # within the first step; before it, none is made
            stop.requested = signal.SIGINT
        return batch(ids)

    loop.data.batch = noted
    record, scale = loop._count, loop.trainer.scale

    def count(step, totals, update):
        record(step, totals, update)
        norm = repr(update.grad_norm)  # which equals itself though it be no number
        told.append((step, tuple(taken), update.lr, totals.loss, norm, update.skipped, scale.value))
        taken.clear()
        if step + 2 == stop_after and mesh.rank == mesh.world - 1:
            stop.requested = signal.SIGINT

    loop._count = count
    code = loop.run()
    assert code == (0 if stop_after in (None, STEPS) else 130)
    return told


def stopped_everywhere(mesh, run: RunSpec, folder: Path, stops: list[int]) -> tuple[list, dict[int, list]]:
    os.chdir(folder)
    undisturbed = life(mesh, run, None)
    again = {}
    for at in stops:
        mesh.world_group.barrier("test")
        other = run.model_copy(update={"out": f"run-{at}"})
        again[at] = life(mesh, other, at) + life(mesh, other, None)
    return undisturbed, again


def weights(out: str) -> dict[str, torch.Tensor]:
    tensors, meta = checkpoint.load(folders.path(Path(out) / "checkpoints", STEPS))
    assert meta["step"] == STEPS
    return tensors


LAID_OUT = {
    "zero 0": (2, ()),
    "zero 1": (3, ("layout.zero=1",)),
    "zero 2, bf16": (2, ("layout.zero=2", "precision=bf16")),
    "zero 3, fp16": (2, ("layout.zero=3", "precision=fp16")),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("world", "options"), LAID_OUT.values(), ids=LAID_OUT)
def test_stopped_at_any_step(folder, ranks, world, options):
    run = run_of(f"layout.dp={world}", *options)
    for undisturbed, again in ranks.run(world, stopped_everywhere, run, folder, list(range(1, STEPS)), timeout=300):
        assert len(undisturbed) == STEPS and len({lr for _, _, lr, *_ in undisturbed}) > 5
        for at, told in again.items():
            assert told == undisturbed, at
    expected = weights("run")
    for at in range(1, STEPS):
        found = weights(f"run-{at}")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), at


def overflowing(mesh, run: RunSpec, folder: Path) -> tuple[list, list]:
    """With a first scale far too large, so that it moves both before and after the stop."""
    os.chdir(folder)
    ends = []
    for out, stops in (("a", (None,)), ("b", (4, None))):
        told = []
        for number, at in enumerate(stops):
            lossscale.START = 2.0**21 if number == 0 else 2.0**6
            told += life(mesh, run.model_copy(update={"out": out}), at)
        ends.append(told)
    return ends[0], ends[1]


def test_the_loss_scale_survives(folder, ranks):
    run = run_of("layout.dp=2", "precision=fp16", "max_skips=99")
    for whole, again in ranks.run(2, overflowing, run, folder):
        assert again == whole
        assert len({scale for *_, scale in whole}) > 2 and whole[3][-1] != 2.0**6
        assert any(skipped for *_, skipped, _ in whole) and not whole[-1][-2]


def growing(mesh, run: RunSpec, folder: Path) -> tuple[list, list]:
    """With a scale that doubles after every three good steps: the stop is after the fourth, one step into the count."""
    os.chdir(folder)
    lossscale.GROWTH_INTERVAL = 3
    whole = life(mesh, run.model_copy(update={"out": "c"}), None)
    other = run.model_copy(update={"out": "d"})
    return whole, life(mesh, other, 4) + life(mesh, other, None)


def test_good_steps_count_on(folder, ranks):
    run = run_of("layout.dp=2", "precision=fp16")
    for whole, again in ranks.run(2, growing, run, folder):
        assert again == whole
        assert [scale for *_, scale in whole] == [lossscale.START * 2.0 ** (step // 3) for step in range(1, STEPS + 1)]


def go_on(mesh, run: RunSpec, folder: Path, at: int | None) -> list[tuple]:
    os.chdir(folder)
    return life(mesh, run, at)


def samples(ends: list[list[tuple]]) -> dict[int, list[int]]:
    """By step, what all ranks together took."""
    found: dict[int, list[int]] = {}
    for told in ends:
        for step, taken, *_ in told:
            found.setdefault(step, []).extend(taken)
    return found


def test_with_other_data_ranks_the_samples_are_the_same(folder, ranks):
    """dp 3 to 2 to 4 to 1: none lost, none twice, and losses that differ by rounding."""
    reference = ranks.run(3, go_on, run_of("layout.dp=3", "precision=float64", "out=whole"), folder, None)
    expected = samples(reference)
    assert all(len(expected[step]) == 5 for step in range(STEPS))
    taken = [sample for step in range(8) for sample in expected[step]]
    assert sorted(taken) == sorted(list(range(20)) * 2), "two epochs, each sample once in each"
    found: dict[int, list[int]] = {}
    losses: list[float] = []
    for world, zero, at in ((3, 0, 3), (2, 3, 5), (4, 1, 9), (1, 0, None)):
        run = run_of(f"layout.dp={world}", f"layout.zero={zero}", "precision=float64")
        ends = ranks.run(world, go_on, run, folder, at)
        part = samples(ends)
        assert not part.keys() & found.keys()
        found |= part
        losses += [loss for _, _, _, loss, *_ in ends[0]]
    assert found == expected
    assert losses == pytest.approx([loss for _, _, _, loss, *_ in reference[0]], rel=1e-10)
    shutil.rmtree("run")
