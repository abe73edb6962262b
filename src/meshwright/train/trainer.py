"""One optimizer step of a run on this rank: micro-batches, reductions, clipping, update.

The loop around it, checkpoints and metrics are elsewhere; proofs and benchmarks use this class as the loop does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.collectives import Group
from meshwright.comm.mesh import Mesh
from meshwright.model.base import LanguageModel
from meshwright.model.build import DTYPES, build
from meshwright.model.dropout import seed_torch
from meshwright.model.init import Init, fill_, fill_rows_, initial
from meshwright.model.loss import IGNORE
from meshwright.parallel import context, tensor, zero
from meshwright.parallel.compile import compile_blocks
from meshwright.parallel.flat import Piece, Precision
from meshwright.parallel.offload import Offload
from meshwright.parallel.products import Line
from meshwright.parallel.recompute import Recompute
from meshwright.parallel.sight import Context
from meshwright.spec import splitting
from meshwright.spec.batch import micro_batches, micro_steps, part
from meshwright.spec.context import grain
from meshwright.spec.errors import UserError
from meshwright.spec.layout import STATE_AXES, Layout
from meshwright.spec.run import NOTHING_TO_OFFLOAD, RunSpec
from meshwright.train.data import Dataset
from meshwright.train.inputs import Inputs, Share
from meshwright.train.lossscale import LossScale
from meshwright.train.lr import lr_at
from meshwright.train.optimizer import FlatAdamW


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
    """This rank's part of a run: the laid-out model, its optimizer, and the step."""

    def __init__(self, run: RunSpec, mesh: Mesh) -> None:
        self.run = run
        self.mesh = mesh
        self.model = build(
            run.model,
            attention=run.attention,
            loss=run.loss,
            dropout=run.dropout,
            dtype=DTYPES[run.precision],
            device="meta",
        )
        initials = initial(self.model)
        if run.compile == "block":
            compile_blocks(self.model.blocks, mesh.device)
        self.recompute = _recompute(run, self.model)
        self.share = self.share_of(run.data.seq_len)
        self.line: Line | None = None
        self.context: Context | None = None
        placements = None
        if run.layout.tp > 1:
            self.line, placements = tensor.apply(
                self.model, mesh, splitting.plan(run.model), sequence=run.layout.sp, recompute=self.recompute
            )
        if run.layout.cp > 1:
            self.context = context.apply(
                self.model, mesh, method=run.layout.cp_method, order=run.layout.cp_order,
                inner=run.layout.cp_ulysses or 1, recompute=self.recompute,
            )  # fmt: skip
        self.sharded = zero.shard(
            self.model, mesh, run.layout.zero, options=_options(run), recompute=self.recompute, placements=placements
        )
        self.model.rebuild_buffers(mesh.device)
        self.offload = _offload(run.layout, mesh.device)
        self.sharded.fill(lambda piece, local: _fill_from_seed(piece, local, initials[piece.placement.name], run.seed))
        self.optimizer = FlatAdamW(self.sharded, run.optimizer)
        self.scale = LossScale.of(run.precision)

    def accumulate(self, data: Dataset, step: int, stop: Callable[[], float] = lambda: 0.0) -> Totals:
        """Forward and backward of this rank's micro-batches of global step `step`; gradients reduced on return.

        `stop` is asked as late as all ranks can still hear of it.
        """
        group = self.mesh.group("dp")
        ids = data.ids(step, self.run.batch.sequences)
        micros = micro_batches(self.run.batch.sequences, group.size, group.rank, self.run.batch.micro)
        totals = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
        scale = self.scale.value
        if not self.model.training:  # asking costs nothing, telling every module does
            self.model.train()
        self.sharded.begin()
        pending = None
        for index, places in enumerate(micros):
            last = index == len(micros) - 1
            self.sharded.micro(index, last=last)
            self._tell_micro(index)
            self.mesh.blackbox.tick()  # where nothing is sent between micro-batches, this alone shows that all is well
            loss = None
            if _torch_drops(self.run):
                seed_torch(self.run.seed, step, group.rank, index)
            if places:
                inputs = self.inputs(data, ids[places.start : places.stop])
                rows = torch.arange(places.start, places.stop, device=self.mesh.device)
                with self._saving(*inputs.tensors):
                    loss = inputs.loss(self.model, inputs.key(self.run.seed, step, rows))
                totals[0] += loss.detach()
                totals[1] += (inputs.targets != IGNORE).sum()
            elif self.sharded.every_rank_computes:
                loss = self.compute_nothing(step)
            if last:
                # Before the last backward, so that the reductions it starts come after this one on every rank.
                totals[2] = stop()
                totals[:2].mul_(self._speaks)
                pending = self._everybody.all_reduce(totals, reason="step.metrics", phase="step", async_=True)
            if loss is not None:
                (loss if scale == 1.0 else loss * scale).backward()
            self.sharded.end_micro()
        self._tell_documents(None)
        norm = self._global_norm()
        assert pending is not None
        pending.wait()
        loss_sum, tokens_seen, stops = totals.tolist()
        return Totals(loss_sum, int(tokens_seen), stops, norm, scale)

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
        self.optimizer.step(lr, divide_by=totals.divisor * over)
        return Update(norm, lr, skipped=False)

    @torch.no_grad()
    def evaluate(self, data: Dataset, ids: Tensor, stop: Callable[[], float] = lambda: 0.0) -> Totals:
        """Loss over the samples `ids` (the same on all ranks), each scored by one data rank.

        Where `stop` is not 0 on a rank, that rank breaks off if the others can go on without it, and the loss is void.
        """
        group = self.mesh.group("dp")
        mine = part(len(ids), group.size, group.rank)
        totals = torch.zeros(3, dtype=torch.float64, device=self.mesh.device)
        self.model.eval()
        self._tell_micro(None)
        for index in range(micro_steps(len(ids), group.size, self.run.batch.micro)):
            if stop() and self.alone:  # the others can go on
                break
            self.mesh.blackbox.tick()
            places = mine[index * self.run.batch.micro : (index + 1) * self.run.batch.micro]
            if places:
                inputs = self.inputs(data, ids[places.start : places.stop])
                totals[0] += inputs.loss(self.model)
                totals[1] += (inputs.targets != IGNORE).sum()
            elif self.sharded.every_rank_computes:
                self.compute_nothing(0)
        self._tell_documents(None)
        totals[:2].mul_(self._speaks)
        totals[2] = stop()
        self._everybody.all_reduce(totals, reason="validation.metrics", phase="forward")
        loss_sum, tokens_seen, stops = totals.tolist()
        return Totals(loss_sum, int(tokens_seen), stops)

    def inputs(self, data: Dataset, ids: Tensor) -> Inputs:
        """This rank's part of the samples `ids`, of whose documents its attention over ranks then knows."""
        found = self.share.of(*data.batch(ids), data.documents(ids))
        self._tell_documents(found.documents)
        return found

    def compute_nothing(self, step: int) -> Tensor:
        """The loss of tokens that do not count: what a rank computes where the others have a micro-batch and it
        has none, so that it takes part in their gathers and adds nothing to their sums."""
        tokens = torch.zeros(1, grain(self.run.layout), dtype=torch.int64)  # one for each part of the sequence
        inputs = self.share_of(tokens.size(1)).of(tokens, torch.full_like(tokens, IGNORE))
        self._tell_documents(None)
        rows = torch.zeros(1, dtype=torch.int64, device=self.mesh.device)
        return inputs.loss(self.model, inputs.key(self.run.seed, step, rows))

    @torch.no_grad()
    def logits(self, tokens: Tensor, place: int) -> Tensor:
        """Logits [V] of the token at `place` of one sequence, i64[1, T]; the same on all ranks that compute it.

        `grain` of the layout must divide T. Context ranks must ask together.
        """
        share = self.share_of(tokens.size(1))
        part = share.of(tokens, tokens)
        if part.places is None:
            whole: Tensor = self.model(part.tokens)
            return whole[0, place]
        mine: Tensor = self.model(part.tokens, positions=part.positions, length=part.length)
        # Zero but on the rank that holds the token: so no rank need know which one that is.
        found = torch.where((part.places == place)[:, None], mine[0], 0).sum(dim=0)
        self.mesh.group("cp").all_reduce(found, reason="cp.logits", phase="forward")
        return found

    def share_of(self, length: int) -> Share:
        """This rank's part of sequences of `length` tokens."""
        return Share(self.run.layout, self.mesh.coords["cp"], length, self.mesh.device)

    def _tell_micro(self, index: int | None) -> None:
        """Let what sends in forward and backward know which micro-batch that is for."""
        for sender in (self.line, self.context):
            if sender is not None:
                sender.micro = index

    def _tell_documents(self, documents: Tensor | None) -> None:
        """Let attention over ranks know the documents of whole sequences, until the backward that asks for them."""
        if self.context is not None and (documents is not None or self.context.documents is not None):
            self.context.documents = documents

    @property
    def alone(self) -> bool:
        """Whether this rank's forward needs no other rank."""
        return not self.sharded.every_rank_computes and self.line is None and self.context is None

    @property
    def _everybody(self) -> Group:
        """The ranks that hear of a step's figures."""
        return self.mesh.group(*STATE_AXES, "tp")

    @property
    def _speaks(self) -> int:
        """1 on one rank of each part of the batch and of its sequences, 0 on those that compute the same loss."""
        return int(self.mesh.coords["tp"] == 0)

    def _saving(self, *inputs: Tensor) -> AbstractContextManager[object]:
        """Around a forward: where what it saves for backward goes."""
        if self.offload is None:
            return nullcontext()
        weights = (unit.parameters for unit in self.sharded.units)  # at ZeRO 3 not yet the module's parameters
        return self.offload.forward([*weights, *self.model.buffers(), *inputs])

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
        if self.sharded.stage or self.line is not None:
            # Each rank has the sums of its own shard. Over all ranks, also those that hold the same shards, so that
            # all have the same bits and decide alike.
            self._everybody.all_reduce(squares, reason="step.norm", phase="step")
            replicas, _ = self.sharded.copies
        return math.sqrt(float(squares) / replicas)


def _fill_from_seed(piece: Piece, local: Tensor, init: Init, seed: int) -> None:
    """The piece's values into `local`, 1-dim; what stands behind the end of the whole is left as it is."""
    name, shape = piece.placement.name, piece.placement.shape
    if not piece.placement.cuts:
        fill_(local, init, seed=seed, name=name, start=piece.start)
        return
    assert len(shape) <= 2, name
    for box, view in piece.boxes(local):
        row = shape[-1]
        start = box.offsets[0] if len(shape) == 1 else box.offsets[0] * row + box.offsets[1]
        fill_rows_(torch.atleast_2d(view), init, seed=seed, name=name, start=start, stride=row)


def _torch_drops(run: RunSpec) -> bool:
    """Whether training draws from torch's generators."""
    return run.dropout == "torch" and run.model.drops


def _recompute(run: RunSpec, model: LanguageModel) -> Recompute | None:
    layout = run.layout
    if layout.recompute == "none":
        return None
    return Recompute(
        model.blocks, every=layout.region(len(model.blocks)), keep=layout.kept_operators, rng=_torch_drops(run)
    )


def _offload(layout: Layout, device: torch.device) -> Offload | None:
    if layout.offload == "none":
        return None
    if device.type == "cpu":
        raise UserError(NOTHING_TO_OFFLOAD)
    return Offload(device)


def _options(run: RunSpec) -> zero.Options:
    layout = run.layout
    compute = DTYPES[run.precision]
    wide = torch.promote_types(compute, torch.float32)
    gradients = wide if run.grad_dtype == "auto" else DTYPES[run.grad_dtype]
    return zero.Options(
        precision=Precision(
            gradients=gradients,
            reduce=gradients if run.reduce_dtype == "auto" else DTYPES[run.reduce_dtype],
            master=wide,
        ),
        shard=layout.zero_shard,
        gather=layout.zero_gather,
        ahead=layout.zero_ahead,
        join=layout.join,
    )
