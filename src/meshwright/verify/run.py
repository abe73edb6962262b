"""Prove a layout: run it on its ranks, run the plain model on one device, and hold the two against each other."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from meshwright.spec.errors import RunError, UserError
from meshwright.spec.exits import INTERRUPTED, TERMINATED, WRONG_INPUT, RanksEnded
from meshwright.spec.load import dump_run
from meshwright.spec.run import RunSpec
from meshwright.train.launch import launch
from meshwright.verify.evidence import Evidence
from meshwright.verify.judge import judge
from meshwright.verify.report import Report
from meshwright.verify.small import small_run

RATES = ("embd_dropout", "attn_dropout", "resid_dropout")
WORKER = "meshwright.verify.worker"


class Unfinished(RunError):
    """The ranks ended before the proof was complete; `code` is the exit code that says how."""

    def __init__(self, code: int, folder: Path) -> None:
        self.code = code
        self.stopped = code in (INTERRUPTED, TERMINATED)
        how = {INTERRUPTED: "were interrupted", TERMINATED: "were terminated", WRONG_INPUT: "found wrong input"}
        kept = "" if self.stopped else f"; what they left is in {folder}"
        super().__init__(f"verify: the ranks {how.get(code, 'failed')} before the proof was complete{kept}")


def verify(
    run: RunSpec,
    *,
    steps: int = 3,
    precision: str = "float64",
    as_is: bool = False,
    debug: bool = False,
    worker: str = WORKER,
    begins: Callable[[], None] = lambda: None,
) -> Report:
    """Prove `run`'s layout over `steps` optimizer steps in `precision`.

    The model and batch are small ones of the same family and options, or with `as_is` the run's own; the tokens are
    random either way. Of `grad_dtype` and `reduce_dtype` what goes with `precision` holds, the other is auto. The
    layout must be resolved. `worker` is the module (or script) that the ranks run; `begins` is called when nothing
    stands against comparing any more. Raises UserError for what cannot be proven, Unfinished where the ranks fail or
    are stopped.
    """
    if run.device == "cuda":
        raise UserError("device: verify compares on the CPU for now; use device=cpu")
    if run.dropout == "torch" and run.model.drops:
        raise UserError(
            "dropout: the masks of dropout=torch depend on the layout, so nothing can be compared with one device; "
            "prove the run with dropout=counter (with attention=explicit where model.attn_dropout is above 0), or "
            "without dropout: " + " ".join(f"model.{name}=0" for name in RATES if getattr(run.model, name))
        )
    run = _in(precision, run)
    if not as_is:
        run = small_run(run)
    begins()
    ranks = run_ranks(run, steps, debug=debug, worker=worker)
    return judge(run, steps, ranks)


def _in(precision: str, run: RunSpec) -> RunSpec:
    """`run` on the CPU in `precision`."""
    dtypes = {"grad_dtype": "auto", "reduce_dtype": "auto"} | run.dtypes(precision)
    try:
        return RunSpec.model_validate(run.model_dump() | dtypes | {"precision": precision, "device": "cpu"})
    except ValidationError as error:
        raise UserError("; ".join(str(e["ctx"]["error"]) for e in error.errors() if "ctx" in e)) from None


def run_ranks(run: RunSpec, steps: int, *, debug: bool = False, worker: str = WORKER) -> list[Evidence]:
    """Start the layout's ranks and return what each computed.

    They write into a folder of their own, which is kept where they fail: the launcher's report names files in it.
    """
    folder = Path(tempfile.mkdtemp(prefix="meshwright-verify-"))
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "run.yaml").write_text(dump_run(run))
        (folder / "proof.json").write_text(json.dumps({"steps": steps}))
        world = run.layout.world
        try:
            launch([str(folder)], ranks=world, folder=folder, quiet=True, debug=debug, entry=worker, check=True)
        except RanksEnded as ended:
            end = Unfinished(ended.code, folder)
            if not end.stopped:
                cleanup.pop_all()
            raise end from ended
        return [Evidence.load(folder, rank) for rank in range(world)]
