"""The reference of every proof: the plain model on one device in float64, with torch's own AdamW, a tensor at a time.

It shares with what it judges the model's files, the data and the learning-rate schedule, and nothing of the mesh,
the strategies, the flat buffers or the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from meshwright.model.build import DTYPES, build
from meshwright.model.dropout import DropoutKey
from meshwright.model.init import initialise_
from meshwright.model.loss import IGNORE
from meshwright.spec.run import RunSpec
from meshwright.train.data import Dataset
from meshwright.train.lr import lr_at
from meshwright.verify.evidence import Evidence
from meshwright.verify.unequal import UnequalData


def reference(run: RunSpec, data: UnequalData | Dataset, steps: int, ranks: Sequence[Evidence] = ()) -> Evidence:
    """Train the plain model for `steps` steps on the whole global batch. All evidence is float64.

    The weights start as the run's master weights do: drawn in their dtype, then widened. Given what `ranks` came to,
    each update is made from their gradients, and each later step begins with their weights and moments, so that every
    part of every step is judged by itself; see docs/decisions/narrow-bounds.md.
    """
    master = torch.promote_types(DTYPES[run.precision], torch.float32)
    model = build(run.model, attention=run.attention, loss=run.loss, dtype=master)
    initialise_(model, run.seed)
    widened = build(run.model, attention=run.attention, loss=run.loss, dtype=torch.float64)
    widened.load_state_dict(model.state_dict())
    model = widened.train()
    adam = _adamw(model, run)
    evidence = Evidence()
    for name, parameter in model.named_parameters():
        evidence.keep("parameter", 0, name, parameter)
    for step in range(steps):
        if step:
            take(ranks, step, "parameter", dict(model.named_parameters()))
            for kind in ("exp_avg", "exp_avg_sq"):
                take(ranks, step, kind, {name: adam.state[p][kind] for name, p in model.named_parameters()})
        _step(run, model, adam, data, step, evidence, ranks)
    return evidence


@torch.no_grad()
def take(ranks: Sequence[Evidence], step: int, kind: str, own: Mapping[str, Tensor]) -> None:
    """Make each of `own` what it was after `step` steps on the first of `ranks` that has it."""
    for name, tensor in own.items():
        key = f"{kind}/{step}/{name}"
        found = next((each.tensors[key] for each in ranks if key in each.tensors), None)
        if found is not None and found.shape == tensor.shape:  # else it is missing there, which is a difference
            tensor.copy_(found)


def _adamw(model: nn.Module, run: RunSpec) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": run.optimizer.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=run.optimizer.lr, betas=run.optimizer.betas, eps=run.optimizer.eps, foreach=False, fused=False
    )


def _step(
    run: RunSpec,
    model: nn.Module,
    adam: torch.optim.AdamW,
    data: UnequalData | Dataset,
    step: int,
    evidence: Evidence,
    ranks: Sequence[Evidence],
) -> None:
    ids = data.ids(step, run.batch.sequences)
    _, targets = data.batch(ids)
    valid = int((targets != IGNORE).sum())
    total = 0.0
    for rows in torch.arange(len(ids)).split(max(run.batch.micro, 1)):
        key, documents = DropoutKey(run.seed, step, rows), data.documents(ids[rows])
        loss = model(*data.batch(ids[rows]), documents=documents, dropout=key) / max(valid, 1)
        loss.backward()
        total += float(loss.detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        evidence.keep("gradient", step + 1, name, gradient)
    norm = taken = _norm(gradients)
    if ranks:
        take(ranks, step + 1, "gradient", gradients)
        taken = _norm(gradients)
    clip = run.optimizer.clip
    if clip is not None and taken > clip:
        for gradient in gradients.values():
            gradient.mul_(clip / taken)
    for group in adam.param_groups:
        group["lr"] = lr_at(run, step)
    adam.step()
    evidence.losses.append(total)
    evidence.tokens.append(valid)
    evidence.norms.append(norm)
    for name, parameter in model.named_parameters():
        evidence.keep("parameter", step + 1, name, parameter)
        for kind in ("exp_avg", "exp_avg_sq"):
            moment: Tensor = adam.state[parameter][kind]
            evidence.keep(kind, step + 1, name, moment)
    adam.zero_grad(set_to_none=True)


def _norm(gradients: Mapping[str, Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()])))
