"""One optimizer step of a run on this rank: micro-batches, reductions, clipping, update.

The loop around it, checkpoints and metrics are elsewhere; proofs and benchmarks use this class as the loop does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.model.build import DTYPES, build
from meshwright.model.dropout import DropoutKey
from meshwright.model.init import fill_, initial
from meshwright.model.loss import IGNORE
from meshwright.parallel import zero
from meshwright.parallel.placement import Placement
from meshwright.spec.batch import micro_batches, part
from meshwright.spec.run import RunSpec
from meshwright.train.data import Dataset
from meshwright.train.lr import lr_at
from meshwright.train.optimizer import FlatAdamW


@dataclass(frozen=True)
class Totals:
    """What one step's forward and backward came to, over all ranks. Gradients are sums over `tokens` tokens."""

    loss_sum: float
    tokens: int
    stop: float = 0.0  # sum over ranks of what each passed as `stop`
    gradient_norm: float = 0.0  # of the sums, over all parameters, each distinct one counted once

    @property
    def loss(self) -> float:
        """Mean loss a valid token; 0 where the whole batch has none."""
        return self.loss_sum / max(self.tokens, 1)


@dataclass(frozen=True)
class Update:
    """What became of a step: the gradient norm before clipping, and whether the update was skipped."""

    grad_norm: float
    lr: float
    skipped: bool


class Trainer:
    """This rank's part of a run: the laid-out model, its optimizer, and the step."""

    def __init__(self, run: RunSpec, mesh: Mesh) -> None:
        self.run = run
        self.mesh = mesh
        self.model = build(
            run.model, attention=run.attention, loss=run.loss, dtype=DTYPES[run.precision], device="meta"
        )
        initials = initial(self.model)
        self.sharded = zero.shard(self.model, mesh, run.layout.zero)
        self.model.rebuild_buffers(mesh.device)

        def from_seed(placement: Placement, local: Tensor) -> None:
            fill_(local.view(-1), initials[placement.name], seed=run.seed, name=placement.name, start=0)

        self.sharded.fill(from_seed)
        self.optimizer = FlatAdamW(self.sharded, run.optimizer)

    def accumulate(self, data: Dataset, step: int, stop: float = 0.0) -> Totals:
        """Forward and backward of this rank's micro-batches of global step `step`; gradients reduced on return."""
        group = self.mesh.group("dp")
        ids = data.ids(step, self.run.batch.sequences)
        micros = micro_batches(self.run.batch.sequences, group.size, group.rank, self.run.batch.micro)
        totals = torch.tensor([0.0, 0.0, stop], dtype=torch.float64, device=self.mesh.device)
        self.model.train()
        self.sharded.begin()
        pending = None
        for index, places in enumerate(micros):
            last = index == len(micros) - 1
            if places:
                tokens, targets = (t.to(self.mesh.device) for t in data.batch(ids[places.start : places.stop]))
                rows = torch.arange(places.start, places.stop, device=self.mesh.device)
                loss = self.model(tokens, targets, dropout=DropoutKey(self.run.seed, step, rows))
                totals[0] += loss.detach()
                totals[1] += (targets != IGNORE).sum()
            if last:
                # Before the last backward, so that the reductions it starts come after this one on every rank.
                pending = group.all_reduce(totals, reason="step.metrics", phase="step", async_=True)
                self.sharded.last_micro()
            if places:
                loss.backward()
        norm = global_norm(unit.gradients for unit in self.sharded.finish())
        assert pending is not None
        pending.wait()
        loss_sum, tokens_seen, stops = totals.tolist()
        return Totals(loss_sum, int(tokens_seen), stops, norm)

    def update(self, step: int, totals: Totals) -> Update:
        """Divide the gradients by the valid tokens, clip them by global norm, and update; or skip a non-finite step.

        All ranks see the same reduced loss and gradients, so they decide alike. After a skipped step weights and
        moments are as before it.
        """
        lr = lr_at(self.run, step)
        norm = totals.gradient_norm / max(totals.tokens, 1)
        if not (math.isfinite(norm) and math.isfinite(totals.loss_sum)):
            return Update(norm, lr, skipped=True)
        clip = self.run.optimizer.clip
        over = 1.0 if clip is None else max(norm / clip, 1.0)
        self.optimizer.step(lr, divide_by=max(totals.tokens, 1) * over)
        return Update(norm, lr, skipped=False)

    @torch.no_grad()
    def evaluate(self, data: Dataset, ids: Tensor) -> Totals:
        """Loss over the samples `ids` (the same on all ranks), each scored by one data rank."""
        group = self.mesh.group("dp")
        mine = part(len(ids), group.size, group.rank)
        totals = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
        self.model.eval()
        for start in range(mine.start, mine.stop, self.run.batch.micro):
            chosen = ids[start : min(start + self.run.batch.micro, mine.stop)]
            tokens, targets = (t.to(self.mesh.device) for t in data.batch(chosen))
            totals[0] += self.model(tokens, targets)
            totals[1] += (targets != IGNORE).sum()
        group.all_reduce(totals, reason="validation.metrics", phase="forward")
        loss_sum, tokens_seen, _ = totals.tolist()
        return Totals(loss_sum, int(tokens_seen))


def global_norm(gradients: Iterable[Tensor]) -> float:
    """L2 norm over all parameters. At ZeRO 0 every rank holds each of them once, so nothing is exchanged."""
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms).double())) if norms else 0.0
