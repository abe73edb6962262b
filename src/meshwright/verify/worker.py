"""One rank of a proof: runs the layout's steps as training does, and writes down what it computed, moved and held.

Started as `python -m meshwright.verify.worker FOLDER`; the folder holds `run.yaml` and `proof.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from meshwright.comm import runtime
from meshwright.comm.mesh import Mesh
from meshwright.model.dropout import DropoutKey
from meshwright.spec.batch import micro_batches
from meshwright.spec.load import load_run
from meshwright.spec.run import RunSpec
from meshwright.train.data import Dataset
from meshwright.train.report import run_guarded
from meshwright.train.trainer import Trainer
from meshwright.verify.activations import Kept, measure
from meshwright.verify.evidence import Evidence
from meshwright.verify.unequal import UnequalData


def proof_data(run: RunSpec) -> UnequalData:
    """The tokens of a proof; reference and ranks make them alike from the run's seed."""
    return UnequalData(run.model.vocab, run.data.seq_len, run.seed)


def collect(run: RunSpec, mesh: Mesh, data: UnequalData | Dataset, steps: int) -> Evidence:
    """Train for `steps` steps on this rank and keep the evidence."""
    trainer = Trainer(run, mesh)
    evidence = Evidence()
    _keep_parameters(trainer, evidence, 0)
    mesh.ledger.clear()
    for step in range(steps):
        totals = trainer.accumulate(data, step)
        for placement, gradient in trainer.sharded.named_gradients():
            evidence.keep("gradient", step + 1, placement.name, gradient / max(totals.tokens, 1))
        update = trainer.update(step, totals)
        evidence.traffic.append(mesh.ledger.take())
        evidence.losses.append(totals.loss)
        evidence.tokens.append(totals.tokens)
        evidence.norms.append(update.grad_norm)
        _keep_parameters(trainer, evidence, step + 1)
        for placement, kind, moment in trainer.optimizer.named_moments():
            evidence.keep(kind, step + 1, placement.name, moment)
    evidence.states = held(trainer)
    evidence.activations = _saved_activations(trainer, data)
    return evidence


def held(trainer: Trainer) -> dict[str, int]:
    """Bytes of the storages that this rank holds through a step, by category, each storage once."""
    units = trainer.sharded.units
    categories: dict[str, Iterable[Tensor]] = {
        "parameters": [unit.parameters for unit in units],
        "gradients": [unit.gradients for unit in units],
        **trainer.optimizer.storages(),
    }
    seen: set[int] = set()
    sizes = dict.fromkeys(categories, 0)
    for category, tensors in categories.items():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sizes[category] += storage.nbytes()
    return sizes


def _keep_parameters(trainer: Trainer, evidence: Evidence, step: int) -> None:
    for placement, parameter in trainer.sharded.named_parameters():
        evidence.keep("parameter", step, placement.name, parameter)


def _saved_activations(trainer: Trainer, data: UnequalData | Dataset) -> list[Kept]:
    """What the forward of this rank's largest micro-batch keeps for backward."""
    run, group = trainer.run, trainer.mesh.group("dp")
    places = max(micro_batches(run.batch.sequences, group.size, group.rank, run.batch.micro), key=len)
    if not places:
        return []
    ids = data.ids(0, run.batch.sequences)
    tokens, targets = (t.to(trainer.mesh.device) for t in data.batch(ids[places.start : places.stop]))
    key = DropoutKey(run.seed, 0, torch.arange(places.start, places.stop, device=trainer.mesh.device))
    trainer.model.train()
    forward = measure(trainer.model, lambda: trainer.model(tokens, targets, dropout=key), inputs=(tokens, targets))
    return list(forward.kept)


def main(folder: Path) -> None:
    run = load_run(folder / "run.yaml", [])
    proof = json.loads((folder / "proof.json").read_text())
    device = runtime.pick_device(run.device, runtime.place().local_rank)
    runtime.init(device, run.comm_timeout)
    mesh = Mesh.create(run.layout, device=device, timeout=run.comm_timeout)
    collect(run, mesh, proof_data(run), proof["steps"]).save(folder, mesh.rank)
    runtime.shutdown()


if __name__ == "__main__":
    raise SystemExit(run_guarded(lambda: main(Path(sys.argv[1]))))
