"""What a layer keeps for backward, tensor by tensor, predicted and measured on the CPU; see docs/activations.md.

    python benchmarks/activations.py [--precision bf16] [--only NAME …]

Bytes are exact and the same on every machine. Measured through autograd's saved-tensor hooks, each storage once; the
script ends with an error where any tensor differs from its prediction.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import torch

from meshwright.model.build import DTYPES, build
from meshwright.model.dropout import DropoutKey
from meshwright.model.init import initialise_
from meshwright.predict import activations
from meshwright.predict.activations import Saved
from meshwright.predict.korthikanti import TERMS, layer_bytes
from meshwright.spec.model import ModelSpec
from meshwright.verify.activations import compare, measure

BATCH, LENGTHS = 2, (512, 1024)
# One layer is shown, the second: the first also has what all share. A small vocabulary keeps the head out of the way.
GPT2 = ModelSpec(
    family="gpt2", vocab=256, hidden=768, layers=2, heads=12, max_seq=1024,
    embd_dropout=0.1, attn_dropout=0.1, resid_dropout=0.1,
)  # fmt: skip
LLAMA = ModelSpec(family="llama", vocab=256, hidden=1024, layers=2, heads=16, kv_heads=4, ffn=2816, max_seq=1024)


@dataclass(frozen=True)
class Case:
    model: ModelSpec
    options: dict[str, str] = field(default_factory=dict)


CASES = {
    "GPT-2, explicit": Case(GPT2, {"attention": "explicit"}),
    "GPT-2, sdpa": Case(GPT2.model_copy(update={"attn_dropout": 0.0}), {"attention": "sdpa"}),
    "GPT-2, sdpa, dropout=torch, CPU": Case(GPT2, {"attention": "sdpa", "dropout": "torch"}),
    "Llama, explicit": Case(LLAMA, {"attention": "explicit"}),
    "Llama, sdpa": Case(LLAMA, {"attention": "sdpa"}),
}


def layer(case: Case, precision: str, seq: int) -> list[Saved]:
    """The rows of the second layer, their modules named within it; predicted, and found to be so."""
    dtype = DTYPES[precision]
    model = build(case.model, dtype=dtype, **case.options).train()  # type: ignore[arg-type]
    initialise_(model, 0)
    tokens = torch.randint(case.model.vocab, (BATCH, seq))
    key = DropoutKey(0, 0, torch.arange(BATCH))
    measured = measure(model, lambda: model(tokens, tokens, dropout=key), inputs=(tokens,))
    foretold = activations.saved(case.model, batch=BATCH, seq=seq, dtype_bytes=dtype.itemsize, **case.options)  # type: ignore[arg-type]
    differences = compare(foretold, measured)
    if differences:
        raise SystemExit(f"predicted and measured differ: {differences}")
    at = "transformer.h.1." if case.model.family == "gpt2" else "model.layers.1."
    return [Saved(r.where.removeprefix(at), r.what, r.bytes) for r in foretold if r.where.startswith(at)]


def show(name: str, case: Case, precision: str) -> None:
    spec = case.model
    lengths = [layer(case, precision, seq) for seq in LENGTHS]
    unit = BATCH * LENGTHS[-1] * spec.hidden
    papers = name == "GPT-2, explicit"
    terms = {(term.where, term.what): term for term in TERMS} if papers else {}
    print(
        f"\n### {name}\n\n{precision}, h = {spec.hidden}, a = {spec.heads}"
        + (f", {spec.num_kv_heads} key-value heads" if spec.num_kv_heads < spec.heads else "")
        + f", feed-forward {spec.ffn_width}, b = {BATCH}\n"
    )
    heads = ["module", "tensor", *(["Korthikanti et al."] if papers else []), f"/ sbh, s = {LENGTHS[-1]}"]
    heads += [f"bytes, s = {seq}" for seq in LENGTHS]
    print(f"| {' | '.join(heads)} |\n|---|---|{'---|' * papers}{'---:|' * 3}")
    for short, long in zip(*lengths, strict=True):
        term = terms.get((long.where, long.what))
        paper = [f"{term.paper}: {term.formula()}" if term else "left out"] if papers else []
        cells = [
            f"`{long.where}`",
            long.what,
            *paper,
            f"{long.bytes / unit:.4g}",
            f"{short.bytes:,}",
            f"{long.bytes:,}",
        ]
        print(f"| {' | '.join(cells)} |")
    sums = [activations.total(rows) for rows in lengths]
    last = [f"**{sums[-1] / unit:.4g}**", *(f"**{number:,}**" for number in sums)]
    print(f"| **all** | {'| ' * papers}| {' | '.join(last)} |")
    if papers:
        formula = [layer_bytes(spec, batch=BATCH, seq=seq) for seq in LENGTHS]
        cells = [f"{formula[-1] / unit:.4g}", *(f"{number:,}" for number in formula)]
        print(f"| **sbh(34 + 5as/h)** | | | {' | '.join(cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    given = parser.parse_args()
    for name in given.only:
        show(name, CASES[name], given.precision)
