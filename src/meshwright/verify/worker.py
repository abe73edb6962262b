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
from meshwright.spec.load import load_run
from meshwright.spec.run import RunSpec
from meshwright.train.data import Dataset
from meshwright.train.passes import TrainingPasses
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
    with mesh.ledger.aside():
        evidence.activations = saved_activations(trainer, data, steps)
    return evidence


def _keep_gradients(trainer: Trainer, evidence: Evidence, step: int, divisor: float) -> None:
    with trainer.mesh.ledger.aside():
        for placement, gradient in trainer.sharded.named_gradients():
            # A mean may be too small for float16.
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            evidence.keep("gradient", step, placement.name, wide / divisor)


def _keep_moments(trainer: Trainer, evidence: Evidence, step: int) -> None:
    with trainer.mesh.ledger.aside():
        for placement, kind, moment in trainer.optimizer.named_moments():
            evidence.keep(kind, step, placement.name, moment)


def _keep_parameters(trainer: Trainer, evidence: Evidence, step: int) -> None:
    with trainer.mesh.ledger.aside():
        for placement, parameter in trainer.sharded.named_parameters():
            evidence.keep("parameter", step, placement.name, parameter)


def saved_activations(trainer: Trainer, data: UnequalData | Dataset, step: int) -> list[Kept]:
    """What this rank keeps for backward when it keeps most in `step`; nothing where it has no sequence, unless it takes
    part in a pipeline."""
    passes = TrainingPasses(trainer, data, step, lambda: 0.0)
    weights = [unit.parameters for unit in trainer.sharded.units]  # at ZeRO 3 not yet the module's parameters
    # Inputs are made beforehand: they are there without autograd.
    inputs = [made for micro in range(len(passes.micros)) if (made := passes.inputs(micro)) is not None]
    known = [*weights, *(tensor for made in inputs for tensor in made.tensors)]
    models = [laid_out.model.train() for laid_out in trainer.stages.values()]
    trainer.sharded.begin()
    fullest = measure(models, lambda: trainer.pipeline.run(passes), inputs=known)
    for laid_out in trainer.stages.values():
        laid_out.tell_documents(None)
    for _ in trainer.sharded.finish():
        pass
    passes.totals()
    return list(fullest.kept) if any(passes.micros) or trainer.mesh.sizes["pp"] > 1 else []


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
