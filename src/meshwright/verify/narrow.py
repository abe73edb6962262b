"""What a layout may be wrong by in two-byte numbers: as much as one device is in the same precision, and no more.

Their kernels differ from one processor to the next, and with them the distance from float64, so no fixed bound is
right everywhere. A gradient that is farther away than the fixed one is held against that of the plain model in the
run's own precision: same weights, same micro-batches, added up in `grad_dtype`. Like the reference that model knows no
mesh and no strategy. See docs/decisions/narrow-bounds.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from meshwright.model.build import DTYPES, build
from meshwright.model.dropout import DropoutKey
from meshwright.model.init import initialise_
from meshwright.model.loss import IGNORE
from meshwright.predict.stages import tensors_on
from meshwright.spec.run import RunSpec
from meshwright.train.lossscale import LossScale
from meshwright.verify.compare import BOUNDS, Comparison, bound_of, compare_tensors, differences, is_narrow
from meshwright.verify.evidence import Evidence
from meshwright.verify.reference import reference, take
from meshwright.verify.unequal import proof_data

TIMES = 2.0
"""How much farther from float64 than one device a layout may be: as many roundings, in other places."""


def expected_of(run: RunSpec, steps: int, ranks: Sequence[Evidence]) -> Evidence:
    """The reference's evidence for a proof of `run`; in two-byte precisions it follows the ranks from step to step.

    There a gradient that is all rounding decides in which direction Adam takes a whole step, and the next step's
    gradients follow: two runs that are equally right may differ by a hundred times what either rounds.
    """
    return reference(run, proof_data(run), steps, ranks if is_narrow(run) else ())


def compare_run(run: RunSpec, steps: int, ranks: Sequence[Evidence], expected: Evidence) -> list[Comparison]:
    """`compare_tensors` with what `expected_of` gives, within the bounds of the run's precision.

    In two bytes only gradients are: moments and weights are made from these in float32, and held to its bound.
    """
    bound = bound_of(run)
    names = [{tensor.name for tensor in tensors_on(run, run.layout, rank)} for rank in range(len(ranks))]
    compare = partial(compare_tensors, ranks, expected, holds=lambda rank, name: name in names[rank])
    if not is_narrow(run):
        return compare(bound)
    others = {key: bound for key in expected.tensors if key.startswith("gradient/")}
    found = compare(BOUNDS["fp32"], others=others)
    if not all(c.passed for c in found):
        alone = differences(narrow_gradients(run, steps, ranks), expected)
        others = {key: max(bound, TIMES * each) if math.isfinite(each) else bound for key, each in alone.items()}
        found = compare(BOUNDS["fp32"], others=others)
    return found


def narrow_gradients(run: RunSpec, steps: int, ranks: Sequence[Evidence]) -> Evidence:
    """Each step's gradients in the run's precision, of the mean loss a valid token, at the weights that `ranks` had.

    Sums are divided last, as in training: of float16 a mean's gradients would be lost. No overflow is made up for.
    """
    data, evidence = proof_data(run), Evidence()
    masters = build(run.model, attention=run.attention, loss=run.loss, dtype=torch.float32)
    initialise_(masters, run.seed)
    model = build(run.model, attention=run.attention, loss=run.loss, dtype=DTYPES[run.precision]).train()
    summed = torch.float32 if run.grad_dtype == "auto" else DTYPES[run.grad_dtype]
    scale = LossScale.of(run.precision).value
    for step in range(steps):
        if step:
            take(ranks, step, "parameter", dict(masters.named_parameters()))
        model.load_state_dict(masters.state_dict())  # rounds
        ids = data.ids(step, run.batch.sequences)
        valid = max(int((data.batch(ids)[1] != IGNORE).sum()), 1)
        sums = {name: torch.zeros_like(p, dtype=summed) for name, p in model.named_parameters()}
        for rows in torch.arange(len(ids)).split(max(run.batch.micro, 1)):
            key, documents = DropoutKey(run.seed, step, rows), data.documents(ids[rows])
            loss = model(*data.batch(ids[rows]), documents=documents, dropout=key)
            (loss * scale).backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    sums[name] += p.grad
            model.zero_grad(set_to_none=True)
        for name, gradient in sums.items():
            evidence.keep("gradient", step + 1, name, gradient.float() / (valid * scale))
    return evidence
