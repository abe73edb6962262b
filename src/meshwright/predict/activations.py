"""What autograd keeps for backward of one micro-batch of the plain model, tensor by tensor.

Each storage stands once, under the module whose forward is first to save it, at the storage's full size. Left out
is what exists without autograd: parameters, buffers (the rotary table) and the inputs (tokens, targets, positions
that a caller gives). `meshwright.verify.activations` measures the same on a real model; on the CPU the two agree
to the byte. The fused attention is taken to keep its inputs, output and row sums, as flash attention does
(Dao 2023, arXiv 2307.08691), so its memory is linear in the sequence length; written out it is quadratic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.predict.params import rotary_length
from meshwright.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Saved:
    """One storage: the module that saves it (its name in the model, "" for the model itself), what it is, bytes."""

    where: str
    what: str
    bytes: int


def saved(
    spec: ModelSpec,
    *,
    batch: int,
    seq: int,
    dtype_bytes: int = 4,
    attention: Literal["sdpa", "explicit"] = "sdpa",
    loss: Literal["full", "chunked"] = "full",
    dropout: Literal["counter", "torch"] = "counter",
    device: Literal["cpu", "cuda"] = "cpu",
) -> list[Saved]:
    """Storages kept between forward and backward in training, `batch` sequences of `seq` tokens; none for no batch.

    `dtype_bytes` are those of parameters and hidden states (float32: 4, float64: 8); statistics and loss are kept in
    float32 at least, but for LayerNorm's on the CPU. "cuda" stands for any accelerator.
    """
    if batch == 0:
        return []
    shapes = _Shapes(spec, batch, seq, dtype_bytes, attention, dropout, device)
    family = shapes.gpt2() if spec.family == "gpt2" else shapes.llama()
    return [Saved(where, what, size) for where, what, size in (*family, *shapes.loss(loss)) if size]


def total(storages: Sequence[Saved]) -> int:
    """Bytes of all of them."""
    return sum(s.bytes for s in storages)


Row = tuple[str, str, int]


class _Shapes:
    """Sizes in bytes that the rows share, and the rows of each part of the model."""

    def __init__(
        self, spec: ModelSpec, batch: int, seq: int, size: int, attention: str, dropout: str, device: str
    ) -> None:
        self.spec, self.batch, self.seq, self.size, self.attention = spec, batch, seq, size, attention
        self.dropout, self.cpu = dropout, device == "cpu"
        self.tokens = batch * seq
        self.wide = max(size, 4)
        self.hidden = self.tokens * spec.hidden * size
        self.ffn = self.tokens * spec.ffn_width * size
        self.q = self.tokens * spec.heads * spec.head_width * size
        self.kv = self.tokens * spec.num_kv_heads * spec.head_width * size
        self.statistic = self.tokens * self.wide  # one number a token

    # -- Llama ---------------------------------------------------------------------------------------------------

    def llama(self) -> Iterator[Row]:
        for i in range(self.spec.layers):
            at = f"model.layers.{i}"
            yield from self._rms_norm(f"{at}.input_layernorm", "residual stream", self.hidden, 1)
            yield f"{at}.self_attn.q_proj", "normed input of q, k, v", self.hidden
            if i == 0:
                for what in ("cos", "sin"):  # one for all layers
                    yield f"{at}.self_attn", f"{what} beyond the stored table", self._long_table()
            if self.spec.qk_norm:
                yield from self._rms_norm(f"{at}.self_attn.q_norm", "q before its norm", self.q, self.spec.heads)
                kv_heads = self.spec.num_kv_heads
                yield from self._rms_norm(f"{at}.self_attn.k_norm", "k before its norm", self.kv, kv_heads)
            yield from self._core(f"{at}.self_attn", i, output=f"{at}.self_attn.o_proj")
            yield from self._rms_norm(f"{at}.post_attention_layernorm", "residual stream", self.hidden, 1)
            yield f"{at}.mlp.gate_proj", "normed input of gate, up", self.hidden
            for what in ("gate", "silu(gate)", "up"):
                yield f"{at}.mlp", what, self.ffn
            yield f"{at}.mlp.down_proj", "silu(gate) · up", self.ffn
        yield from self._rms_norm("model.norm", "residual stream", self.hidden, 1)

    def _rms_norm(self, where: str, what: str, size: int, heads: int) -> Iterator[Row]:
        yield where, what, size
        yield where, "inverse root mean square", heads * self.statistic

    def _long_table(self) -> int:
        """Bytes of cos (and of sin) where the sequence is longer than the stored table."""
        long = self.seq > rotary_length(self.spec)
        return self.seq * self.spec.head_width * self.wide if long else 0

    # -- GPT-2 ---------------------------------------------------------------------------------------------------

    def gpt2(self) -> Iterator[Row]:
        yield "transformer.wpe", "positions", self.seq * 8
        yield from self._dropout("dropout", self.spec.embd_dropout, self.tokens * self.spec.hidden)
        for i in range(self.spec.layers):
            at = f"transformer.h.{i}"
            yield from self._layer_norm(f"{at}.ln_1")
            yield f"{at}.attn.c_attn", "normed input of q, k, v", self.hidden
            yield from self._core(f"{at}.attn", i, output=f"{at}.attn.c_proj")
            yield from self._dropout(f"{at}.attn_dropout", self.spec.resid_dropout, self.tokens * self.spec.hidden)
            yield from self._layer_norm(f"{at}.ln_2")
            yield f"{at}.mlp.c_fc", "normed input", self.hidden
            yield f"{at}.mlp", "before GELU", self.ffn
            yield f"{at}.mlp.c_proj", "after GELU", self.ffn
            yield from self._dropout(f"{at}.mlp_dropout", self.spec.resid_dropout, self.tokens * self.spec.hidden)
        yield from self._layer_norm("transformer.ln_f")

    def _layer_norm(self, where: str) -> Iterator[Row]:
        yield where, "residual stream", self.hidden
        # torch's kernel for the CPU keeps them in the dtype of x.
        for what in ("mean", "inverse standard deviation"):
            yield where, what, self.tokens * (self.size if self.cpu else self.wide)

    def _dropout(self, where: str, p: float, elements: int) -> Iterator[Row]:
        if p and self.dropout == "torch" and self.cpu:
            yield where, "dropout factors, 0 or 1 / (1 − p)", elements * self.size
        elif p:
            yield where, "dropout mask, a byte an element", elements

    # -- both ----------------------------------------------------------------------------------------------------

    def _core(self, at: str, layer: int, output: str) -> Iterator[Row]:
        if self.attention == "sdpa" and self.spec.attn_dropout and self.cpu:
            return self._unfused(f"{at}.core", output)
        if self.attention == "sdpa":
            return self._fused(f"{at}.core", layer)
        return self._written_out(f"{at}.core", output)

    def _fused(self, core: str, layer: int) -> Iterator[Row]:
        if self.spec.family == "gpt2":
            yield core, "q, k and v in one", self.q + 2 * self.kv
        else:
            yield core, "q", self.q
            yield core, "k", self.kv
            yield core, "v", self.kv
        yield core, "output", self.q
        yield core, "log-sum of each softmax row", self.spec.heads * self.statistic
        if layer == 0 and self.spec.window is not None and self.spec.window < self.seq:
            yield core, "window mask, shared by all layers", self.seq * self.seq * self.size

    def _unfused(self, core: str, output: str) -> Iterator[Row]:
        """What torch makes of its fused attention on the CPU where it is to drop weights; GPT-2 only."""
        wide = self.q // self.size * self.wide
        square = self.batch * self.spec.heads * self.seq * self.seq * self.wide
        yield core, "q, scaled", wide
        yield core, "k, scaled", wide
        # v is copied where it is widened, and where its sequences and heads cannot be one dimension as they lie.
        if self.size < self.wide or (self.batch > 1 and self.spec.heads > 1):
            yield core, "v", wide
        else:
            yield core, "v within q, k, v in one", 3 * self.q
        yield core, "softmax", square
        yield core, "dropout factors, 0 or 1 / (1 − p)", square
        yield core, "dropped weights", square
        yield output, "output of attention", self.q

    def _written_out(self, core: str, output: str) -> Iterator[Row]:
        spec = self.spec
        square = self.batch * spec.heads * self.seq * self.seq
        yield core, "q", self.q
        if spec.family == "gpt2" and self.tokens == 1:
            yield core, "k and v within q, k, v in one", self.q + 2 * self.kv  # a single row is not copied
        else:
            yield core, "k", self.kv
            yield core, "v", self.kv
        yield core, "softmax", square * self.size
        if spec.attn_dropout:
            yield from self._dropout(f"{core}.dropout", spec.attn_dropout, square)
            yield core, "dropped weights", square * self.size
        yield output, "output of attention", self.q

    def loss(self, loss: str) -> Iterator[Row]:
        if loss == "chunked":
            yield "lm_head", "gradient of the hidden states", self.hidden
            yield "lm_head", "gradient of the head", self.spec.vocab * self.spec.hidden * self.size
        else:
            yield "lm_head", "normed input", self.hidden
            yield "", "log-softmax", self.tokens * self.spec.vocab * self.wide
            yield "", "number of valid tokens", self.wide
