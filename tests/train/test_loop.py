"""One run's life in the ranks: what a run that goes on remembers, and which checkpoint it goes on from."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest
import torch

from meshwright.comm.blackbox import BlackBox, read
from meshwright.predict.flops import model_flops
from meshwright.spec.errors import RunError, UserError
from meshwright.spec.load import load_run
from meshwright.spec.run import RunSpec
from meshwright.train import checkpoint, folders, tensorfile
from meshwright.train.folders import check_resume
from meshwright.train.loop import Loop
from meshwright.train.postmortem import doing
from meshwright.train.signals import StopFlag
from meshwright.train.state import Counts
from meshwright.train.trainer import Totals, Trainer, Update
from train.commands import last_words

FIELDS = [
    "model={layers: 1, hidden: 16, heads: 2, kv_heads: 1, ffn: 24}",
    "data={path: text.txt, seq_len: 16}",
    "batch={sequences: 6, micro: 2}",
    "validation.every=0",
    "lr_schedule.warmup=0",
    "layout.dp=2",
    "checkpoint.every=1",
    "out=run",
]


def run_of(*fields: str) -> RunSpec:
    return load_run(None, [*FIELDS, *fields])


def life(mesh, run: RunSpec, folder: Path) -> tuple[int | str, Counts, list[str]]:
    """The run's exit code or its error in words, what it counted, and what rank 0 said."""
    os.chdir(folder)
    with StopFlag() as stop:
        loop = Loop(run, mesh, stop, quiet=False)
        said: list[str] = []
        loop.progress.message = said.append
        try:
            return loop.run(), loop.counts, said
        except RunError as error:
            return str(error), loop.counts, said


def test_a_run_that_goes_on_counts_its_skips_on(folder, ranks):
    """Step 1 makes the weights useless, steps 2 and 3 are skipped; with step 4, after a resume, it is too much."""
    diverges = ("optimizer.lr=1e30", "max_skips=2")
    (code, counts, _), _ = ranks.run(2, life, run_of(*diverges, "steps=3"), folder)
    assert (code, counts.skipped, counts.skipped_in_a_row) == (0, 2, 2)
    for error, again, _ in ranks.run(2, life, run_of(*diverges, "steps=50"), folder):
        assert "step 4: " in error and "not finite in 3 steps in a row (max_skips=2)" in error
        assert again.skipped == 3 and again.tokens > counts.tokens


def test_weights_that_did_not_change_are_not_saved_again(folder, ranks):
    """Steps 2 and 3 are skipped: step 2 is not due, being step 1 again; the last step always is."""
    (code, _, said), _ = ranks.run(2, life, run_of("optimizer.lr=1e30", "steps=3", "checkpoint.keep=9"), folder)
    assert code == 0 and any("step 2 skipped" in line for line in said)
    assert folders.steps(folder / "run" / "checkpoints") == [1, 3]
    (code, counts, _), _ = ranks.run(2, life, run_of("steps=5", "max_skips=9", "checkpoint.keep=9"), folder)
    assert (code, counts.skipped) == (0, 4)
    assert folders.steps(folder / "run" / "checkpoints") == [1, 3, 5]


def spoilt(mesh, run: RunSpec, folder: Path, step: int, rank: int) -> tuple[int | str, Counts, list[str]]:
    """The same, with a weight that is not finite after `step` on `rank`."""
    update = Trainer.update

    def spoil(self: Trainer, now: int, totals: Totals) -> Update:
        done = update(self, now, totals)
        if now + 1 == step and self.mesh.rank == rank:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[3] = float("nan")
        return done

    Trainer.update = spoil
    try:
        return life(mesh, run, folder)
    finally:
        Trainer.update = update


def test_weights_that_are_not_finite_are_not_saved(folder, ranks):
    (error, _, said), _ = ranks.run(2, spoilt, run_of("steps=3"), folder, 3, 0)
    assert error == (
        "step 3: model/model.embed_tokens.weight is not finite, so it is not saved; run/checkpoints has steps 1, 2 "
        "still; give the same command again with a lower optimizer.lr or a longer lr_schedule.warmup"
    )
    assert checkpoint.newest(folder / "run" / "checkpoints").step == 2
    assert not any("step 3: saved" in line for line in said)


def unsaved(mesh, run: RunSpec, folder: Path, fails: list[int], who: int) -> tuple[int | str, Counts, list[str]]:
    """The same on a disk that is full for `who` at the steps `fails`, in the middle of a file."""
    write = tensorfile.write

    def full(path: Path, *args: object) -> object:
        if mesh.rank == who and any(f"step-{step:08d}" in str(path) for step in fails):
            path.write_bytes(b"partial")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *args)

    tensorfile.write = full
    try:
        return life(mesh, run, folder)
    finally:
        tensorfile.write = write


def slow_copies(mesh, run: RunSpec, folder: Path) -> int | str:
    """The same where copying takes longer than a step."""
    copy = checkpoint.Saver._copy

    def slowly(self: checkpoint.Saver) -> None:
        time.sleep(0.2)
        copy(self)

    checkpoint.Saver._copy = slowly
    try:
        return life(mesh, run, folder)[0]
    finally:
        checkpoint.Saver._copy = copy


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_step_updates_nothing_that_is_still_being_copied(folder, ranks, zero):
    """Copied slowly, or not at all while training waits: what is saved after each step is the same."""
    options = (f"layout.zero={zero}", "steps=3", "checkpoint.keep=9")
    assert ranks.run(2, slow_copies, run_of(*options), folder) == [0, 0]
    (code, _, _), _ = ranks.run(2, life, run_of(*options, "out=waits", "checkpoint.background=false"), folder)
    assert code == 0
    for step in (1, 2, 3):
        ours, theirs = (checkpoint.load(folders.path(Path(out, "checkpoints"), step))[0] for out in ("run", "waits"))
        assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items()), step


@pytest.mark.parametrize("background", ["true", "false"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_run_whose_last_save_failed_has_failed(folder, ranks, who, background):
    """Training goes on with all ranks, loudly; nothing partial is left."""
    options = (f"checkpoint.background={background}",)
    (code, _, said), (other, *_) = ranks.run(2, unsaved, run_of("steps=3", *options), folder, [2], who)
    assert (code, other) == (0, 0)
    (told,) = [line for line in said if "warning" in line]
    assert told.startswith("warning: checkpoint of step 2 failed: run/checkpoints/step-00000002 could not be written: ")
    assert "No space left on device" in told
    assert sorted(os.listdir("run/checkpoints")) == ["latest", "step-00000001", "step-00000003"]
    for error, _, _ in ranks.run(2, unsaved, run_of("steps=5", *options), folder, [5], who):
        assert error.startswith("all steps are done, but the last checkpoint is missing: run/checkpoints/step-00000005")
        assert error.endswith("; run/checkpoints has steps 3, 4 still; mend that and give the same command again")
    assert sorted(os.listdir("run/checkpoints")) == ["latest", "step-00000003", "step-00000004"]


@pytest.mark.parametrize(("every", "said"), [(1, "run/checkpoints"), (0, "none, as checkpoint.every=0 asks")])
def test_the_farewell_names_only_checkpoints_that_are_there(folder, ranks, every, said):
    (out,) = ranks.run(1, last_words, run_of("steps=1", f"checkpoint.every={every}", "layout.dp=1"), folder)
    assert f"checkpoints     {said}\n" in out


def notes(mesh, run: RunSpec, folder: Path) -> list[str]:
    """What the black box says as each step is counted."""
    os.chdir(folder)
    mesh.blackbox = BlackBox("box")
    found = []
    count = Loop._count
    with StopFlag() as stop:
        loop = Loop(run, mesh, stop, quiet=True)
        loop._count = lambda *args: (found.append(read("box")), count(loop, *args))
        loop.run()
    return [doing(record) for record in found]


def test_a_step_is_not_taken_for_what_came_before_it(folder, ranks):
    """A single rank has no collectives, by which notes are known to be old."""
    (found,) = ranks.run(1, notes, run_of("steps=2", "layout.dp=1"), folder)
    assert found == ["at step 1, computing", "at step 2, computing"]


def damage(step: int, rank: int = 1) -> None:
    file = folders.path(Path("run/checkpoints"), step) / f"rank-0000{rank}.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def test_damaged_checkpoints_never_begin_a_run_anew_unasked(folder, ranks):
    ranks.run(2, life, run_of("steps=3"), folder)
    damage(3)
    (_, _, said), _ = ranks.run(2, life, run_of("steps=3"), folder)
    assert any("passed over a checkpoint that is not whole: run/checkpoints/step-00000003" in line for line in said)
    assert any("resumed after step 2" in line for line in said)
    damage(2)
    damage(3)
    first, _ = ranks.attempt(2, life, run_of("steps=3"), folder)
    assert UserError.__name__ in first.error
    for words in (
        "none of the checkpoints in run/checkpoints is whole",
        "step-00000003/rank-00001.safetensors is damaged: its checksum",
        "step-00000002/rank-00001.safetensors is damaged: its checksum",
        "put one back from a backup, or write checkpoint.resume=never to begin anew",
    ):
        assert words in first.error
    assert folders.steps(folder / "run" / "checkpoints") == [2, 3]
    (code, _, _), _ = ranks.run(2, life, run_of("steps=1", "checkpoint.resume=never"), folder)
    assert code == 0
    assert {path.name for path in (folder / "run" / "checkpoints").iterdir()} == {
        "latest", "step-00000001", "superseded-step-00000002", "superseded-step-00000003",
        "superseded-step-00000003-2",
    }  # fmt: skip


@pytest.mark.parametrize("zero", [0, 3])
def test_what_one_rank_alone_cannot_read_is_passed_over_by_all(folder, ranks, zero):
    """At stage 3 nobody else reads that file; and then one that only a look at the manifest finds, and an old one."""
    options = (f"layout.zero={zero}", "steps=4", "checkpoint.keep=9")
    ranks.run(2, life, run_of(*options), folder)
    before = checkpoint.load(Path("run/checkpoints/step-00000001"))[0]
    damage(3)
    os.remove("run/checkpoints/step-00000004/rank-00000.safetensors")
    os.rename("run/checkpoints/step-00000002/manifest.json", "run/checkpoints/step-00000002/meta.json")
    ends = ranks.run(2, life, run_of(*options, "checkpoint.every=0"), folder)
    assert [end[0] for end in ends] == [0, 0]
    said = ends[0][2]
    passed = [line for line in said if "passed over" in line]
    at = "run/checkpoints/step-0000000"
    assert len(passed) == 3
    assert f"{at}4/rank-00000.safetensors is missing" in passed[0]
    assert f"{at}3/rank-00001.safetensors is damaged: its checksum" in passed[1]
    assert ("as rank 1 sees it" in passed[1]) == (zero == 3)
    assert f"{at}2 is of an older release" in passed[2]
    assert any("resumed after step 1" in line for line in said)
    assert folders.steps(Path("run/checkpoints")) == [1]
    assert all(torch.equal(before[n], t) for n, t in checkpoint.load(Path("run/checkpoints/step-00000001"))[0].items())


def test_a_step_asked_for_by_number_is_not_passed_over(folder, ranks):
    ranks.run(2, life, run_of("steps=3", "checkpoint.keep=9"), folder)
    damage(3)
    for error, _, said in ranks.run(2, life, run_of("steps=4", "checkpoint.keep=9", "checkpoint.resume=3"), folder):
        assert "step-00000003/rank-00001.safetensors is damaged" in error
        assert "steps 1 and 2 look whole: write checkpoint.resume=2, say, or auto for the newest that is" in error
        assert not any("resumed" in line for line in said)
    os.remove("run/checkpoints/step-00000001/manifest.json")
    for error, _, _ in ranks.run(2, life, run_of("steps=4", "checkpoint.keep=9", "checkpoint.resume=3"), folder):
        assert "step 2 looks whole: write checkpoint.resume=2, or auto for" in error
    (code, _, said), _ = ranks.run(2, life, run_of("steps=4", "checkpoint.keep=9", "checkpoint.resume=2"), folder)
    assert code == 0 and any("resumed after step 2" in line for line in said)
    for step in folders.steps(Path("run/checkpoints")):
        damage(step)
        os.truncate(folders.path(Path("run/checkpoints"), step) / "rank-00000.safetensors", 9)
    for error, _, _ in ranks.run(2, life, run_of("steps=4", "checkpoint.keep=9", "checkpoint.resume=4"), folder):
        assert "no other that looks whole; put it back from a backup, or write checkpoint.resume=never" in error


def test_a_run_without_a_checkpoint_says_that_it_starts_fresh(folder, ranks):
    (_, _, said), _ = ranks.run(2, life, run_of("steps=1"), folder)
    assert "starting fresh: no checkpoint in run/checkpoints" in said


def test_a_checkpoint_that_was_renamed_is_not_taken_for_another_step(folder, ranks):
    ranks.run(2, life, run_of("steps=2"), folder)
    os.rename("run/checkpoints/step-00000002", "run/checkpoints/step-00000009")
    (_, _, said), _ = ranks.run(2, life, run_of("steps=3"), folder)
    assert any("step-00000009 holds step 2" in line for line in said)
    assert any("resumed after step 1" in line for line in said)


def test_a_run_that_goes_on_with_another_text_says_so(folder, ranks):
    ranks.run(2, life, run_of("steps=1"), folder)
    (_, _, said), _ = ranks.run(2, life, run_of("steps=2"), folder)
    assert not [line for line in said if "changed" in line and "steps" not in line]
    with open("text.txt", "a") as text:
        text.write("one more line\n")
    (_, _, said), _ = ranks.run(2, life, run_of("steps=3"), folder)
    assert any(line.startswith("changed since that checkpoint: the files of data.path") for line in said)


def test_a_step_to_go_on_from_must_be_there(folder):
    with pytest.raises(
        UserError, match=r"run/checkpoints has no checkpoint of step 99, and none of any other; use auto"
    ):
        check_resume(run_of("checkpoint.resume=99"))
    for name in ("step-00000025", "former-step-00000050", "superseded-step-00000099", ".saving-1-step-00000099"):
        (folder / "run" / "checkpoints" / name).mkdir(parents=True)
    for fine in ("25", "50", "auto", "never"):
        check_resume(run_of(f"checkpoint.resume={fine}"))
    with pytest.raises(UserError, match=r"checkpoint.resume=99: .*, only of 25, 50; name one of these, or auto"):
        check_resume(run_of("checkpoint.resume=99"))


def test_documents_are_counted_and_utilisation_is_theirs(folder, ranks):
    """Sixty texts of 5 tokens and a separator; attention inside such is less than over sequences of 16."""
    shelf = folder / "shelf"
    shelf.mkdir()
    for index in range(60):
        (shelf / f"{index}.txt").write_text(f"{index:05}")
    packed = ("data={path: shelf, seq_len: 16, packing: documents, held_out: 0}", "steps=1", "checkpoint.every=0")
    (code, counts, said), _ = ranks.run(2, life, run_of(*packed), folder)
    assert code == 0 and "packing: the training tokens of shelf are 60 documents" in said
    assert 6 * 16 * 3 // 4 < counts.tokens < 6 * 16  # two or three of a sequence's tokens end documents
    figures = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[0])
    rate = figures["tokens_per_second_per_device"] / figures["assumed_peak_flops"]
    model = run_of(*packed).model
    assert 0 < figures["model_flops_utilisation"] < rate * model_flops(model, seq=16)
    assert figures["model_flops_utilisation"] > rate * model_flops(model, seq=1)
    one = ("data={path: text.txt, seq_len: 16, packing: documents}", "steps=1", "out=other")
    (_, _, said), _ = ranks.run(2, life, run_of(*one), folder)
    assert "packing: the training tokens of text.txt are one document: nothing in them is kept apart" in said
