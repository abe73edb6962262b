"""The life of one rank of a run: start or resume, step after step, validate, save, and leave with an exit code."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from meshwright.comm import runtime
from meshwright.comm.mesh import Mesh
from meshwright.predict.flops import utilisation
from meshwright.spec.context import grain
from meshwright.spec.errors import FailsAgainError, RunError, UserError
from meshwright.spec.exits import OK
from meshwright.spec.load import dump_run
from meshwright.spec.run import RunSpec
from meshwright.spec.words import join
from meshwright.train import attempts, checkpoint, folders, manifestfile, state, tokenfile
from meshwright.train.bigram import bigram_loss
from meshwright.train.data import Dataset
from meshwright.train.folders import check_resume
from meshwright.train.metrics import Metrics
from meshwright.train.peak import Peak, device_peak
from meshwright.train.progress import Progress
from meshwright.train.sample import generate
from meshwright.train.signals import StopFlag
from meshwright.train.stopping import StoppedEarlyError, Stopping
from meshwright.train.together import first_error, prepare_together
from meshwright.train.tracer import Tracer
from meshwright.train.trainer import Totals, Trainer, Update

MOVES_SAMPLES = ("batch.sequences:", "data.seq_len:", "seed:")
"""Options that a step's samples follow from, beside the data: changed, the order is entered at another place."""


def run_rank(run: RunSpec, stop: StopFlag, *, quiet: bool = False) -> int:
    """Train `run` as the rank that this process's environment names; returns the rank's exit code.

    That is 0 also where the ranks stopped because they were asked to: a launcher that knows no better takes any other
    for a failure, and starts anew what was to end. Our own reads it in the black box. Raises UserError and RunError;
    `report.run_guarded` turns them into exit codes.
    """
    device = runtime.pick_device(run.device, runtime.place().local_rank)
    runtime.init(device, run.comm_timeout)
    mesh = Mesh.create(run.layout, device=device, timeout=run.comm_timeout)
    try:
        loop = Loop(run, mesh, stop, quiet)
        code = loop.run()
    except StoppedEarlyError as early:
        code = 128 + early.signal
    else:
        loop.leave(code)
    if code != OK:
        mesh.blackbox.stopped(code - 128, stop.requested or 0)
    runtime.shutdown()
    if code == OK and loop.lead:
        # After the others have been let go: nothing here can keep them waiting.
        mesh.blackbox.note("telling the result")
        loop.farewell()
    return OK


class Loop:
    """One rank's run. Rank 0 alone writes and speaks; what it decides for all it broadcasts."""

    def __init__(self, run: RunSpec, mesh: Mesh, stop: StopFlag, quiet: bool) -> None:
        self.run_spec = run
        self.mesh = mesh
        self.stopping = Stopping(stop, mesh)
        self.folder = Path(run.out)
        self.checkpoints = self.folder / "checkpoints"
        self.lead = mesh.rank == 0
        self.goes_on = self.lead and attempts.goes_on(self.folder)
        self.resume = "auto" if self.goes_on else run.checkpoint.resume
        self.progress = Progress(run.steps, quiet=quiet, lead=self.lead)
        mesh.blackbox.note("preparing data")
        self.prepared = prepare_together(run, mesh.world_group, mesh.device, self.progress.message)
        self.data = Dataset(self.prepared.train, run.data.seq_len, run.seed, self.prepared.train_documents)
        self.held_out = self._held_out()
        self._check_stop()
        mesh.blackbox.note("building the model")
        self.trainer = Trainer(run, mesh)
        options = run.checkpoint
        self.saver = checkpoint.Saver(
            self.checkpoints, mesh, state.saved_parts(self.trainer),
            keep=options.keep, keep_every=options.keep_every, background=options.background,
        )  # fmt: skip
        self.peak: Peak = device_peak(mesh.device, run.precision)
        self.counts = state.Counts()
        self.tracer = Tracer(run, mesh, self.progress)
        self.validation_loss: float | None = None
        self.sample: str | None = None
        self.saved_step = -1  # of the checkpoint that was begun last
        self.saved_updates = 0  # updates in the weights that were saved last, or that this run began with
        self.not_saved: RunError | None = None  # why the last save failed, where it did

    # -- start ------------------------------------------------------------------------------------------------

    def _check_stop(self) -> None:
        try:
            self.stopping.check()
        except StoppedEarlyError:
            self.progress.message("stopped before the first step, as asked; there was nothing to save")
            raise

    def _held_out(self) -> Dataset | None:
        if self.prepared.held_out is None or not self.run_spec.validation.every:
            return None
        run, prepared = self.run_spec, self.prepared
        assert prepared.held_out is not None
        return Dataset(prepared.held_out, run.data.seq_len, run.seed, prepared.held_out_documents)

    def _resume(self) -> int:
        """The step to begin with: 0, or that of the checkpoint that the ranks go on from."""
        skipped: list[str] = []
        before: int | None = None
        while True:
            chosen = torch.tensor([-1], dtype=torch.int64, device=self.mesh.device)
            if self.lead:
                chosen[0] = self._choose_checkpoint(before, skipped)
                if chosen[0] < 0:
                    self._set_aside(after=-1)
            self.mesh.world_group.broadcast(chosen, 0, reason="checkpoint.choose", phase="step")
            step = int(chosen)
            if step < 0:
                return 0
            wrong = self._load(folders.path(self.checkpoints, step))
            if wrong is None:
                return step
            if self.resume != "auto":
                raise FailsAgainError(f"{wrong}; {self._others(step)}")
            before = step
            skipped.append(wrong)
            self._warn_passed_over(wrong)

    def _load(self, where: Path) -> str | None:
        """Take over the checkpoint in `where`; returns in words what is wrong with it, on all ranks alike, or None."""
        world, device = self.mesh.world_group, self.mesh.device
        self.mesh.blackbox.note("reading a checkpoint")
        found, error = None, None
        try:
            found = checkpoint.manifest_of(where)
        except RunError as exc:
            error = exc
        wrong = first_error(world, device, error)
        if wrong is not None:
            return wrong
        assert found is not None
        state.check_fits(self.trainer, found)
        try:
            checkpoint.read(where, state.held_parts(self.trainer), found)
        except RunError as exc:
            error = exc
        wrong = first_error(world, device, error)
        if wrong is None:
            self._take_over(where, found.meta)
        return wrong

    def _take_over(self, where: Path, about: dict[str, Any]) -> None:
        state.restored(self.trainer, about)
        step = int(about["step"])
        self._set_aside(after=step)
        self.counts = state.Counts.of(about)
        self.saved_step, self.saved_updates = step, self.trainer.optimizer.steps
        if source := about.get("imported"):
            self.progress.message(f"begins with the weights of {source}")
            return  # nobody has chosen the options of that checkpoint, and none of the data is used
        self.progress.message(f"resumed after step {step} from {where.parent}")
        changes = state.changed_options(self.run_spec, about)
        if about.get("data", self.prepared.key) != self.prepared.key:
            changes.append("the files of data.path, by name, size or time; the samples to come may be others")
        if any(change.startswith(MOVES_SAMPLES) for change in changes):
            changes.append("which samples a step takes: some may come twice, or not in this epoch")
        for change in changes:
            self.progress.message(f"changed since that checkpoint: {change}")

    def _choose_checkpoint(self, before: int | None, skipped: list[str]) -> int:
        """The step of the checkpoint to go on from, below `before`, -1 for none; rank 0 decides for all.

        skipped: in words, what has been passed over so far; what is passed over here is added.
        """
        resume = self.resume
        if not self.goes_on:
            check_resume(self.run_spec)
        if resume == "never":
            return -1
        if resume != "auto":
            return resume
        newest = checkpoint.newest(self.checkpoints, before)
        skipped += newest.skipped
        if newest.step is None and skipped:
            # To begin anew would lose what the run has learned, where a backup may yet save it.
            wrong = "".join(f"\n  {one}" for one in skipped)
            raise UserError(
                f"out: none of the checkpoints in {self.checkpoints} is whole; put one back from a backup, or write "
                f"checkpoint.resume=never to begin anew (they are kept, set aside){wrong}"
            )
        for one in newest.skipped:
            self._warn_passed_over(one)
        if newest.step is None:
            self.progress.message(f"starting fresh: no checkpoint in {self.checkpoints}")
            return -1
        return newest.step

    def _others(self, damaged: int) -> str:
        """What to do where the checkpoint that was asked for by number is damaged."""
        others = [step for step in folders.steps(self.checkpoints) if step != damaged]
        whole = [step for step in others if manifestfile.looks_whole(folders.path(self.checkpoints, step))]
        if not whole:
            return (
                "there is no other that looks whole; put it back from a backup, or write checkpoint.resume=never to "
                "begin anew (what is there is kept, set aside)"
            )
        which = f"step {whole[0]} looks" if len(whole) == 1 else f"steps {join(list(map(str, whole)), 'and')} look"
        return (
            f"{which} whole: write checkpoint.resume={whole[-1]}{', say' if len(whole) > 1 else ''}, or auto for the "
            "newest that is, or put this one back from a backup"
        )

    def _warn_passed_over(self, wrong: str) -> None:
        self.progress.message(f"warning: passed over a checkpoint that is not whole: {wrong}")

    def _set_aside(self, after: int) -> None:
        """Keep checkpoints that this run does not go on from out of its way; none is removed."""
        if self.lead:
            for step in folders.set_aside(self.checkpoints, after):
                self.progress.message(f"set aside the checkpoint of step {step}, which this run does not go on from")

    # -- steps ------------------------------------------------------------------------------------------------

    def run(self) -> int:
        self._check_stop()  # a large model takes its time to be built, and a checkpoint to be read
        start = self._resume()
        self._check_stop()
        with (
            Metrics(
                self.folder, enabled=self.lead, start=start, again=self.goes_on, warn=self.progress.message
            ) as self.metrics,
            self.progress,
        ):
            self._write_run()
            self._tell_restart(start)
            self._tell_documents()
            if start >= self.run_spec.steps:
                self.progress.message(f"nothing to do: step {start} of {self.run_spec.steps} is reached; raise steps")
            return self._steps(start)

    def _tell_restart(self, start: int) -> None:
        restart = attempts.restart()
        if not self.lead or restart is None:
            return
        lost = "" if restart.seconds is None else f", {restart.seconds:.1f} s after the ranks before have ended"
        self.progress.message(f"warning: restart {restart.count}: goes on after step {start}{lost}")
        self.metrics.write(start, "restart", {"restarts": restart.count, "seconds": restart.seconds})

    def _tell_documents(self) -> None:
        if self.prepared.train_documents is None:
            return
        number, path = tokenfile.length(self.prepared.train_documents), self.run_spec.data.path
        what = f"are {number:,} documents" if number > 1 else "are one document: nothing in them is kept apart"
        self.progress.message(f"packing: the training tokens of {path} {what}")

    def _steps(self, start: int) -> int:
        if self._lacks_validation(start) and self._validate(start):
            return self._stopped(start)
        self.tracer.plan(start)
        for step in range(start, self.run_spec.steps):
            self.tracer.begin(step + 1)
            began, blocked = time.perf_counter(), self.mesh.ledger.blocked_seconds
            self.mesh.blackbox.step = step + 1
            self.mesh.blackbox.note("computing")  # where no collective follows, an older note would stand
            totals = self.trainer.accumulate(self.data, step, self.stopping.value)
            self.saver.copied()  # before what is being saved changes
            update = self.trainer.update(step, totals)
            self._count(step, totals, update)
            seconds = time.perf_counter() - began
            self.tracer.end(step + 1)
            self._record(step + 1, totals, update, seconds, self.mesh.ledger.blocked_seconds - blocked)
            self._tell(self.saver.poll())
            self.tracer.write_after(step + 1, self.metrics)
            if self.stopping.heard(totals.stop):
                return self._stopped(step + 1)
            self._save(step + 1)
            if self._validation_due(step + 1) and self._validate(step + 1):
                return self._stopped(step + 1)
        self._tell(self.saver.wait())
        if self.not_saved is not None:
            raise RunError(
                f"all steps are done, but the last checkpoint is missing: {self.not_saved}; {self._kept()}; "
                "mend that and give the same command again"
            )
        if self.stopping.ask():  # the last time that it makes a difference
            return self._stopped(self.run_spec.steps)
        return OK

    def _stopped(self, step: int) -> int:
        """Save `step`, unless it is saved, and end; returns the command's exit code."""
        self._save(step, stopping=True)
        self.tracer.write_after(step, self.metrics, stopping=True)
        rest = "the same command goes on from here" if step < self.run_spec.steps else "it was the last"
        self.progress.message(f"stopped after step {step}, as asked; {rest}")
        assert self.stopping.signal is not None
        return 128 + self.stopping.signal

    def _count(self, step: int, totals: Totals, update: Update) -> None:
        counts = self.counts
        counts.tokens += totals.tokens
        if not update.skipped:
            counts.skipped_in_a_row = 0
            return
        counts.skipped += 1
        if update.overflow:
            # Looking for the largest loss scale that does is part of float16, and no reason to stop.
            self.progress.message(f"step {step + 1} skipped: loss scale lowered to {self.trainer.scale.value:g}")
            return
        counts.skipped_in_a_row += 1
        what = "loss" if totals.loss != totals.loss or abs(totals.loss) == float("inf") else "gradient"
        self.progress.message(f"warning: step {step + 1} skipped on all ranks: the {what} is not finite")
        if counts.skipped_in_a_row > self.run_spec.max_skips:
            raise FailsAgainError(
                f"step {step + 1}: the {what} was not finite in {counts.skipped_in_a_row} steps in a row "
                f"(max_skips={self.run_spec.max_skips}); a lower optimizer.lr or a longer lr_schedule.warmup may help"
            )

    def _record(self, step: int, totals: Totals, update: Update, seconds: float, blocked: float) -> None:
        rate = totals.tokens / seconds
        per_device = rate / self.mesh.world
        self.progress.step(step, totals.loss, rate)
        self.metrics.write(
            step,
            "train",
            {
                "loss": totals.loss,
                "grad_norm": update.grad_norm,
                "lr": update.lr,
                "tokens": self.counts.tokens,
                "tokens_per_second_per_device": per_device,
                "model_flops_utilisation": utilisation(
                    self.run_spec.model, self.run_spec.data.seq_len, per_device, self.peak.flops, self._lengths(step)
                ),
                "assumed_peak_flops": self.peak.flops,
                "seconds": seconds,
                "seconds_in_communication": blocked,
                "skipped": self.counts.skipped,
                "loss_scale": totals.scale,
            },
        )

    def _lengths(self, step: int) -> Counter[int] | None:
        """With packing: how many documents of each length the sequences of `step` (from 1) were made of."""
        if self.prepared.train_documents is None or not self.lead:
            return None
        ids = self.data.ids(step - 1, self.run_spec.batch.sequences).tolist()
        return Counter(length for sample in ids for length in self.data.lengths(sample).tolist())

    def _validation_due(self, step: int) -> bool:
        every = self.run_spec.validation.every
        return self.held_out is not None and (step % every == 0 or step == self.run_spec.steps)

    def _lacks_validation(self, start: int) -> bool:
        """Whether the run ended between saving `start` and validating it, and has to do the latter now."""
        if not start or not self._validation_due(start):
            return False
        lacks = torch.tensor([self.metrics.last.get("validation", 0) < start], device=self.mesh.device).long()
        self.mesh.world_group.broadcast(lacks, 0, reason="validation.due", phase="step")
        return bool(lacks)

    def _validate(self, step: int) -> bool:
        """Score the held-out text; returns whether a stop was asked for meanwhile, for which it is broken off."""
        assert self.held_out is not None
        self.mesh.blackbox.note("validation")
        ids = self.held_out.spread(self.run_spec.validation.sequences)
        totals = self.trainer.evaluate(self.held_out, ids, self.stopping.value)
        if self.stopping.heard(totals.stop):
            return True
        self.validation_loss = totals.loss
        self.progress.message(f"step {step}: validation loss {self.validation_loss:.4f}")
        self.metrics.write(step, "validation", {"loss": self.validation_loss})
        return False

    def _save(self, step: int, stopping: bool = False) -> None:
        options = self.run_spec.checkpoint
        if step == self.saved_step and self.not_saved is None:
            if stopping:
                self._tell(self.saver.wait(), stopping)
            return
        if not options.every and not stopping:
            return
        due = stopping or step == self.run_spec.steps or (options.every and step % options.every == 0)
        if not due:
            return
        updates = self.trainer.optimizer.steps
        if updates == self.saved_updates and not stopping and step != self.run_spec.steps:
            return  # steps were skipped: the same weights once more would only push out the checkpoint of others
        self.saved_step, self.saved_updates = step, updates
        self.mesh.blackbox.note("beginning a checkpoint")
        about = state.meta(self.trainer, step, self.counts) | {"data": self.prepared.key}
        self.trainer.sharded.settle()  # where a rank's shard is a part of the whole, gathers still write to it
        self._tell(self.saver.save(step, about, background=not stopping))
        if stopping or not options.background:
            self._tell(self.saver.wait(), stopping)

    def _tell(self, saved: checkpoint.Saved | None, stopping: bool = False) -> None:
        """Say how a save ended, if one did. All ranks know the same of it, though not at the same moment."""
        if saved is None:
            return
        error = saved.error
        if isinstance(error, checkpoint.NotFinite):
            raise FailsAgainError(
                f"step {saved.step}: {error}, so it is not saved; {self._kept()}; give the same command again with a "
                "lower optimizer.lr or a longer lr_schedule.warmup"
            ) from error
        self.not_saved = error
        if error is not None:
            # Training is worth more than this one save; the last whole checkpoint is still there.
            self.progress.message(f"warning: checkpoint of step {saved.step} failed: {error}")
            if stopping:
                raise error
            return
        self.progress.message(f"step {saved.step}: saved {saved.where}; training waited {saved.stall:.2f} s for it")
        if saved.but is not None:
            self.progress.message(f"warning: {saved.but}")
        figures = {"seconds": saved.seconds, "stall": saved.stall}
        self.metrics.write(saved.step, "checkpoint", figures)

    def leave(self, code: int) -> None:
        """What needs the other ranks at the end: updates under way, and a sample where no rank has a whole model."""
        self.trainer.sharded.settle()
        if code == OK and not self.trainer.alone and self.run_spec.model.causal:
            self.mesh.blackbox.note("writing a sample")
            self.sample = self._sample()

    def _kept(self) -> str:
        there = folders.steps(self.checkpoints)
        if not there:
            return f"there is none in {self.checkpoints}"
        return f"{self.checkpoints} has step{'s' * (len(there) > 1)} {', '.join(map(str, there))} still"

    # -- end --------------------------------------------------------------------------------------------------

    def _write_run(self) -> None:
        if not self.lead:
            return
        try:
            attempts.begin(self.folder)
        except OSError as error:
            self.progress.message(f"warning: {self.folder / attempts.FILE} could not be written: {error}")
        draft = self.folder / "run.yaml.tmp"
        try:
            draft.write_text(dump_run(self.run_spec), encoding="utf-8")
            draft.replace(self.folder / "run.yaml")
        except OSError as error:
            self.progress.message(f"warning: {self.folder / 'run.yaml'} could not be written: {error}")

    def farewell(self) -> None:
        """What a person wants to see at the end: the losses beside a baseline, a sample, and where things are."""
        lines: list[str] = []
        if self.validation_loss is not None and self.held_out is not None and self.prepared.held_out is not None:
            lines.append(f"validation loss {self.validation_loss:.4f} nats a token")
            data, samples = self.run_spec.data, self.held_out.spread(self.run_spec.validation.sequences).tolist()
            begins = self.prepared.train_documents, self.prepared.held_out_documents
            baseline = bigram_loss(
                self.prepared.train, self.prepared.held_out, self.run_spec.model.vocab,
                samples=samples, seq_len=data.seq_len, documents=begins if begins[0] and begins[1] else None,
            )  # fmt: skip
            if baseline is not None:
                lines.append(f"bigrams         {baseline:.4f} on the same held-out text, counted on the training text")
        if self.run_spec.model.causal:
            lines += ["sample:", self._sample() if self.sample is None else self.sample]
        where = self.checkpoints if folders.steps(self.checkpoints) else "none, as checkpoint.every=0 asks"
        lines.append(f"checkpoints     {where}")
        if self.tracer.written is not None:
            lines.append(f"trace           {self.tracer.written} (for ui.perfetto.dev)")
        lines.append(f"metrics         {self.folder / 'metrics.jsonl'} (and for TensorBoard in {self.folder})")
        try:
            print("\n".join(lines), file=sys.stdout, flush=True)
        except BrokenPipeError:
            raise  # a reader that had enough
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise RunError(f"all steps are done, but standard output cannot be written: {why}") from None

    def _sample(self, length: int = 200) -> str:
        prompt = self.prepared.encode("def ")
        try:
            ids = generate(
                self.trainer.model, prompt, length, temperature=0.8, seed=self.run_spec.seed,
                multiple=grain(self.run_spec.layout), logits=self.trainer.logits,
            )  # fmt: skip
        except RunError as error:
            return f"none: {error}"
        return self.prepared.decode(ids)
