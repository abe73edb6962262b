"""The activation memory of a transformer layer as Korthikanti et al. count it, tensor by tensor.

"Reducing Activation Recomputation in Large Transformer Models" (2022, arXiv 2205.05198), section 4.1: a GPT layer on
one device, two bytes a value, one byte an element of a dropout mask, keeps s·b·h·(34 + 5·a·s/h) bytes of a micro-batch
of b sequences of s tokens, with width h and a heads. The mean and 1/σ of LayerNorm, two numbers a token, are left out.
Over t tensor ranks what has heads and feed-forward units is dealt out, s·b·h·(10 + 24/t + 5·a·s/(h·t)) (section 4.2.1);
beside them sequence parallelism deals out the rest, s·b·h/t·(34 + 5·a·s/h) (4.2.2); and where the softmax, its mask and
the dropped weights are computed again it is 34·s·b·h/t (section 5).
No run reads it: predict/activations.py and docs/activations.md are held against it, term by term.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec

ONE_DEVICE = Layout(dp=1)


@dataclass(frozen=True, slots=True)
class Term:
    """One tensor: the paper's heading and words, where our GPT-2 block saves it, and what of (see activations.Saved).

    It has sbh · s·b·h + ass · a·s²·b bytes. dealt_out: over the tensor ranks, also without sequence parallelism.
    """

    heading: str
    paper: str
    where: str
    what: str
    sbh: int = 0
    ass: int = 0
    dealt_out: bool = True

    def bytes(self, spec: ModelSpec, *, batch: int, seq: int, layout: Layout = ONE_DEVICE) -> int:
        whole = self.sbh * seq * batch * spec.hidden + self.ass * spec.heads * seq * seq * batch
        return whole // layout.tp if self.dealt_out or layout.sp else whole

    def formula(self) -> str:
        """ "2 sbh", "1 as²b"."""
        return f"{self.sbh} sbh" if self.sbh else f"{self.ass} as²b"


MASK = "dropout mask, a byte an element"
TERMS = (
    Term("LayerNorm", "input of the first", "ln_1", "residual stream", sbh=2, dealt_out=False),
    Term(
        "attention",
        "shared input of the Q, K and V products",
        "attn.c_attn",
        "normed input of q, k, v",
        sbh=2,
        dealt_out=False,
    ),
    Term("attention", "QKᵀ: Q", "attn.core", "q", sbh=2),
    Term("attention", "QKᵀ: K", "attn.core", "k", sbh=2),
    Term("attention", "attention over values: V", "attn.core", "v", sbh=2),
    Term("attention", "softmax", "attn.core", "softmax", ass=2),
    Term("attention", "softmax dropout: mask", "attn.core.dropout", MASK, ass=1),
    Term("attention", "attention over values: dropout output", "attn.core", "dropped weights", ass=2),
    Term("attention", "input of the linear projection", "attn.c_proj", "output of attention", sbh=2),
    Term("attention", "attention dropout: mask", "attn_dropout", MASK, sbh=1, dealt_out=False),
    Term("LayerNorm", "input of the second", "ln_2", "residual stream", sbh=2, dealt_out=False),
    Term("MLP", "input of the first linear layer", "mlp.c_fc", "normed input", sbh=2, dealt_out=False),
    Term("MLP", "input of GELU", "mlp", "before GELU", sbh=8),
    Term("MLP", "input of the second linear layer", "mlp.c_proj", "after GELU", sbh=8),
    Term("MLP", "dropout: mask", "mlp_dropout", MASK, sbh=1, dealt_out=False),
)


def layer_bytes(
    spec: ModelSpec, *, batch: int, seq: int, layout: Layout = ONE_DEVICE, attention_again: bool = False
) -> int:
    """The paper's sums for a layer, as in its table 2: s·b·h·(34 + 5·a·s/h) on one device, and over tensor ranks.

    attention_again: the selective recomputation of the paper, which is not our recompute=selective.
    """
    s, b, h, a, t = seq, batch, spec.hidden, spec.heads, layout.tp
    scores = 0 if attention_again else 5 * a * s * s * b
    if layout.sp:
        return (34 * s * b * h + scores) // t
    return 10 * s * b * h + (24 * s * b * h + scores) // t
