"""From the plain model to one stage of it on this rank: the strategies, in the one order in which they are applied."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.model.base import LanguageModel
from meshwright.model.build import DTYPES, build
from meshwright.model.init import Init, fill_, fill_rows_, initial
from meshwright.parallel import context, stage, tensor, zero
from meshwright.parallel.compile import compile_blocks
from meshwright.parallel.flat import Piece, Precision
from meshwright.parallel.offload import Offload
from meshwright.parallel.placement import Placement, plain_placements
from meshwright.parallel.products import Line
from meshwright.parallel.recompute import Recompute
from meshwright.parallel.sight import Context
from meshwright.parallel.zero import Sharded
from meshwright.spec import splitting
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec
from meshwright.spec.stages import Stage


@dataclass(frozen=True)
class LaidOut:
    """One stage: what is left of the model, and what the strategies have made of it."""

    stage: Stage
    model: LanguageModel
    sharded: Sharded
    line: Line | None
    context: Context | None
    offload: Offload | None

    def tell_micro(self, index: int | None) -> None:
        """Let what sends in forward and backward know which micro-batch that is for."""
        for sender in (self.line, self.context):
            if sender is not None:
                sender.micro = index

    def tell_documents(self, documents: Tensor | None) -> None:
        """Let attention over ranks know the documents of whole sequences, until the backward that asks for them."""
        if self.context is not None and (documents is not None or self.context.documents is not None):
            self.context.documents = documents

    def saving(self, *inputs: Tensor) -> AbstractContextManager[object]:
        """Around a forward: where what it saves for backward goes."""
        if self.offload is None:
            return nullcontext()
        weights = (unit.parameters for unit in self.sharded.units)  # at ZeRO 3 not yet the module's parameters
        return self.offload.forward([*weights, *self.model.buffers(), *inputs])


def lay_out(run: RunSpec, mesh: Mesh, part: Stage, offload: Offload | None) -> LaidOut:
    """Stage `part` of the run's model on this rank, its weights filled from the seed. All ranks of it together."""
    layout = run.layout
    model = build(
        run.model,
        attention=run.attention,
        loss=run.loss,
        dropout=run.dropout,
        dtype=DTYPES[run.precision],
        device="meta",
    )
    initials = initial(model)
    stage.cut(model, part)
    if run.compile == "block":
        compile_blocks(model.blocks, mesh.device)
    recompute = _recompute(run, model, mesh)
    line, placements = None, plain_placements(model, [axis for axis, size in mesh.sizes.items() if size > 1])
    if layout.tp > 1:
        plan = splitting.plan(run.model)
        if not part.whole:
            plan = splitting.within(plan, [name for name, _ in model.named_modules(remove_duplicate=False)])
        line, placements = tensor.apply(model, mesh, plan, sequence=layout.sp, recompute=recompute)
    sight = None
    if layout.cp > 1:
        sight = context.apply(
            model, mesh, method=layout.cp_method, order=layout.cp_order, inner=layout.cp_ulysses or 1,
            recompute=recompute,
        )  # fmt: skip
    if not part.whole:
        placements = {name: _at_an_end(placement, part) for name, placement in placements.items()}
    sharded = zero.shard(model, mesh, layout.zero, options=_options(run), recompute=recompute, placements=placements)
    model.rebuild_buffers(mesh.device)
    sharded.fill(lambda piece, local: _fill_from_seed(piece, local, initials[piece.placement.name], run.seed))
    return LaidOut(part, model, sharded, line, sight, offload)


def _at_an_end(placement: Placement, part: Stage) -> Placement:
    """The record of a parameter in a pipeline: of a tied table both ends have a part of the gradient, and the first
    one's counts."""
    if len(placement.names) == 1:
        return placement
    assert placement.partial is None, placement
    return replace(placement, partial="pp.ends", counted=placement.counted and part.first)


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


def torch_drops(run: RunSpec) -> bool:
    """Whether training draws from torch's generators."""
    return run.dropout == "torch" and run.model.drops


def _recompute(run: RunSpec, model: LanguageModel, mesh: Mesh) -> Recompute | None:
    layout = run.layout
    if layout.recompute == "none":
        return None
    blocks = list(model.blocks)
    return Recompute(
        blocks, every=layout.region(len(blocks)), keep=layout.kept_operators, rng=torch_drops(run), tracing=mesh.tracing
    )


def _options(run: RunSpec) -> zero.Options:
    layout: Layout = run.layout
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
