"""The tensors of one micro-batch's forward that autograd saves, and those that a recompute may keep, one by one.

Each storage stands once, under the module whose forward is first to save it, at the storage's full size. Left out
is what exists without autograd: parameters, buffers (the rotary table) and the inputs (tokens, targets, positions
that a caller gives). `meshwright.verify.activations` measures the same on a real model; on the CPU the two agree
to the byte. The fused attention is taken to keep its inputs, output and row sums, as flash attention does
(Dao 2023, arXiv 2307.08691), so its memory is linear in the sequence length; written out it is quadratic.

With tensor ranks each has its heads and feed-forward units, and of the softmax over the vocabulary its words; with
sequence parallelism its part of the sequence wherever heads and units are not dealt out (Korthikanti et al. 2022,
section 4.2). With context ranks each has its part of every sequence everywhere, and for attention what
predict/context.py says. A pipeline stage has those of its own blocks, the embedding's if it is the first and the loss's
if it is the last; what all blocks share is made by each stage for its own, and its received input is the input of its
first block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Required, TypedDict

from meshwright.predict.context import Attention
from meshwright.predict.context import kept as kept_over_ranks
from meshwright.predict.params import rotary_length, whole
from meshwright.spec.layout import Layout, Operators
from meshwright.spec.model import ModelSpec
from meshwright.spec.stages import Stage


@dataclass(frozen=True, slots=True)
class Saved:
    """One storage: the module that saves it (its name in the model), what it is, bytes."""

    where: str
    what: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Storage(Saved):
    """A storage of the plain model's forward, by what recompute asks.

    by: the word of the operator whose output it is, None for all that cannot be kept. saved: whether autograd keeps
    it where nothing is computed again. shared: made outside the blocks and given to all of them.
    """

    by: Operators | None = None
    saved: bool = True
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """Storages in the order in which forward comes to save them: before the blocks, of each block, after them, and of
    the loss.

    The first of a block is its input. A pipeline stage has its own blocks', and nothing before or after them where that
    is another stage's.
    """

    before: tuple[Storage, ...]
    blocks: tuple[tuple[Storage, ...], ...]
    after: tuple[Storage, ...]
    loss: tuple[Storage, ...]


def storages(
    spec: ModelSpec,
    layout: Layout | None = None,
    *,
    batch: int,
    seq: int,
    dtype_bytes: int = 4,
    attention: Literal["sdpa", "explicit"] = "sdpa",
    loss: Literal["full", "chunked"] = "full",
    dropout: Literal["counter", "torch"] = "counter",
    device: Literal["cpu", "cuda"] = "cpu",
    packed: bool = False,
    stage: Stage | None = None,
) -> Parts:
    """Those of `batch` sequences of `seq` tokens in training, on a tensor rank of `layout`; none for no batch.

    `dtype_bytes` are those of parameters and hidden states (float32: 4, float64: 8); statistics and loss are kept in
    float32 at least, but for LayerNorm's on the CPU. "cuda" stands for any accelerator. packed: sequences are made of
    documents. stage: of a pipeline; by default the whole model.
    """
    stage = stage or whole(spec)
    if batch == 0:
        return Parts((), ((),) * len(stage.blocks), (), ())
    shapes = _Shapes(spec, layout or Layout(), batch, seq, dtype_bytes, attention, dropout, device, packed, stage.start)
    gpt2 = spec.family == "gpt2"
    block = shapes.gpt2_block if gpt2 else shapes.llama_block
    before = shapes.gpt2_embedding() if gpt2 else shapes.llama_embedding()
    norm = shapes.gpt2_norm() if gpt2 else shapes.llama_norm()
    return Parts(
        _listed(before) if stage.first else (),
        tuple(_listed(block(i)) for i in stage.blocks),
        (*_listed(norm), *_listed(shapes.head(loss))) if stage.last else (),
        _listed(shapes.loss(loss)) if stage.last else (),
    )


class Sizes(TypedDict, total=False):
    """What `storages` asks beside the model."""

    batch: Required[int]
    seq: Required[int]
    dtype_bytes: int
    attention: Literal["sdpa", "explicit"]
    loss: Literal["full", "chunked"]
    dropout: Literal["counter", "torch"]
    device: Literal["cpu", "cuda"]
    packed: bool
    stage: Stage | None


Row = tuple[str, str, int] | Storage
"""A tuple (where, what, bytes) is what autograd saves and no operator that can be kept has made."""


def _listed(rows: Iterator[Row]) -> tuple[Storage, ...]:
    made = (row if isinstance(row, Storage) else Storage(*row) for row in rows)
    return tuple(row for row in made if row.bytes)


class _Shapes:
    """Sizes in bytes that the rows share, and the rows of each part of the model."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        batch: int,
        seq: int,
        size: int,
        attention: str,
        dropout: str,
        device: str,
        packed: bool,
        leader: int,
    ) -> None:
        """leader: the block that comes first, under which stands what all share."""
        self.spec, self.layout, self.batch, self.size, self.packed = spec, layout, batch, size, packed
        self.leader = leader
        self.length, self.seq = seq, seq // layout.cp  # of the sequences, and of this rank's part of each
        self.attention, self.dropout, self.cpu = attention, dropout, device == "cpu"
        tp = layout.tp
        self.heads, self.kv_heads = spec.heads // tp, -(-spec.num_kv_heads // tp)  # of this rank
        self.vocab = -(-spec.vocab // tp)
        self.tokens = batch * self.seq
        self.mine = self.tokens // (tp if layout.sp else 1)  # tokens where heads and units are not dealt out
        self.wide = max(size, 4)
        self.hidden = self.mine * spec.hidden * size
        self.ffn = self.tokens * (spec.ffn_width // tp) * size
        self.q = self.tokens * self.heads * spec.head_width * size
        self.kv = self.tokens * self.kv_heads * spec.head_width * size

    # -- Llama ---------------------------------------------------------------------------------------------------

    def llama_embedding(self) -> Iterator[Row]:
        return self._words("model.embed_tokens")

    def llama_block(self, i: int) -> Iterator[Row]:
        at = f"model.layers.{i}"
        yield from self._rms_norm(f"{at}.input_layernorm", "residual stream", self.hidden, self.mine)
        yield f"{at}.self_attn.q_proj", "normed input of q, k, v", self.hidden
        if i == self.leader:
            where = "at the tokens' positions" if self._looked_up else "beyond the stored table"
            for what in ("cos", "sin"):  # one for all layers
                yield Storage(f"{at}.self_attn", f"{what} {where}", self._table(), shared=True)
        for name, size, heads in (("q", self.q, self.heads), ("k", self.kv, self.kv_heads)):
            if self.spec.qk_norm:
                where = f"{at}.self_attn.{name}_norm"
                yield from self._rms_norm(where, f"{name} before its norm", size, heads * self.tokens, by="linear")
            else:
                yield Storage(f"{at}.self_attn.{name}_proj", f"{name} before rotation", size, "linear", saved=False)
        yield from self._core(f"{at}.self_attn", i, output=f"{at}.self_attn.o_proj")
        yield Storage(f"{at}.self_attn.o_proj", "output of o", self.hidden, "linear", saved=False)
        yield from self._rms_norm(f"{at}.post_attention_layernorm", "residual stream", self.hidden, self.mine)
        yield f"{at}.mlp.gate_proj", "normed input of gate, up", self.hidden
        yield Storage(f"{at}.mlp", "gate", self.ffn, "linear")
        yield Storage(f"{at}.mlp", "silu(gate)", self.ffn, "activation")
        yield Storage(f"{at}.mlp", "up", self.ffn, "linear")
        yield f"{at}.mlp.down_proj", "silu(gate) · up", self.ffn
        yield Storage(f"{at}.mlp.down_proj", "output of down", self.hidden, "linear", saved=False)

    def llama_norm(self) -> Iterator[Row]:
        return self._rms_norm("model.norm", "residual stream", self.hidden, self.mine)

    def _rms_norm(self, where: str, what: str, size: int, rows: int, by: Operators | None = None) -> Iterator[Row]:
        yield Storage(where, what, size, by)
        yield where, "inverse root mean square", rows * self.wide

    def _table(self) -> int:
        """Bytes of cos (and of sin) where they are no part of the stored table: that sequences are longer than, or of
        which rows are taken here and there, for a context rank or, of each sequence others, for documents."""
        made = self._looked_up or self.seq > rotary_length(self.spec, self.seq)
        rows = self.tokens if self.packed else self.seq
        return rows * self.spec.head_width * self.wide if made else 0

    @property
    def _looked_up(self) -> bool:
        return self.packed or self.layout.cp > 1

    # -- GPT-2 ---------------------------------------------------------------------------------------------------

    def gpt2_embedding(self) -> Iterator[Row]:
        yield from self._words("transformer.wte")
        if self.layout.cp == 1:  # else they are given
            # Of all, where a part is looked up too.
            yield "transformer.wpe", "positions", (self.tokens if self.packed else self.seq) * 8
        yield from self._dropout("dropout", self.spec.embd_dropout, self.mine * self.spec.hidden)

    def gpt2_block(self, i: int) -> Iterator[Row]:
        at = f"transformer.h.{i}"
        yield from self._layer_norm(f"{at}.ln_1")
        yield f"{at}.attn.c_attn", "normed input of q, k, v", self.hidden
        yield from self._core(f"{at}.attn", i, output=f"{at}.attn.c_proj")
        yield Storage(f"{at}.attn.c_proj", "output of the projection", self.hidden, "linear", saved=False)
        yield from self._dropout(f"{at}.attn_dropout", self.spec.resid_dropout, self.mine * self.spec.hidden)
        yield from self._layer_norm(f"{at}.ln_2")
        yield f"{at}.mlp.c_fc", "normed input", self.hidden
        yield Storage(f"{at}.mlp", "before GELU", self.ffn, "linear")
        yield Storage(f"{at}.mlp.c_proj", "after GELU", self.ffn, "activation")
        yield Storage(f"{at}.mlp.c_proj", "output of the projection", self.hidden, "linear", saved=False)
        yield from self._dropout(f"{at}.mlp_dropout", self.spec.resid_dropout, self.mine * self.spec.hidden)

    def gpt2_norm(self) -> Iterator[Row]:
        return self._layer_norm("transformer.ln_f")

    def _layer_norm(self, where: str) -> Iterator[Row]:
        yield where, "residual stream", self.hidden
        # torch's kernel for the CPU keeps them in the dtype of x.
        for what in ("mean", "inverse standard deviation"):
            yield where, what, self.mine * (self.size if self.cpu else self.wide)

    def _dropout(self, where: str, p: float, elements: int) -> Iterator[Row]:
        if p and self.dropout == "torch" and self.cpu:
            yield where, "dropout factors, 0 or 1 / (1 − p)", elements * self.size
        elif p:
            yield where, "dropout mask, a byte an element", elements

    # -- both ----------------------------------------------------------------------------------------------------

    def _words(self, where: str) -> Iterator[Row]:
        """Of an embedding whose words are dealt out. A whole one keeps the tokens, which are there anyway."""
        if self.layout.tp > 1:
            yield where, "tokens among this rank's words", self.tokens * 8
            yield where, "whose words are other ranks'", self.tokens

    def _core(self, at: str, layer: int, output: str) -> Iterator[Row]:
        if self.layout.cp > 1:
            return self._over_ranks(f"{at}.core", output)
        if self.attention == "sdpa" and self.spec.attn_dropout and self.cpu:
            return self._unfused(f"{at}.core", layer, output)
        if self.attention == "sdpa":
            return self._fused(f"{at}.core", layer)
        return self._written_out(f"{at}.core", layer, output)

    def _fused(self, core: str, layer: int) -> Iterator[Row]:
        if self.spec.family == "gpt2":
            yield Storage(core, "q, k and v in one", self.q + 2 * self.kv, "linear")
        else:
            yield core, "q", self.q
            yield core, "k", self.kv
            yield Storage(core, "v", self.kv, "linear")
        yield Storage(core, "output", self.q, "attention")
        yield Storage(core, "log-sum of each softmax row", self.heads * self.tokens * self.wide, "attention")
        if layer == self.leader and (self.packed or (self.spec.window is not None and self.spec.window < self.seq)):
            yield Storage(core, "mask, shared by all layers", self._mask(), shared=True)

    def _mask(self) -> int:
        """Bytes of what all layers add to their scores: one square, or with documents one for each sequence."""
        return (self.batch if self.packed else 1) * self.seq * self.seq * self.size

    def _over_ranks(self, core: str, output: str) -> Iterator[Row]:
        """With context ranks: the keys and values as they are sent in one, and what the method keeps."""
        it = Attention.of(self.spec, self.layout, batch=self.batch, seq=self.length, dtype_bytes=self.size)
        made = ("q, k and v in one", 3 * self.q) if self.spec.family == "gpt2" else ("v", self.kv)
        yield Storage(core, *made, "linear", saved=False)
        for what, size, word in kept_over_ranks(it):
            # rsa's softmax is kept by either word.
            either = what == "softmax" and "attention" not in self.layout.kept_operators
            by: Operators | None = "softmax" if either else word
            # By-products aside, rsa and what deals heads out leave the output to the product behind it.
            behind = what == "output" and (it.over > 1 or it.method == "rsa")
            yield Storage(output if behind else core, what, size, by)

    def _unfused(self, core: str, layer: int, output: str) -> Iterator[Row]:
        """What torch makes of its fused attention on the CPU where it is to drop weights; GPT-2 only."""
        if layer == self.leader and self.packed:
            yield Storage(core, "mask, shared by all layers", self._mask(), saved=False, shared=True)
        narrow = self.size < self.wide
        wide = self.q // self.size * self.wide
        square = self.batch * self.heads * self.seq * self.seq * self.wide
        # v is copied where it is widened, and where its sequences and heads cannot be one dimension as they lie.
        copied = narrow or (self.batch > 1 and self.heads > 1)
        if copied:
            yield Storage(core, "q, k and v in one", 3 * self.q, "linear", saved=False)
        yield core, "q, scaled", wide
        yield core, "k, scaled", wide
        yield (core, "v", wide) if copied else Storage(core, "v within q, k, v in one", 3 * self.q, "linear")
        yield Storage(core, "scores", square, "attention", saved=False)
        yield Storage(core, "softmax", square, "softmax")
        yield core, "dropout factors, 0 or 1 / (1 − p)", square
        yield core, "dropped weights", square
        if narrow or (self.heads > 1 and self.seq > 1):
            yield Storage(core, "output by head", wide, "attention", saved=False)
            yield output, "output of attention", self.q
        else:
            yield Storage(output, "output of attention", self.q, "attention")

    def _written_out(self, core: str, layer: int, output: str) -> Iterator[Row]:
        spec = self.spec
        square = self.batch * self.heads * self.seq * self.seq
        if layer == self.leader and (spec.causal or self.packed):
            yield Storage(core, "mask, shared by all layers", self._mask(), saved=False, shared=True)
        yield core, "q", self.q
        if spec.family == "gpt2":
            all_of_it = self.q + 2 * self.kv
            if self.tokens == 1:  # a single row is not copied
                yield Storage(core, "k and v within q, k, v in one", all_of_it, "linear")
            else:
                yield Storage(core, "q, k and v in one", all_of_it, "linear", saved=False)
                yield core, "k", self.kv
                yield core, "v", self.kv
        else:
            yield core, "k", self.kv
            if self.kv_heads > 1 and self.seq > 1:
                yield Storage(core, "v before its copy", self.kv, "linear", saved=False)
                yield core, "v", self.kv
            else:
                yield Storage(core, "v", self.kv, "linear")
        yield Storage(core, "scores", square * self.size, "attention", saved=False)
        yield Storage(core, "softmax", square * self.size, "softmax")
        if spec.attn_dropout:
            yield from self._dropout(f"{core}.dropout", spec.attn_dropout, square)
            yield core, "dropped weights", square * self.size
        if self.heads > 1 and self.seq > 1:
            yield Storage(core, "output by head", self.q, "attention", saved=False)
            yield output, "output of attention", self.q
        else:  # no heads to bring together
            yield Storage(output, "output of attention", self.q, "attention")

    def head(self, loss: str) -> Iterator[Row]:
        if loss == "full":
            yield "lm_head", "normed input", self.hidden

    def loss(self, loss: str) -> Iterator[Row]:
        logits = self.tokens * self.vocab * self.wide
        if loss == "chunked":
            # Of the whole sequence: the ranks' gradients are added in backward.
            yield "lm_head", "gradient of the hidden states", self.tokens * self.spec.hidden * self.size
            yield "lm_head", "gradient of the head", self.vocab * self.spec.hidden * self.size
        elif self.layout.tp > 1:
            yield "lm_head", "softmax over this rank's words", logits
            yield "lm_head", "targets among this rank's words", self.tokens * 8
            yield "lm_head", "whose targets count", self.tokens
        else:
            yield "lm_head", "log-softmax", logits
            yield "lm_head", "number of valid tokens", self.wide
