"""Prove a layout: run it on its ranks, run the plain model on one device, and hold the two against each other."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from meshwright.spec.errors import RunError, UserError
from meshwright.spec.load import dump_run
from meshwright.spec.run import RunSpec
from meshwright.train.launch import launch
from meshwright.verify.evidence import Evidence
from meshwright.verify.judge import judge
from meshwright.verify.reference import reference
from meshwright.verify.report import Report
from meshwright.verify.small import small_run
from meshwright.verify.unequal import proof_data

WORKER = "meshwright.verify.worker"


def verify(
    run: RunSpec, *, steps: int = 3, precision: str = "float64", as_is: bool = False, worker: str = WORKER
) -> Report:
    """Prove `run`'s layout over `steps` optimizer steps in `precision`.

    The model and batch are small ones of the same family and options, or with `as_is` the run's own. The layout must
    be resolved. `worker` is the module (or script) that the ranks run. Raises UserError for what cannot be proven,
    RunError where the ranks fail.
    """
    if run.device == "cuda":
        raise UserError("device: verify compares on the CPU for now; use device=cpu")
    run = RunSpec.model_validate(run.model_dump() | {"precision": precision, "device": "cpu"})
    if not as_is:
        run = small_run(run)
    ranks = run_ranks(run, steps, worker)
    return judge(run, steps, ranks, reference(run, proof_data(run), steps))


def run_ranks(run: RunSpec, steps: int, worker: str = WORKER) -> list[Evidence]:
    """Start the layout's ranks and return what each computed."""
    with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as name:
        folder = Path(name)
        (folder / "run.yaml").write_text(dump_run(run))
        (folder / "proof.json").write_text(json.dumps({"steps": steps}))
        code = launch([str(folder)], ranks=run.layout.world, folder=folder, quiet=True, entry=worker)
        if code != 0:
            raise RunError(f"verify: the ranks ended with exit code {code} before the proof was complete")
        return [Evidence.load(folder, rank) for rank in range(run.layout.world)]
