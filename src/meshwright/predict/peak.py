"""The moments of a step at which a rank may hold most, and what is there at each beside the states.

Backward frees saved activations from the end of the model to its beginning, so what counts is where a large gradient,
gathered unit or temporary meets most of what is still saved:

    ===========  ====================================================================================================
    moment       beside the activations saved up to there
    ===========  ====================================================================================================
    loss         the loss's copies of the logits; with ZeRO 3 the last unit
    head         the gradients of the logits, of the head's weight and input; the last unit and those ahead
    final norm   the temporaries of its backward
    recompute    q, k, v, the scores with their mask, the softmax and its dropout: counted where attention is written
                 out and outputs are kept, for those of later operators are there too; else the MLP is fuller
    MLP          the gradients of its activations, then one of its weights; the unit and those ahead
    attention    the gradients of q, k, v, and of the scores where it is written out; with context ranks what is on its
                 way between them; the unit and those ahead
    q, k, v      with tensor ranks: the gradients of their outputs, input and weights, the latter all at once; with
                 sequence parallelism also their input gathered again. The same of the MLP's first products
    embedding    its whole gradient, though few rows of it differ from zero
    update       a part of the gradients in the master weights' dtype, where theirs is narrower
    ===========  ====================================================================================================

Left out are the workspace inside single operations, the allocator's rounding and the libraries. Forward holds no more
at any place than backward does there.

A pipeline rank has the moments of each of its stages, of their own blocks and of the ends that they have, and beside
them what other micro-batches in flight keep: see predict/flight.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.predict import activations, reductions
from meshwright.predict.alive import Alive
from meshwright.predict.context import Attention, beside, borrowed, mask
from meshwright.predict.flight import Flight, Load
from meshwright.predict.micros import Micro, sizes
from meshwright.predict.params import tensors, units, whole
from meshwright.predict.stages import stages_on
from meshwright.predict.states import DTYPE_BYTES, gradient_bytes, master_bytes, padded, shards
from meshwright.spec.batch import largest_micro, micro_steps
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import LOSS_ROWS, WIDENED, RunSpec
from meshwright.spec.stages import Stage
from meshwright.spec.traffic import lent_to_sum

LINES = ("activations", "logits", "loss workspace", "gathered units", "reductions", "fresh gradients", "temporaries")


@dataclass(frozen=True)
class Moment:
    """Bytes by LINES at one place of the step.

    activations: saved for backward and not yet freed. logits, loss workspace: see `loss_workspace`. gathered units:
    whole parameters at ZeRO 3. reductions: see predict/reductions.py. fresh gradients: one parameter's before it is
    copied into its buffer, and a tied weight's from the head on, until it meets the embedding's. temporaries:
    gradients of activations, and what else a single layer holds for a moment. On pipeline ranks also receive buffers:
    of messages that are not used yet; and sent messages: that are not let go yet.
    """

    what: str
    lines: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.lines.values())


def saved(run: RunSpec, layout: Layout, sequences: int, *, cpu: bool = True) -> list[activations.Saved]:
    """What autograd keeps of a micro-batch of `sequences` sequences of this run, laid out so, on the CPU or an
    accelerator; of the whole model, whatever the pipeline ranks (see flight.kept_at_once for theirs)."""
    return activations.saved(run.model, layout, **sizes(run, (sequences, run.data.seq_len), cpu))


def written_out(run: RunSpec, *, cpu: bool) -> bool:
    """Whether attention scores are computed whole: as asked, or because torch's fused kernel for the CPU drops none."""
    return run.attention == "explicit" or (cpu and run.model.attn_dropout > 0)


def loss_workspace(
    spec: ModelSpec, *, tokens: int, dtype_bytes: int, loss: Literal["full", "chunked"], tp: int = 1
) -> dict[str, int]:
    """What the loss of `tokens` tokens holds at its peak beside saved activations.

    Full: backward has two gradients beside the saved log-softmax, its own ("loss workspace") and that of the logits
    ("logits"), both in float32 at least; forward has no more. Chunked: beside the hidden states the logits and
    log-softmax of one chunk, and where parameters are narrow the logits in float32 and the head's gradient as it is
    summed; or later the scaled gradients of hidden states and head.

    Tensor ranks have the logits of their words, and compute the gradient in place of the softmax: one copy less, but
    for that in another dtype.
    """
    wide, words = max(dtype_bytes, 4), -(-spec.vocab // tp)
    narrow = dtype_bytes < wide
    if loss == "full" or not tokens:
        copy = tokens * words
        if tp > 1:
            return {"logits": copy * dtype_bytes, "loss workspace": copy * wide if narrow else 0}
        return {"logits": copy * wide, "loss workspace": copy * wide}
    copy = min(tokens, LOSS_ROWS) * words
    head = words * spec.hidden
    states = tokens * spec.hidden * dtype_bytes
    if tp > 1:  # the product of a chunk for the head's gradient meets the softmax
        chunk = states + (copy * wide + head * wide if narrow else 0)
    else:
        chunk = states + (2 * copy * wide + head * (wide - dtype_bytes) if narrow else copy * wide)
    product = states + head * wide if narrow else 0
    scaled = states + head * dtype_bytes - copy * dtype_bytes
    return {"logits": copy * dtype_bytes, "loss workspace": max(chunk, product, scaled)}


def moments(run: RunSpec, layout: Layout, sequences: int, *, cpu: bool) -> Iterator[Moment]:
    """Those of a micro-batch of `sequences` sequences and of the update after it, on the CPU or an accelerator; of the
    whole model."""
    model, micro = whole(run.model), (sequences, run.data.seq_len)
    kept = _kept(run, layout, micro, (model,)) if cpu else None
    if sequences or (layout.zero == 3 and shards(layout) > 1):
        yield from _Step(run, layout, micro, model, (model,), kept).backward()
    yield _update(run, layout, (model,), kept)


def moments_on(run: RunSpec, layout: Layout, rank: int, *, cpu: bool) -> Iterator[Moment]:
    """Those of `rank`, its number in the world, which has its largest micro-batch, or in a pipeline several in
    flight."""
    place = layout.coordinates(rank)["dp"]
    most = largest_micro(run.batch.sequences, layout.data_ranks, place, run.batch.micro)
    if layout.pp == 1:
        yield from moments(run, layout, most, cpu=cpu)
        return
    stages = stages_on(run, layout, rank)
    kept = _kept(run, layout, (most, run.data.seq_len), stages) if cpu else None
    for load in Flight(run, layout, rank, cpu=cpu).heaviest():
        for moment in _Step(run, layout, load.micro, load.stage, stages, kept).backward():
            yield _with(moment, load)
    yield _update(run, layout, stages, kept)


def _with(moment: Moment, load: Load) -> Moment:
    """A moment of one micro-batch on one stage, with what the rank holds beside it."""
    more = {"activations": load.activations, "gathered units": load.gathered}
    lines = {name: size + more.get(name, 0) for name, size in moment.lines.items()}
    number = load.others + 1
    what = f"{moment.what}, {number} micro-batch{'es' * (number != 1)} in flight"
    return Moment(what, lines | {"receive buffers": load.received, "sent messages": load.sent})


class _Step:
    """The moments of a micro-batch's backward on one stage, one by one, and the sizes that they share, in bytes.

    stages: all of the rank. kept: on the CPU, bytes of the buffers that are kept for reductions.
    """

    def __init__(
        self, run: RunSpec, layout: Layout, micro: Micro, stage: Stage, stages: Sequence[Stage], kept: int | None
    ) -> None:
        sequences, self.seq = micro
        cpu = kept is not None
        self.run, self.layout, self.spec, self.stage = run, layout, run.model, stage
        self.tokens, tp = sequences * (self.seq // layout.cp), layout.tp
        self.size = DTYPE_BYTES[run.precision]
        self.wide = max(self.size, 4)
        self.padded = list(padded(run, layout, stage).values())
        held = list(enumerate(units(self.spec, layout.join, layout, stage).values()))  # units by their place in forward
        self.last = len(held) - 1
        self.tied = {place for place, unit in held if unit.tied}
        self.lookup = {place for place, unit in held if unit.lookup}
        self.block = {tensor.block: place for place, unit in held for tensor in unit.tensors}
        self.whole = self.tokens * self.spec.hidden * self.size  # hidden states of whole sequences
        self.hidden = self.whole // (tp if layout.sp else 1)  # and of what this rank has of them
        # Gathered, the parts lie one after the other, and are put in order where there are several sequences.
        self.gathered = (1 + (sequences > 1)) * self.whole if layout.sp else 0
        self.passing = 0
        if layout.cp > 1 and sequences:
            it = Attention.of(self.spec, layout, batch=sequences, seq=self.seq, dtype_bytes=self.size)
            self.passing = beside(it, cpu=cpu) + mask(it, packed=run.data.packing == "documents")
        self.kept = kept
        self.wholes, self.waiting = reductions.wholes(run, layout, stage), reductions.waiting(run, layout, stage)
        # Of the other stages the last reductions may still be under way.
        self.elsewhere = sum(
            reductions.on_their_way(run, layout, reductions.wholes(run, layout, other), None)
            for other in stages
            if other != stage
        )
        self.alive = Alive(activations.storages(run.model, layout, **sizes(run, micro, cpu, stage)), layout)
        self.region = layout.region(len(stage.blocks))
        self.width = self.spec.ffn_width // tp  # of this rank's part of the MLP
        self.ffn = self.tokens * self.width * self.size
        heads, kv_heads = self.spec.heads // tp, -(-self.spec.num_kv_heads // tp)
        self.qkv = (heads + 2 * kv_heads) * self.spec.head_width
        self.heads = self.tokens * self.qkv * self.size  # q, k and v
        self.written_out = written_out(run, cpu=cpu)
        self.scores = sequences * heads * self.seq**2
        self.scores *= self.size if run.attention == "explicit" else self.wide
        self.words = -(-self.spec.vocab // tp)
        self.table = self.words * self.spec.hidden * self.size
        self.llama = self.spec.family == "llama"

    def backward(self) -> Iterator[Moment]:
        """From the end of the stage to its beginning."""
        if self.stage.last:
            yield self.loss()
            if self.run.loss == "full":
                yield self.head()
            yield self.final_norm()
        for index in reversed(self.stage.blocks):
            if self.layout.recompute == "selective" and self.written_out:
                yield from self.recompute(index)
            yield from self.mlp(index)
            yield self.attention(index)
            if self.layout.tp > 1:
                yield self.columns(index)
        if self.stage.first:
            yield self.embedding()

    def loss(self) -> Moment:
        tp = self.layout.tp
        workspace = loss_workspace(self.spec, tokens=self.tokens, dtype_bytes=self.size, loss=self.run.loss, tp=tp)
        lines = {"activations": self.alive.everything, **workspace}
        if self.layout.zero_gather == "step":
            return self._moment("loss", self.last, lines, gathered=range(self.last + 1))
        here: Collection[int] = self.tied | {self.last}
        if not self.stage.whole and self.run.loss == "full":  # in backward, which has gathered them again
            here = self._of_head
        return self._moment("loss", self.last, lines, gathered=here)

    def head(self) -> Moment:
        lines = {
            "activations": self.alive.logits,
            "logits": self.tokens * self.words * self.size,
            "fresh gradients": self.table,
            "temporaries": self.whole + self._scattered,
        }
        return self._moment("head", self.last, lines, gathered=None if self.stage.whole else self._of_head)

    @property
    def _of_head(self) -> Collection[int]:
        """Places of the units that are whole while backward of a pipeline's last stage is in its head."""
        return self._gathered(self.last) if not self.tied or self.layout.zero_gather == "step" else self.tied

    def final_norm(self) -> Moment:
        # On the CPU, RMSNorm's backward has about four copies of the hidden states, in float32 at least.
        norm = 4 * self.hidden // self.size * self.wide if self.llama else self.hidden
        lines = {"activations": self.alive.before("lm_head"), "temporaries": self.hidden + norm}
        return self._moment("final norm", self.last, lines, tied=True)

    def recompute(self, index: int) -> Iterator[Moment]:
        keep, explicit = self.layout.kept_operators, self.run.attention == "explicit"
        made = 0 if "attention" in keep else self.scores
        packed = self.run.data.packing == "documents"
        masked = self.scores if explicit and (self.spec.causal or packed) else 0  # torch masks its own in place
        again = 0 if "softmax" in keep else self.scores
        places = {"scores": made + masked, "softmax": self.scores + again}
        if self.spec.attn_dropout:
            # Written out here, the last scores stay to the end; by torch, narrow weights are rounded once for nobody.
            beside = self.scores if explicit else self.scores * (self.size < self.wide) // 2
            places["dropped weights"] = self.scores + beside
        for before, temporaries in places.items():
            lines = {
                "activations": self.alive.recomputing(index - self.stage.start, before),
                "temporaries": self.hidden + self.heads + temporaries,
            }
            yield self._moment(f"recompute of block {index}", self.block[index], lines, tied=True)

    def mlp(self, index: int) -> Iterator[Moment]:
        end = self.alive.block_ends[index - self.stage.start]
        what, place = f"MLP of block {index}", self.block[index]
        last = {
            "activations": end,
            "fresh gradients": self.spec.hidden * self.width * self.size,
            "temporaries": self.hidden + self.ffn + (self.whole if self.layout.sp else 0),
        }
        yield self._moment(what, place, last, tied=True)
        # Then the product's value is gone, and beside its gradient there is that of its factor, or factors.
        factors = 2 if self.llama else 1
        inner = {"activations": end - self.ffn, "temporaries": self.hidden + (1 + factors) * self.ffn}
        yield self._moment(what, place, inner, tied=True)
        if self.layout.tp > 1:
            yield self._columns(index, what, f"{self._block(index)}.mlp", factors * self.ffn, factors * self.width)

    def attention(self, index: int) -> Moment:
        end = self.alive.before(f"{self._block(index)}.{'post_attention_layernorm' if self.llama else 'ln_2'}")
        temporaries = self.hidden + self.whole + self.heads + self.passing
        if self.written_out:
            temporaries += 2 * self.scores
        lines = {"activations": end, "temporaries": temporaries}
        return self._moment(f"attention of block {index}", self.block[index], lines, tied=True)

    def columns(self, index: int) -> Moment:
        """Backward of q, k and v's products over tensor ranks."""
        module = f"{self._block(index)}.{'self_attn' if self.llama else 'attn'}"
        return self._columns(index, f"attention of block {index}", module, self.heads, self.qkv)

    def _columns(self, index: int, what: str, module: str, outputs: int, width: int) -> Moment:
        """Backward of products that read one input, the first in `module`: bytes and number of their outputs."""
        lines = {
            "activations": self.alive.before(module) + self.hidden,  # their input, which they have saved
            "fresh gradients": self.spec.hidden * width * self.size,
            "temporaries": self.hidden + outputs + self.whole + self._scattered,
        }
        return self._moment(what, self.block[index], lines, tied=True)

    @property
    def _scattered(self) -> int:
        """With sequence parallelism, beside the gradient of a product's input: the input, and this rank's sum."""
        return self.gathered + self.hidden if self.layout.sp else 0

    def embedding(self) -> Moment:
        held = tensors(self.spec, self.layout, self.stage)
        tables = [tensor.local_numel for tensor in held if tensor.tied or tensor.lookup]
        # Of tensor ranks each has the gradient of all tokens, and that of those among its words.
        temporaries = 2 * self.whole if self.layout.tp > 1 else self.hidden
        lines = {"fresh gradients": max(tables) * self.size, "temporaries": temporaries}
        return self._moment("embedding", 0, lines, tied=True)

    # -- what they are made of --------------------------------------------------------------------------------------

    def _moment(
        self,
        what: str,
        place: int,
        lines: dict[str, int],
        *,
        gathered: Collection[int] | None = None,
        tied: bool = False,
    ) -> Moment:
        """place: of the unit that backward is in. tied: whether a tied weight's gradient waits for the embedding's."""
        found = dict.fromkeys(LINES, 0) | lines
        if self.layout.zero == 3:
            whole = self._gathered(place) if gathered is None else gathered
            found["gathered units"] = sum(self.padded[index] for index in whole) * self.size
        if self.kept is not None:
            found["reductions"] = self.kept
        else:
            left = self.last - place
            found["reductions"] = self.elsewhere + reductions.on_their_way(
                self.run, self.layout, self.wholes, None if what == "loss" else left
            )
            found["reductions"] += self.waiting if what not in ("loss", "head") else 0
        if tied and self.tied and self.stage.whole:  # in a pipeline each end has its own
            found["fresh gradients"] += self.table
        return Moment(what, found)

    def _gathered(self, place: int) -> Collection[int]:
        """Places of the units that are whole while backward is in the one at `place`: see parallel/residency.py."""
        micros = micro_steps(self.run.batch.sequences, self.layout.data_ranks, self.run.batch.micro)
        if self.layout.zero_gather == "step":
            return range((self.last if micros > 1 else place) + 1)
        # A region's blocks stay from its recompute until backward has been through each.
        index = place - self.block[self.stage.start]
        first = place - (index % self.region if 0 <= index < len(self.stage.blocks) else 0)
        near = set(range(max(first - self.layout.zero_ahead, 0), place + 1)) - self.lookup
        return self.tied | near if self.stage.whole else near - self.tied  # each end of a pipeline uses its table once

    def _block(self, index: int) -> str:
        return f"model.layers.{index}" if self.llama else f"transformer.h.{index}"


def _kept(run: RunSpec, layout: Layout, micro: Micro, stages: Sequence[Stage]) -> int:
    """Bytes of the buffers that a rank on the CPU keeps: for reductions, and for what layers lend on their way."""
    sequences, seq = micro
    size = DTYPE_BYTES[run.precision]
    whole = sequences * (seq // layout.cp) * run.model.hidden * size
    by_tensor_ranks = whole if layout.sp else lent_to_sum(layout.tp, whole)
    others = [[by_tensor_ranks]] if by_tensor_ranks else []
    if layout.cp > 1 and sequences:
        others.append(borrowed(Attention.of(run.model, layout, batch=sequences, seq=seq, dtype_bytes=size)))
    return reductions.kept(run, layout, others, stages)


def _update(run: RunSpec, layout: Layout, stages: Sequence[Stage], kept: int | None) -> Moment:
    part = 0
    if gradient_bytes(run) < master_bytes(run):
        largest = max(size for stage in stages for size in padded(run, layout, stage).values())
        part = min(largest // shards(layout), WIDENED) * master_bytes(run)
    return Moment("update", dict.fromkeys(LINES, 0) | {"reductions": kept or 0, "temporaries": part})
