"""One rank of a proof: runs the layout's steps as training does, and writes down what it computed, moved and held.

Started as `python -m meshwright.verify.worker FOLDER`; the folder holds `run.yaml` and `proof.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from meshwright.comm import runtime
from meshwright.comm.mesh import Mesh
from meshwright.spec.batch import micro_batches
from meshwright.spec.load import load_run
from meshwright.spec.run import RunSpec
from meshwright.train.data import Dataset
from meshwright.train.report import run_guarded
from meshwright.train.trainer import Trainer
from meshwright.verify.activations import Kept, measure
from meshwright.verify.evidence import Evidence
from meshwright.verify.held import declared, held
from meshwright.verify.unequal import UnequalData, proof_data


def collect(run: RunSpec, mesh: Mesh, data: UnequalData | Dataset, steps: int) -> Evidence:
    """Train for `steps` steps on this rank and keep the evidence."""
    trainer = Trainer(run, mesh)
    evidence = Evidence()
    _keep_parameters(trainer, evidence, 0)
    mesh.ledger.clear()
    for step in range(steps):
        totals = trainer.accumulate(data, step)
        _keep_gradients(trainer, evidence, step + 1, totals.divisor)
        update = trainer.update(step, totals)
        evidence.traffic.append(mesh.ledger.take())
        evidence.losses.append(totals.loss)
        evidence.tokens.append(totals.tokens)
        evidence.norms.append(update.grad_norm)
        _keep_moments(trainer, evidence, step + 1)
        _keep_parameters(trainer, evidence, step + 1)
    trainer.sharded.settle()
    evidence.states, evidence.undeclared = held(declared(trainer), mesh.device, evidence.tensors.values())
    evidence.activations = _saved_activations(trainer, data)
    return evidence


def _keep_gradients(trainer: Trainer, evidence: Evidence, step: int, divisor: float) -> None:
    with trainer.mesh.ledger.aside():
        for placement, gradient in trainer.sharded.named_gradients():
            wide = gradient.to(
                torch.promote_types(gradient.dtype, torch.float32)
            )  # a mean may be too small for float16
            evidence.keep("gradient", step, placement.name, wide / divisor)


def _keep_moments(trainer: Trainer, evidence: Evidence, step: int) -> None:
    with trainer.mesh.ledger.aside():
        for placement, kind, moment in trainer.optimizer.named_moments():
            evidence.keep(kind, step, placement.name, moment)


def _keep_parameters(trainer: Trainer, evidence: Evidence, step: int) -> None:
    with trainer.mesh.ledger.aside():
        for placement, parameter in trainer.sharded.named_parameters():
            evidence.keep("parameter", step, placement.name, parameter)


def _saved_activations(trainer: Trainer, data: UnequalData | Dataset) -> list[Kept]:
    """What the forward of this rank's largest micro-batch, which is its first, keeps for backward."""
    run, group = trainer.run, trainer.mesh.group("dp")
    places = micro_batches(run.batch.sequences, group.size, group.rank, run.batch.micro)[0]
    if not places:
        if trainer.sharded.every_rank_computes:
            trainer.compute_nothing(0)
        return []
    ids = data.ids(0, run.batch.sequences)
    inputs = trainer.inputs(data, ids[places.start : places.stop])
    key = inputs.key(run.seed, 0, torch.arange(places.start, places.stop, device=trainer.mesh.device))
    trainer.model.train()
    weights = [unit.parameters for unit in trainer.sharded.units]  # at ZeRO 3 not yet the module's parameters
    forward = measure(trainer.model, lambda: inputs.loss(trainer.model, key), inputs=(*inputs.tensors, *weights))
    trainer.sharded.end_micro()
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
