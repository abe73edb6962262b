"""The activation memory of a transformer layer as Korthikanti et al. count it, tensor by tensor.

"Reducing Activation Recomputation in Large Transformer Models" (2022, arXiv 2205.05198), section 4.1: a GPT layer on
one device, two bytes a value, one byte an element of a dropout mask, keeps s·b·h·(34 + 5·a·s/h) bytes of a micro-batch
of b sequences of s tokens, with width h and a heads. The mean and 1/σ of LayerNorm, two numbers a token, are left out.
No run reads it: predict/activations.py and docs/activations.md are held against it, term by term.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Term:
    """One tensor: the paper's heading and words, where our GPT-2 block saves it, and what of (see activations.Saved).

    It has sbh · s·b·h + ass · a·s²·b bytes.
    """

    heading: str
    paper: str
    where: str
    what: str
    sbh: int = 0
    ass: int = 0

    def bytes(self, spec: ModelSpec, *, batch: int, seq: int) -> int:
        return self.sbh * seq * batch * spec.hidden + self.ass * spec.heads * seq * seq * batch

    def formula(self) -> str:
        """ "2 sbh", "1 as²b"."""
        return f"{self.sbh} sbh" if self.sbh else f"{self.ass} as²b"


MASK = "dropout mask, a byte an element"
TERMS = (
    Term("LayerNorm", "input of the first", "ln_1", "residual stream", sbh=2),
    Term("attention", "shared input of the Q, K and V products", "attn.c_attn", "normed input of q, k, v", sbh=2),
    Term("attention", "QKᵀ: Q", "attn.core", "q", sbh=2),
    Term("attention", "QKᵀ: K", "attn.core", "k", sbh=2),
    Term("attention", "attention over values: V", "attn.core", "v", sbh=2),
    Term("attention", "softmax", "attn.core", "softmax", ass=2),
    Term("attention", "softmax dropout: mask", "attn.core.dropout", MASK, ass=1),
    Term("attention", "attention over values: dropout output", "attn.core", "dropped weights", ass=2),
    Term("attention", "input of the linear projection", "attn.c_proj", "output of attention", sbh=2),
    Term("attention", "attention dropout: mask", "attn_dropout", MASK, sbh=1),
    Term("LayerNorm", "input of the second", "ln_2", "residual stream", sbh=2),
    Term("MLP", "input of the first linear layer", "mlp.c_fc", "normed input", sbh=2),
    Term("MLP", "input of GELU", "mlp", "before GELU", sbh=8),
    Term("MLP", "input of the second linear layer", "mlp.c_proj", "after GELU", sbh=8),
    Term("MLP", "dropout: mask", "mlp_dropout", MASK, sbh=1),
)


def layer_bytes(spec: ModelSpec, *, batch: int, seq: int) -> int:
    """s·b·h·(34 + 5·a·s/h), equation 1."""
    s, b, h, a = seq, batch, spec.hidden, spec.heads
    return 34 * s * b * h + 5 * a * s * s * b
