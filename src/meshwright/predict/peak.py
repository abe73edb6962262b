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
    attention    the gradients of q, k, v, and of the scores where it is written out; the unit and those ahead
    embedding    its whole gradient, though few rows of it differ from zero
    update       a part of the gradients in the master weights' dtype, where theirs is narrower
    ===========  ====================================================================================================

Left out are the workspace inside single operations, the allocator's rounding and the libraries. Forward holds no more
at any place than backward does there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from meshwright.predict import activations, reductions
from meshwright.predict.alive import Alive
from meshwright.predict.params import tensors, units
from meshwright.predict.states import DTYPE_BYTES, gradient_bytes, master_bytes, padded, shards
from meshwright.spec.batch import micro_steps
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import LOSS_ROWS, WIDENED, RunSpec

LINES = ("activations", "logits", "loss workspace", "gathered units", "reductions", "fresh gradients", "temporaries")


@dataclass(frozen=True)
class Moment:
    """Bytes by LINES at one place of the step.

    activations: saved for backward and not yet freed. logits, loss workspace: see `loss_workspace`. gathered units:
    whole parameters at ZeRO 3. reductions: see predict/reductions.py. fresh gradients: one parameter's before it is
    copied into its buffer, and a tied weight's from the head on, until it meets the embedding's. temporaries:
    gradients of activations, and what else a single layer holds for a moment.
    """

    what: str
    lines: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.lines.values())


def saved(run: RunSpec, layout: Layout, sequences: int, *, cpu: bool = True) -> list[activations.Saved]:
    """What autograd keeps of a micro-batch of `sequences` sequences of this run, laid out so, on the CPU or an
    accelerator."""
    return activations.saved(run.model, layout=layout, **_sizes(run, sequences, cpu))


def _sizes(run: RunSpec, sequences: int, cpu: bool) -> activations.Sizes:
    return {
        "batch": sequences,
        "seq": run.data.seq_len,
        "dtype_bytes": DTYPE_BYTES[run.precision],
        "attention": run.attention,
        "loss": run.loss,
        "dropout": run.dropout,
        "device": "cpu" if cpu else "cuda",
    }


def written_out(run: RunSpec, *, cpu: bool) -> bool:
    """Whether attention scores are computed whole: as asked, or because torch's fused kernel for the CPU drops none."""
    return run.attention == "explicit" or (cpu and run.model.attn_dropout > 0)


def loss_workspace(
    spec: ModelSpec, *, tokens: int, dtype_bytes: int, loss: Literal["full", "chunked"]
) -> dict[str, int]:
    """What the loss of `tokens` tokens holds at its peak beside saved activations.

    Full: backward has two gradients beside the saved log-softmax, its own ("loss workspace") and that of the logits
    ("logits"), both in float32 at least; forward has no more. Chunked: beside the hidden states the logits and
    log-softmax of one chunk, and where parameters are narrow the logits in float32 and the head's gradient as it is
    summed; or later the scaled gradients of hidden states and head.
    """
    wide = max(dtype_bytes, 4)
    if loss == "full" or not tokens:
        copy = tokens * spec.vocab * wide
        return {"logits": copy, "loss workspace": copy}
    copy = min(tokens, LOSS_ROWS) * spec.vocab
    head = spec.vocab * spec.hidden
    narrow = dtype_bytes < wide
    states = tokens * spec.hidden * dtype_bytes
    chunk = states + (2 * copy * wide + head * (wide - dtype_bytes) if narrow else copy * wide)
    product = states + head * wide if narrow else 0
    scaled = states + head * dtype_bytes - copy * dtype_bytes
    return {"logits": copy * dtype_bytes, "loss workspace": max(chunk, product, scaled)}


def moments(run: RunSpec, layout: Layout, sequences: int, *, cpu: bool) -> Iterator[Moment]:
    """Those of a micro-batch of `sequences` sequences and of the update after it, on the CPU or an accelerator."""
    step = _Step(run, layout, sequences, cpu)
    if sequences or (layout.zero == 3 and shards(layout) > 1):
        yield step.loss()
        if run.loss == "full":
            yield step.head()
        yield step.final_norm()
        for index in reversed(range(run.model.layers)):
            if layout.recompute == "selective" and step.written_out:
                yield from step.recompute(index)
            yield from step.mlp(index)
            yield step.attention(index)
        yield step.embedding()
    yield step.update()


class _Step:
    """The moments one by one, and the sizes that they share, in bytes."""

    def __init__(self, run: RunSpec, layout: Layout, sequences: int, cpu: bool) -> None:
        self.run, self.layout, self.spec = run, layout, run.model
        self.tokens = sequences * run.data.seq_len
        self.size = DTYPE_BYTES[run.precision]
        self.wide = max(self.size, 4)
        self.padded = list(padded(run, layout).values())
        held = list(enumerate(units(self.spec, layout.join).values()))  # units by their place in forward
        self.last = len(held) - 1
        self.tied = {place for place, unit in held if unit.tied}
        self.lookup = {place for place, unit in held if unit.lookup}
        self.block = {tensor.block: place for place, unit in held for tensor in unit.tensors}
        self.kept = reductions.kept(run, layout) if cpu else None
        self.wholes = reductions.wholes(run, layout)
        self.alive = Alive(activations.storages(run.model, layout, **_sizes(run, sequences, cpu)), layout)
        self.region = layout.region(self.spec.layers)
        self.hidden = self.tokens * self.spec.hidden * self.size
        self.ffn = self.tokens * self.spec.ffn_width * self.size
        heads = self.spec.heads + 2 * self.spec.num_kv_heads
        self.heads = self.tokens * heads * self.spec.head_width * self.size  # q, k and v
        self.written_out = written_out(run, cpu=cpu)
        self.scores = sequences * self.spec.heads * run.data.seq_len**2
        self.scores *= self.size if run.attention == "explicit" else self.wide
        self.table = self.spec.vocab * self.spec.hidden * self.size
        self.llama = self.spec.family == "llama"

    def loss(self) -> Moment:
        workspace = loss_workspace(self.spec, tokens=self.tokens, dtype_bytes=self.size, loss=self.run.loss)
        by_step = self.layout.zero_gather == "step"
        stay = range(self.last + 1) if by_step else self.tied | {self.last}
        return self._moment("loss", self.last, {"activations": self.alive.everything, **workspace}, gathered=stay)

    def head(self) -> Moment:
        lines = {
            "activations": self.alive.logits,
            "logits": self.tokens * self.spec.vocab * self.size,
            "fresh gradients": self.table,
            "temporaries": self.hidden,
        }
        return self._moment("head", self.last, lines)

    def final_norm(self) -> Moment:
        # On the CPU, RMSNorm's backward has about four copies of the hidden states, in float32 at least.
        norm = 4 * self.hidden // self.size * self.wide if self.llama else self.hidden
        lines = {"activations": self.alive.before("lm_head"), "temporaries": self.hidden + norm}
        return self._moment("final norm", self.last, lines, tied=True)

    def recompute(self, index: int) -> Iterator[Moment]:
        masked = self.scores if self.spec.causal else 0
        again = 0 if "softmax" in self.layout.kept_operators else self.scores
        places = {"scores": masked, "softmax": masked + again}
        if self.spec.attn_dropout:
            # Written out here, the masked scores stay to the end; by torch, narrow weights are rounded once for nobody.
            beside = masked if self.run.attention == "explicit" else self.scores * (self.size < self.wide) // 2
            places["dropped weights"] = self.scores + beside
        for before, temporaries in places.items():
            lines = {
                "activations": self.alive.recomputing(index, before),
                "temporaries": self.hidden + self.heads + temporaries,
            }
            yield self._moment(f"recompute of block {index}", self.block[index], lines, tied=True)

    def mlp(self, index: int) -> Iterator[Moment]:
        end = self.alive.block_ends[index]
        what, place = f"MLP of block {index}", self.block[index]
        last = {
            "activations": end,
            "fresh gradients": self.spec.hidden * self.spec.ffn_width * self.size,
            "temporaries": self.hidden + self.ffn,
        }
        yield self._moment(what, place, last, tied=True)
        # Then the product's value is gone, and beside its gradient there is that of its factor, or factors.
        factors = 2 if self.llama else 1
        inner = {"activations": end - self.ffn, "temporaries": self.hidden + (1 + factors) * self.ffn}
        yield self._moment(what, place, inner, tied=True)

    def attention(self, index: int) -> Moment:
        end = self.alive.before(f"{self._block(index)}.{'post_attention_layernorm' if self.llama else 'ln_2'}")
        temporaries = 2 * self.hidden + self.heads
        if self.written_out:
            temporaries += 2 * self.scores
        lines = {"activations": end, "temporaries": temporaries}
        return self._moment(f"attention of block {index}", self.block[index], lines, tied=True)

    def embedding(self) -> Moment:
        tables = [t.numel for t in tensors(self.spec) if t.tied or t.lookup]
        lines = {"fresh gradients": max(tables) * self.size, "temporaries": self.hidden}
        return self._moment("embedding", 0, lines, tied=True)

    def update(self) -> Moment:
        part = 0
        if gradient_bytes(self.run) < master_bytes(self.run):
            part = min(max(self.padded) // shards(self.layout), WIDENED) * master_bytes(self.run)
        return Moment("update", dict.fromkeys(LINES, 0) | {"reductions": self.kept or 0, "temporaries": part})

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
            found["reductions"] = reductions.on_their_way(
                self.run, self.layout, self.wholes, None if what == "loss" else left
            )
        if tied and self.tied:
            found["fresh gradients"] += self.table
        return Moment(what, found)

    def _gathered(self, place: int) -> Collection[int]:
        """Places of the units that are whole while backward is in the one at `place`: see parallel/residency.py."""
        micros = micro_steps(self.run.batch.sequences, self.layout.data_ranks, self.run.batch.micro)
        if self.layout.zero_gather == "step":
            return range((self.last if micros > 1 else place) + 1)
        # A region's blocks stay from its recompute until backward has been through each.
        index = place - self.block[0]
        first = place - (index % self.region if 0 <= index < self.spec.layers else 0)
        near = range(max(first - self.layout.zero_ahead, 0), place + 1)
        return self.tied | (set(near) - self.lookup)

    def _block(self, index: int) -> str:
        return f"model.layers.{index}" if self.llama else f"transformer.h.{index}"
