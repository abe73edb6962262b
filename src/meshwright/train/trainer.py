"""One optimizer step of a run on this rank: micro-batches, reductions, clipping, update.

The loop around it, checkpoints and metrics are elsewhere; proofs and benchmarks use this class as the loop does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.collectives import Group
from meshwright.comm.mesh import Mesh
from meshwright.model.base import LanguageModel
from meshwright.model.build import DTYPES
from meshwright.model.loss import IGNORE
from meshwright.parallel.offload import Offload
from meshwright.parallel.pipeline import Pipeline
from meshwright.parallel.together import ShardedStages
from meshwright.parallel.zero import Sharded
from meshwright.predict.stages import schedule_of, stages_on
from meshwright.spec.batch import micro_steps, part
from meshwright.spec.context import grain
from meshwright.spec.errors import UserError
from meshwright.spec.layout import STATE_AXES, Layout
from meshwright.spec.run import NOTHING_TO_OFFLOAD, RunSpec
from meshwright.train.data import Dataset
from meshwright.train.inputs import Inputs, Share
from meshwright.train.layingout import lay_out
from meshwright.train.lossscale import LossScale
from meshwright.train.lr import lr_at
from meshwright.train.optimizer import FlatAdamW
from meshwright.train.passes import AskingPasses, ScoringPasses, TrainingPasses


@dataclass(frozen=True)
class Totals:
    """What one step's forward and backward came to, over all ranks. Gradients are sums over `tokens` tokens."""

    loss_sum: float
    tokens: int
    stop: float = 0.0  # sum over ranks of what each passed as `stop`
    gradient_norm: float = 0.0  # of the sums, over all parameters, each distinct one counted once
    scale: float = 1.0  # that loss and gradients were multiplied by for backward

    @property
    def loss(self) -> float:
        """Mean loss a valid token; 0 where the whole batch has none."""
        return self.loss_sum / max(self.tokens, 1)

    @property
    def divisor(self) -> float:
        """What the gradient sums are to be divided by."""
        return max(self.tokens, 1) * self.scale


@dataclass(frozen=True)
class Update:
    """What became of a step: the gradient norm before clipping, and whether the update was skipped.

    overflow: it was skipped for the loss scale alone, which has been lowered; the next step may do.
    """

    grad_norm: float
    lr: float
    skipped: bool
    overflow: bool = False


class Trainer:
    """This rank's part of a run: its stages of the laid-out model, its optimizer, and the step."""

    def __init__(self, run: RunSpec, mesh: Mesh) -> None:
        self.run = run
        self.mesh = mesh
        schedule = schedule_of(run, run.layout)
        offload = _offload(run.layout, mesh.device)
        parts = stages_on(run, run.layout, mesh.rank)
        if run.layout.pp > 1 and run.model.is_tied:
            mesh.ends("pp")  # while all ranks are here
        self.stages = {part.index: lay_out(run, mesh, part, offload) for part in parts}
        self.sharded: Sharded | ShardedStages
        if len(parts) == 1:
            self.sharded = self.stages[parts[0].index].sharded
        else:
            self.sharded = ShardedStages([laid_out.sharded for laid_out in self.stages.values()])
        self.pipeline = Pipeline(mesh, schedule, DTYPES[run.precision])
        self.share = self.share_of(run.data.seq_len)
        self.optimizer = FlatAdamW(self.sharded, run.optimizer)
        self.scale = LossScale.of(run.precision)

    @property
    def model(self) -> LanguageModel:
        """The only stage's model, or the first one's of several on this rank."""
        return next(iter(self.stages.values())).model

    def accumulate(self, data: Dataset, step: int, stop: Callable[[], float] = lambda: 0.0) -> Totals:
        """Forward and backward of this rank's micro-batches of global step `step`; gradients reduced on return.

        `stop` is asked as late as all ranks can still hear of it.
        """
        for laid_out in self.stages.values():
            if not laid_out.model.training:  # asking costs nothing, telling every module does
                laid_out.model.train()
        self.sharded.begin()
        passes = TrainingPasses(self, data, step, stop)
        self.pipeline.run(passes)
        self._tell_documents(None)
        with self.mesh.tracing.span("optimizer", "norm"):
            norm = self._global_norm()
        loss_sum, tokens_seen, stops = passes.totals()
        return Totals(loss_sum, int(tokens_seen), stops, norm, self.scale.value)

    def update(self, step: int, totals: Totals) -> Update:
        """Divide the gradients by the valid tokens, clip them by global norm, and update; or skip a non-finite step.

        All ranks see the same reduced loss and gradients, so they decide alike. After a skipped step weights and
        moments are as before it.
        """
        lr = lr_at(self.run, step)
        norm = totals.gradient_norm / totals.divisor
        finite = math.isfinite(norm) and math.isfinite(totals.loss_sum)
        lowered = self.scale.after(finite)
        if not finite:
            return Update(norm, lr, skipped=True, overflow=lowered and math.isfinite(totals.loss_sum))
        clip = self.run.optimizer.clip
        over = 1.0 if clip is None else max(norm / clip, 1.0)
        with self.mesh.tracing.span("optimizer", "update"):
            self.optimizer.step(lr, divide_by=totals.divisor * over)
        return Update(norm, lr, skipped=False)

    @torch.no_grad()
    def evaluate(self, data: Dataset, ids: Tensor, stop: Callable[[], float] = lambda: 0.0) -> Totals:
        """Loss over the samples `ids` (the same on all ranks), each scored by one data rank.

        Where `stop` is not 0 on a rank, that rank breaks off if the others can go on without it, and the loss is void.
        """
        group = self.mesh.group("dp")
        mine = part(len(ids), group.size, group.rank)
        for laid_out in self.stages.values():
            laid_out.model.eval()
            laid_out.tell_micro(None)
        totals = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
        at_once = self.pipeline.schedule.micros
        steps = micro_steps(len(ids), group.size, self.run.batch.micro)
        for first in range(0, steps, at_once):  # as many micro-batches as the schedule has, the last ones empty
            if stop() and self.alone:  # the others can go on
                break
            micros = [mine[i * self.run.batch.micro : (i + 1) * self.run.batch.micro] for i in range(first, steps)]
            self.pipeline.run_forward(ScoringPasses(self, data, ids, micros[:at_once], totals))
        self._tell_documents(None)
        totals[:2].mul_(self.speaks)
        totals[2] = stop()
        self.everybody.all_reduce(totals, reason="validation.metrics", phase="forward")
        loss_sum, tokens_seen, stops = totals.tolist()
        return Totals(loss_sum, int(tokens_seen), stops)

    def inputs(self, data: Dataset, ids: Tensor) -> Inputs:
        """This rank's part of the samples `ids`."""
        with self.mesh.tracing.span("data", "data"):
            return self.share.of(*data.batch(ids), data.documents(ids))

    def nothing(self) -> Inputs:
        """Tokens that do not count: what a rank computes where the others have a micro-batch and it has none, so that
        it takes part in their gathers and adds nothing to their sums."""
        tokens = torch.zeros(1, grain(self.run.layout), dtype=torch.int64)  # one for each part of the sequence
        return self.share_of(tokens.size(1)).of(tokens, torch.full_like(tokens, IGNORE))

    @torch.no_grad()
    def logits(self, tokens: Tensor, place: int) -> Tensor:
        """Logits [V] of the token at `place` of one sequence, i64[1, T]; the same on all ranks that compute it.

        `grain` of the layout must divide T. Context ranks, and pipeline ranks, must ask together.
        """
        for laid_out in self.stages.values():
            laid_out.model.eval()
        asked = AskingPasses(self, self.share_of(tokens.size(1)).of(tokens, tokens), place)
        self.pipeline.run_forward(asked)
        found = asked.found
        if self.mesh.sizes["cp"] > 1:
            self.mesh.group("cp").all_reduce(found, reason="cp.logits", phase="forward")
        if self.mesh.sizes["pp"] > 1:
            self.mesh.group("pp").all_reduce(found, reason="pp.logits", phase="forward")
        return found

    def share_of(self, length: int) -> Share:
        """This rank's part of sequences of `length` tokens."""
        return Share(self.run.layout, self.mesh.coords["cp"], length, self.mesh.device)

    def _tell_documents(self, documents: Tensor | None) -> None:
        for laid_out in self.stages.values():
            laid_out.tell_documents(documents)

    @property
    def alone(self) -> bool:
        """Whether this rank's forward needs no other rank."""
        sizes = self.mesh.sizes
        return not self.sharded.every_rank_computes and sizes["tp"] == sizes["cp"] == sizes["pp"] == 1

    @property
    def everybody(self) -> Group:
        """The ranks that hear of a step's figures."""
        return self.mesh.group(*STATE_AXES, "tp", "pp")

    @property
    def speaks(self) -> int:
        """1 on one rank of each part of the batch and of its sequences that computes its loss, 0 on all others."""
        last = any(laid_out.stage.last for laid_out in self.stages.values())
        return int(last and self.mesh.coords["tp"] == 0)

    def _global_norm(self) -> float:
        """L2 norm of the gradient sums over all parameters; each unit's part while others are still on the wire."""
        norms = []
        for unit in self.sharded.finish():
            for gradient in unit.counted(unit.gradient_shard):
                wide = torch.promote_types(gradient.dtype, torch.float32)
                norms.append(torch.linalg.vector_norm(gradient, dtype=wide).double())
        squares = torch.stack(norms).square_().sum() if norms else torch.zeros((), dtype=torch.float64)
        squares = squares.to(self.mesh.device)
        replicas = 1
        if self.sharded.stage or self.mesh.sizes["tp"] > 1 or self.mesh.sizes["pp"] > 1:
            # Each rank has the sums of its own shard. Over all ranks, also those that hold the same shards, so that
            # all have the same bits and decide alike.
            self.everybody.all_reduce(squares, reason="step.norm", phase="step")
            replicas, _ = self.sharded.copies
        return math.sqrt(float(squares) / replicas)


def _offload(layout: Layout, device: torch.device) -> Offload | None:
    if layout.offload == "none":
        return None
    if device.type == "cpu":
        raise UserError(NOTHING_TO_OFFLOAD)
    return Offload(device)
