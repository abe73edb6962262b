"""`trace: true` in the life of a run: which steps are recorded, and what is made of them."""

from __future__ import annotations

from pathlib import Path

from meshwright.comm.mesh import Mesh
from meshwright.comm.trace import RankTrace, Trace, collect
from meshwright.predict.shares import shares
from meshwright.spec.run import RunSpec
from meshwright.train import breakdown, tracefile
from meshwright.train.metrics import Metrics
from meshwright.train.progress import Progress

FILE = "trace.json"
WARM_UP = 2
"""Steps before those that are recorded, where there are enough: memory is touched first, and kernels are chosen."""
RECORDED = 3


def recorded(start: int, steps: int) -> range:
    """The steps to record, from 1, of a run that goes on after step `start` until `steps`. Never the first."""
    if steps - start < 2:
        return range(0)
    first = min(start + WARM_UP, steps - 1) + 1
    return range(first, min(start + WARM_UP + RECORDED, steps) + 1)


class Tracer:
    """One rank's; does nothing unless the run has `trace`. Rank 0 writes and tells."""

    def __init__(self, run: RunSpec, mesh: Mesh, progress: Progress) -> None:
        self.run, self.mesh, self.progress = run, mesh, progress
        self.written: Path | None = None
        """The file, once it is there."""
        self._steps = range(0)
        self._trace: Trace | None = None

    def plan(self, start: int) -> None:
        """The run goes on after step `start`."""
        if not self.run.trace or start >= self.run.steps:
            return
        self._steps = recorded(start, self.run.steps)
        if not self._steps:
            self.progress.message(
                f"warning: trace: nothing is recorded; step {start + 1} is the only one left, and the first warms up"
            )
            return
        self._trace = Trace(self.mesh.device)
        self.progress.message(f"trace: {self._words()} will be recorded")

    def begin(self, step: int) -> None:
        """Step `step`, from 1, begins now."""
        if step in self._steps and self._trace is not None:
            self.mesh.tracing.now = self._trace
            self._trace.begin_step()

    def end(self, step: int) -> None:
        """It is over."""
        trace, self.mesh.tracing.now = self.mesh.tracing.now, None
        if trace is not None:
            trace.end_step(step)

    def write_after(self, step: int, metrics: Metrics, *, stopping: bool = False) -> None:
        """If `step` was the last to record, or is the last of a run that stops: bring the ranks' traces together, write
        the file and tell where the steps went. All ranks together."""
        if stopping:
            self._steps = range(self._steps.start, min(self._steps.stop, step + 1))
        if self._trace is None or not self._steps or step != self._steps[-1]:
            return
        self.mesh.blackbox.note("collecting a trace")
        ranks = collect(self._trace, self.mesh)
        self._trace = None
        if ranks is None:
            return
        self._write(ranks)
        each = breakdown.seconds(ranks)
        foretold = shares(self.run, self.run.layout, cpu=self.mesh.device.type == "cpu")
        over = f", mean of {len(ranks)} ranks" if len(ranks) > 1 else ""
        self.progress.message(breakdown.table(each, foretold, f"where {self._words()} went{over}:"))
        figures = {what.replace(" ", "."): took for what, took in breakdown.mean(each).items()}
        figures |= {f"predicted.{what}": getattr(foretold, what) for what in breakdown.FORETOLD}
        metrics.write(step, "trace", figures)

    def _write(self, ranks: list[RankTrace]) -> None:
        path = Path(self.run.out) / FILE
        try:
            tracefile.write(path, ranks)
        except OSError as error:
            self.progress.message(f"warning: {path} could not be written: {(error.strerror or str(error)).lower()}")
            return
        self.written = path
        self.progress.message(f"trace: {path} has {self._words()}; ui.perfetto.dev opens it")

    def _words(self) -> str:
        first, last = self._steps[0], self._steps[-1]
        return f"step {first}" if first == last else f"steps {first} to {last}"
