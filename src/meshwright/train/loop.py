"""The life of one rank of a run: start or resume, step after step, validate, save, and leave with an exit code."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from meshwright.comm import runtime
from meshwright.comm.mesh import Mesh
from meshwright.predict.flops import utilisation
from meshwright.spec.errors import RunError, UserError
from meshwright.spec.exits import INTERRUPTED, OK, TERMINATED
from meshwright.spec.load import dump_run
from meshwright.spec.run import RunSpec
from meshwright.train import checkpoint, state
from meshwright.train.bigram import bigram_loss
from meshwright.train.data import Dataset
from meshwright.train.folders import check_resume
from meshwright.train.metrics import Metrics
from meshwright.train.peak import Peak, device_peak
from meshwright.train.progress import Progress
from meshwright.train.sample import generate
from meshwright.train.signals import StopFlag
from meshwright.train.together import prepare_together
from meshwright.train.trainer import Totals, Trainer, Update

# Ranks share their stop signals by adding them up: any SIGTERM outweighs every SIGINT.
STOP_VALUES = {signal.SIGINT: 1.0, signal.SIGTERM: 1e6}


def run_rank(run: RunSpec, *, quiet: bool = False) -> int:
    """Train `run` as the rank that this process's environment names; returns the command's exit code.

    Raises UserError and RunError; `report.run_guarded` turns them into exit codes.
    """
    with StopFlag() as stop:
        device = runtime.pick_device(run.device, runtime.place().local_rank)
        runtime.init(device, run.comm_timeout)
        mesh = Mesh.create(run.layout, device=device, timeout=run.comm_timeout)
        loop = Loop(run, mesh, stop, quiet)
        code = loop.run()
        loop.leave(code)
        runtime.shutdown()
        if code == OK and loop.lead:
            # After the others have been let go: nothing here can keep them waiting.
            mesh.blackbox.note("telling the result")
            loop.farewell()
    return code


class Loop:
    """One rank's run. Rank 0 alone writes and speaks; what it decides for all it broadcasts."""

    def __init__(self, run: RunSpec, mesh: Mesh, stop: StopFlag, quiet: bool) -> None:
        self.run_spec = run
        self.mesh = mesh
        self.stop = stop
        self.folder = Path(run.out)
        self.lead = mesh.rank == 0
        self.progress = Progress(run.steps, quiet=quiet, lead=self.lead)
        mesh.blackbox.note("preparing data")
        self.prepared = prepare_together(run, mesh.world_group, mesh.device, self.progress.message)
        self.data = Dataset(self.prepared.train, run.data.seq_len, run.seed)
        self.held_out = self._held_out()
        mesh.blackbox.note("building the model")
        self.trainer = Trainer(run, mesh)
        self.peak: Peak = device_peak(mesh.device, run.precision)
        self.counts = state.Counts()
        self.validation_loss: float | None = None
        self.sample: str | None = None
        self.saved_updates = 0  # updates in the weights that were saved last, or that this run began with
        self.not_saved: checkpoint.CheckpointError | None = None  # rank 0's last save, where that failed

    # -- start ------------------------------------------------------------------------------------------------

    def _held_out(self) -> Dataset | None:
        if self.prepared.held_out is None or not self.run_spec.validation.every:
            return None
        return Dataset(self.prepared.held_out, self.run_spec.data.seq_len, self.run_spec.seed)

    def _resume(self) -> int:
        """The step to begin with: 0, or that of the checkpoint that rank 0 chose for all."""
        chosen = torch.tensor([-1], dtype=torch.int64, device=self.mesh.device)
        if self.lead:
            chosen[0] = self._choose_checkpoint()
        self.mesh.world_group.broadcast(chosen, 0, reason="checkpoint.choose", phase="step")
        step = int(chosen)
        if step < 0:
            self._set_aside(after=-1)
            return 0
        saved, about = checkpoint.load(checkpoint.path(self.folder / "checkpoints", step))
        state.restore(self.trainer, saved, about)
        self._set_aside(after=step)
        self.counts = state.Counts.of(about)
        self.saved_updates = self.trainer.optimizer.steps
        self.progress.message(f"resumed after step {step} from {self.folder / 'checkpoints'}")
        changes = state.changed_options(self.run_spec, about)
        if about.get("data", self.prepared.key) != self.prepared.key:
            changes.append("the files of data.path, by name, size or time; the samples to come may be others")
        for change in changes:
            self.progress.message(f"changed since that checkpoint: {change}")
        return step

    def _choose_checkpoint(self) -> int:
        """The step of the checkpoint to go on from, -1 for none; rank 0 decides for all."""
        folder, resume = self.folder / "checkpoints", self.run_spec.checkpoint.resume
        check_resume(self.run_spec)
        if resume == "never":
            return -1
        if resume != "auto":
            return resume
        newest = checkpoint.newest(folder)
        if newest.step is None and newest.skipped:
            # To begin anew would lose what the run has learned, where a backup may yet save it.
            wrong = "".join(f"\n  {skipped}" for skipped in newest.skipped)
            raise UserError(
                f"out: none of the checkpoints in {folder} is whole; put one back from a backup, or write "
                f"checkpoint.resume=never to begin anew (they are kept, set aside){wrong}"
            )
        for skipped in newest.skipped:
            self.progress.message(f"warning: passed over a damaged checkpoint: {skipped}")
        if newest.step is None:
            self.progress.message(f"starting fresh: no checkpoint in {folder}")
            return -1
        return newest.step

    def _set_aside(self, after: int) -> None:
        """Keep checkpoints that this run does not go on from out of its way; none is removed."""
        if self.lead:
            for step in checkpoint.set_aside(self.folder / "checkpoints", after):
                self.progress.message(f"set aside the checkpoint of step {step}, which this run does not go on from")

    # -- steps ------------------------------------------------------------------------------------------------

    def run(self) -> int:
        start = self._resume()
        with (
            Metrics(self.folder, enabled=self.lead, start=start, warn=self.progress.message) as self.metrics,
            self.progress,
        ):
            self._write_run()
            if start >= self.run_spec.steps:
                self.progress.message(f"nothing to do: step {start} of {self.run_spec.steps} is reached; raise steps")
            return self._steps(start)

    def _steps(self, start: int) -> int:
        for step in range(start, self.run_spec.steps):
            began, blocked = time.perf_counter(), self.mesh.ledger.blocked_seconds
            self.mesh.blackbox.step = step + 1
            self.mesh.blackbox.note("computing")  # where no collective follows, an older note would stand
            totals = self.trainer.accumulate(self.data, step, stop=STOP_VALUES.get(self.stop.requested, 0.0))
            update = self.trainer.update(step, totals)
            self._count(step, totals, update)
            seconds = time.perf_counter() - began
            self._record(step + 1, totals, update, seconds, self.mesh.ledger.blocked_seconds - blocked)
            stopping = totals.stop > 0
            self._save(step + 1, stopping)  # first, in case whoever asked to stop is short of patience
            self._validate(step + 1)
            if stopping and step + 1 < self.run_spec.steps:
                self.progress.message(f"stopped after step {step + 1}, as asked; the same command goes on from here")
                return TERMINATED if totals.stop >= STOP_VALUES[signal.SIGTERM] else INTERRUPTED
        if self.not_saved is not None:
            raise RunError(
                f"all steps are done, but the last checkpoint is missing: {self.not_saved}; {self._kept()}; "
                "mend that and give the same command again"
            )
        return OK

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
            raise RunError(
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
                    self.run_spec.model, self.run_spec.data.seq_len, per_device, self.peak.flops
                ),
                "assumed_peak_flops": self.peak.flops,
                "seconds": seconds,
                "seconds_in_communication": blocked,
                "skipped": self.counts.skipped,
                "loss_scale": totals.scale,
            },
        )

    def _validate(self, step: int) -> None:
        every = self.run_spec.validation.every
        if self.held_out is None or not (step % every == 0 or step == self.run_spec.steps):
            return
        self.mesh.blackbox.note("validation")
        ids = self.held_out.spread(self.run_spec.validation.sequences)
        self.validation_loss = self.trainer.evaluate(self.held_out, ids).loss
        self.progress.message(f"step {step}: validation loss {self.validation_loss:.4f}")
        self.metrics.write(step, "validation", {"loss": self.validation_loss})

    def _save(self, step: int, stopping: bool) -> None:
        options = self.run_spec.checkpoint
        if not options.every and not stopping:
            return
        due = stopping or step == self.run_spec.steps or (options.every and step % options.every == 0)
        if not due:
            return
        updates = self.trainer.optimizer.steps
        if updates == self.saved_updates and not stopping and step != self.run_spec.steps:
            return  # steps were skipped: the same weights once more would only push out the checkpoint of others
        self.saved_updates = updates
        self.mesh.blackbox.note("collecting a checkpoint")
        tensors = state.tensors(self.trainer, keep=self.lead)
        with self.mesh.lead.works("saving a checkpoint") as advance:
            if self.lead:
                self._save_now(step, stopping, tensors, advance)

    def _save_now(self, step: int, stopping: bool, tensors: dict[str, Tensor], advance: Callable[[], None]) -> None:
        about = state.meta(self.trainer, step, self.counts) | {"data": self.prepared.key}
        folder, keep = self.folder / "checkpoints", self.run_spec.checkpoint.keep
        try:
            where = checkpoint.save(folder, step, tensors, about, keep=keep, advance=advance)
        except checkpoint.NotFinite as error:
            raise RunError(
                f"step {step}: {error}, so it is not saved; {self._kept()}; give the same command again with a lower "
                "optimizer.lr or a longer lr_schedule.warmup"
            ) from error
        except checkpoint.CheckpointError as error:
            # Training is worth more than this one save; the last whole checkpoint is still there.
            self.progress.message(f"warning: checkpoint of step {step} failed: {error}")
            self.not_saved = error
            if stopping:
                raise
        else:
            self.not_saved = None
            self.progress.message(f"step {step}: saved {where}")

    def leave(self, code: int) -> None:
        """What needs the other ranks at the end: updates under way, and a sample where no rank has a whole model."""
        self.trainer.sharded.settle()
        if code == OK and self.run_spec.layout.zero == 3 and self.run_spec.model.causal:
            self.mesh.blackbox.note("writing a sample")
            self.sample = self._sample()

    def _kept(self) -> str:
        there = checkpoint.steps(self.folder / "checkpoints")
        if not there:
            return f"there is none in {self.folder / 'checkpoints'}"
        return f"{self.folder / 'checkpoints'} has step{'s' * (len(there) > 1)} {', '.join(map(str, there))} still"

    # -- end --------------------------------------------------------------------------------------------------

    def _write_run(self) -> None:
        if not self.lead:
            return
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
            baseline = bigram_loss(
                self.prepared.train, self.prepared.held_out, self.run_spec.model.vocab,
                samples=samples, seq_len=data.seq_len,
            )  # fmt: skip
            if baseline is not None:
                lines.append(f"bigrams         {baseline:.4f} on the same held-out text, counted on the training text")
        if self.run_spec.model.causal:
            lines += ["sample:", self._sample() if self.sample is None else self.sample]
        folder = self.folder / "checkpoints"
        lines.append(f"checkpoints     {folder if checkpoint.steps(folder) else 'none, as checkpoint.every=0 asks'}")
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
            ids = generate(self.trainer.model, prompt, length, temperature=0.8, seed=self.run_spec.seed)
        except RunError as error:
            return f"none: {error}"
        return self.prepared.decode(ids)
