"""What a micro-batch holds on a block and at the ends, for all forms and micro-batches of a mesh.

The figures are those of predict/storages.py and predict/alive.py for a model of a single block. They grow evenly with
the sequences of a micro-batch, so two of them say all: what a cache keeps, by whatever a block's sizes depend on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.predict import activations
from meshwright.predict.alive import Alive
from meshwright.predict.context import Attention, beside, mask
from meshwright.predict.micros import sizes
from meshwright.predict.plan.space import Form, Mesh, Pipe, Sharding, layout_of
from meshwright.predict.states import DTYPE_BYTES
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec
from meshwright.spec.stages import Stage

Array = NDArray[np.float64]
ALONE = Stage(0, 0, 1, first=True, last=True)


class Sizes(NamedTuple):
    """Bytes of a micro-batch, each of shape (forms, micro-batches).

    kept: what a block leaves to backward; kept_shared: what the first block of a stage leaves beside it. saved: what a
    block has for its backward once all is computed (again), saved_shared: more on the first. attention, qkv, mlp: those
    alive before the norm behind attention, before attention, and before the MLP. embedding: kept by the embedding.
    norm, logits, loss: behind the blocks, up to the head's product, to the logits, and by the loss beside them.
    passing: of attention over context ranks, on its way.
    """

    kept: Array
    kept_shared: Array
    saved: Array
    saved_shared: Array
    attention: Array
    qkv: Array
    mlp: Array
    embedding: Array
    norm: Array
    logits: Array
    loss: Array
    passing: Array


class SizesOfBlocks:
    """Looks sizes up, and computes what is new. Of one run on one kind of device."""

    def __init__(self, run: RunSpec, *, cpu: bool) -> None:
        self.run, self.cpu = run, cpu
        self._known: dict[object, tuple[Array, Array]] = {}

    def of(self, mesh: Mesh, forms: tuple[Form, ...], micros: tuple[int, ...]) -> Sizes:
        """Those of a mesh's layouts."""
        ends = [self._ends(mesh, form) for form in forms]
        one, more = (np.array([each[end] for each in ends]).T[:, :, None] for end in (0, 1))
        return Sizes(*(one + more * (np.array(micros, float) - 1)))

    def _ends(self, mesh: Mesh, form: Form) -> tuple[Array, Array]:
        """The figures for a single sequence, and what each further one adds."""
        key = mesh.tp, mesh.cp, mesh.attend, form
        if key not in self._known:
            near = mesh._replace(dp=1, pp=1)
            layout = layout_of(near, Pipe(), Sharding(0), form)
            one, two = (self._figures(layout, sequences) for sequences in (1, 2))
            self._known[key] = one, two - one
        return self._known[key]

    def _figures(self, layout: Layout, sequences: int) -> Array:
        run = self.run
        micro = sequences, run.data.seq_len
        parts = activations.storages(run.model, layout, **sizes(run, micro, self.cpu, ALONE))
        rows = parts.blocks[0]
        (kept,) = activations.kept(parts, layout)
        shared = sum(row.bytes for row in rows if row.shared and (row.saved or layout.recompute != "none"))
        saved_shared = sum(row.bytes for row in rows if row.shared and row.saved)
        alive = Alive(parts, layout)
        begin, end = alive.block_begins[0], alive.block_ends[0]
        gpt2 = run.model.family == "gpt2"
        at = "transformer.h.0" if gpt2 else "model.layers.0"
        names = ("ln_2", "attn", "mlp") if gpt2 else ("post_attention_layernorm", "self_attn", "mlp")
        attention, qkv, mlp = (alive.before(f"{at}.{name}") - begin for name in names)
        base = begin + activations.total(kept)
        passing = 0
        if layout.cp > 1:
            size = DTYPE_BYTES[run.precision]
            it = Attention.of(run.model, layout, batch=sequences, seq=run.data.seq_len, dtype_bytes=size)
            passing = beside(it, cpu=self.cpu) + mask(it, packed=run.data.packing == "documents")
        figures = (
            activations.total(kept) - shared, shared, end - begin - saved_shared, saved_shared,
            attention - saved_shared, qkv, mlp - saved_shared, begin,
            alive.before("lm_head") - base, alive.logits - base, alive.everything - alive.logits, passing,
        )  # fmt: skip
        return np.array(figures, float)
