"""What a pipeline's passes are in a run: training, scoring held-out text, and asking for the next token.

The engine (parallel/pipeline.py) says which stage computes which micro-batch when; here is what that means: whose
samples they are, what the strategies must be told before, and where the loss goes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.comm.collectives import Pending
from meshwright.model.dropout import seed_torch
from meshwright.model.loss import IGNORE
from meshwright.spec.batch import micro_batches
from meshwright.train.data import Dataset
from meshwright.train.inputs import Inputs
from meshwright.train.layingout import LaidOut, torch_drops

if TYPE_CHECKING:
    from meshwright.train.trainer import Trainer


class _Passes(ABC):
    """The micro-batches of one round through the pipeline, as this rank has them; see parallel.pipeline.Passes."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._made: dict[int, Inputs | None] = {}

    @abstractmethod
    def make(self, micro: int) -> Inputs | None:
        """This rank's part of a micro-batch, None where it has none and need not compute."""

    def inputs(self, micro: int) -> Inputs | None:
        if micro not in self._made:
            self._made[micro] = self.make(micro)
        return self._made[micro]

    def shape(self, micro: int) -> Sequence[int] | None:
        inputs = self.inputs(micro)
        if inputs is None:
            return None
        batch, length = inputs.tokens.shape
        layout = self.trainer.run.layout
        return batch, length // (layout.tp if layout.sp else 1), self.trainer.run.model.hidden

    def before_backward(self, stage: int, micro: int, last: bool) -> None:
        raise AssertionError("nothing goes backward here")

    def after_backward(self, stage: int, micro: int) -> None:
        raise AssertionError("nothing goes backward here")

    def _dealt(self, data: Dataset, ids: Tensor, places: range) -> Inputs | None:
        """The samples at `places` of `ids`; where there are none, what a rank computes beside others, if it must."""
        if places:
            return self.trainer.inputs(data, ids[places.start : places.stop])
        return self.trainer.nothing() if self.trainer.sharded.every_rank_computes else None

    def _of(self, stage: int, micro: int) -> tuple[LaidOut, Inputs]:
        inputs = self.inputs(micro)
        assert inputs is not None
        laid_out = self.trainer.stages[stage]
        laid_out.tell_documents(inputs.documents)
        return laid_out, inputs


class TrainingPasses(_Passes):
    """Those of global step `step`. `stop` is asked as late as all ranks can still hear of it."""

    def __init__(self, trainer: Trainer, data: Dataset, step: int, stop: Callable[[], float]) -> None:
        super().__init__(trainer)
        run, group = trainer.run, trainer.mesh.group("dp")
        self.data, self.step, self.stop = data, step, stop
        self.rank = group.rank
        self.ids = data.ids(step, run.batch.sequences)
        self.micros = micro_batches(run.batch.sequences, group.size, group.rank, run.batch.micro)
        # Without a pipeline a micro-batch's backward follows its forward; else other passes come between.
        self.apart = trainer.mesh.sizes["pp"] > 1
        self._totals = torch.zeros(3, dtype=torch.float64, device=trainer.mesh.device)
        self._pending: Pending | None = None
        self._to_end = len(trainer.stages)
        self._first = min(trainer.stages)

    def make(self, micro: int) -> Inputs | None:
        return self._dealt(self.data, self.ids, self.micros[micro])

    def forward(self, stage: int, micro: int, hidden: Tensor | None) -> Tensor:
        laid_out, inputs = self._of(stage, micro)
        trainer, run = self.trainer, self.trainer.run
        if self.apart:
            laid_out.sharded.forward(micro)
        else:
            laid_out.sharded.micro(micro, last=micro == len(self.micros) - 1)
        laid_out.tell_micro(micro)
        trainer.mesh.blackbox.tick()  # where nothing is sent between micro-batches, this alone shows that all is well
        if torch_drops(run):
            seed_torch(run.seed, self.step, self.rank, micro, stage)
        places = self.micros[micro]
        rows = torch.arange(places.start, places.stop) if places else torch.zeros(1, dtype=torch.int64)
        with laid_out.saving(*inputs.tensors):
            key = inputs.key(run.seed, self.step, rows.to(trainer.mesh.device))
            out = inputs.forward(laid_out.model, dropout=key, hidden=hidden)
        if self.apart:
            laid_out.sharded.end_pass(backward=False)
        if not laid_out.stage.last:
            return out
        if places:
            self._totals[0] += out.detach()
            self._totals[1] += (inputs.targets != IGNORE).sum()
        scale = trainer.scale.value
        return out if scale == 1.0 else out * scale

    def before_backward(self, stage: int, micro: int, last: bool) -> None:
        laid_out, inputs = self.trainer.stages[stage], self.inputs(micro)
        if last:
            self._to_end -= 1
            if self._to_end == 0:
                # Before the last backward, so that the reductions it starts come after this one on every rank.
                self._reduce_totals()
        if self.apart:
            laid_out.sharded.backward(micro, last=last)
        elif inputs is None:
            laid_out.sharded.micro(micro, last=last)
        laid_out.tell_micro(micro)
        if inputs is not None:
            laid_out.tell_documents(inputs.documents)

    def after_backward(self, stage: int, micro: int) -> None:
        sharded = self.trainer.stages[stage].sharded
        if self.apart:
            sharded.end_pass(backward=True)
        else:
            sharded.end_micro()
        if stage == self._first:
            del self._made[micro]

    def _reduce_totals(self) -> None:
        self._totals[:2].mul_(self.trainer.speaks)
        self._totals[2] = self.stop()
        self._pending = self.trainer.everybody.all_reduce(
            self._totals, reason="step.metrics", phase="step", async_=True
        )

    def totals(self) -> list[float]:
        """Sum of losses, valid tokens and stops, over all ranks."""
        assert self._pending is not None
        self._pending.wait()
        found: list[float] = self._totals.tolist()
        return found


class ScoringPasses(_Passes):
    """Those of samples that are only scored: `micros` are their places in `ids`; `totals` gets losses and tokens."""

    def __init__(self, trainer: Trainer, data: Dataset, ids: Tensor, micros: Sequence[range], totals: Tensor) -> None:
        super().__init__(trainer)
        self.data, self.ids, self.micros, self._totals = data, ids, micros, totals

    def make(self, micro: int) -> Inputs | None:
        return self._dealt(self.data, self.ids, self.micros[micro]) if micro < len(self.micros) else None

    def forward(self, stage: int, micro: int, hidden: Tensor | None) -> Tensor:
        laid_out, inputs = self._of(stage, micro)
        self.trainer.mesh.blackbox.tick()
        out = inputs.forward(laid_out.model, hidden=hidden)
        if laid_out.stage.last and self.micros[micro]:
            self._totals[0] += out
            self._totals[1] += (inputs.targets != IGNORE).sum()
        return out


class AskingPasses(_Passes):
    """One sequence's, in evaluation: `found` are the logits [V] of its token at `place`, zero where others hold it."""

    def __init__(self, trainer: Trainer, asked: Inputs, place: int) -> None:
        super().__init__(trainer)
        self.asked, self.place = asked, place
        self.found = torch.zeros(trainer.run.model.vocab, dtype=trainer.pipeline.dtype, device=trainer.mesh.device)

    def make(self, micro: int) -> Inputs | None:
        return self.asked if micro == 0 else None

    def forward(self, stage: int, micro: int, hidden: Tensor | None) -> Tensor:
        laid_out, asked = self._of(stage, micro)
        out = asked.forward(laid_out.model, hidden=hidden, scored=False)
        if laid_out.stage.last and asked.places is None:
            self.found = out[0, self.place]
        elif laid_out.stage.last:
            assert asked.places is not None
            # Zero but on the rank that holds the token: so no rank need know which one that is.
            self.found = torch.where((asked.places == self.place)[:, None], out[0], 0).sum(dim=0)
        return out
