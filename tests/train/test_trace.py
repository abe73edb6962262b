"""`trace: true`: which steps, where their time went, and the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.comm.trace import UNDER_WAY, RankTrace, Span
from meshwright.predict.shares import Shares, shares
from meshwright.spec.errors import UserError
from meshwright.spec.load import load_run
from meshwright.spec.run import RunSpec
from meshwright.train import breakdown, tracefile
from meshwright.train.loop import Loop
from meshwright.train.signals import StopFlag
from meshwright.train.tracer import Tracer, recorded
from meshwright.train.trainer import Trainer
from meshwright.verify.unequal import UnequalData


def run_of(*fields: str) -> RunSpec:
    fixed = [
        "model={layers: 2, hidden: 16, heads: 2, kv_heads: 1, ffn: 24}",
        "data={path: text.txt, seq_len: 16}",
        "batch={sequences: 6, micro: 2}",
        "validation.every=0",
        "checkpoint.every=0",
        "lr_schedule.warmup=0",
        "trace=true",
        "out=run",
    ]
    return load_run(None, [*fixed, *fields])


@pytest.mark.parametrize(
    ("start", "steps", "which"),
    [(0, 100, [3, 4, 5]), (0, 4, [3, 4]), (0, 3, [3]), (0, 2, [2]), (0, 1, []), (40, 100, [43, 44, 45]), (99, 100, [])],
)
def test_which_steps(start, steps, which):
    assert list(recorded(start, steps)) == which


def test_one_step_that_is_left_is_not_recorded():
    told = Told()
    tracer = Tracer(run_of("steps=9", "layout.dp=1"), Mesh.single(torch.device("cpu")), told)
    tracer.plan(9)
    tracer.plan(8)
    assert told.said == ["warning: trace: nothing is recorded; step 9 is the only one left, and the first warms up"]
    tracer.begin(9)
    assert tracer.mesh.tracing.now is None


def test_one_step_is_refused():
    with pytest.raises(UserError, match="trace=true records no first step, which warms up; use steps=2"):
        run_of("steps=1")


# -- where the step went ---------------------------------------------------------------------------------------------


def message(begin: float, end: float, op: str = "recv", reason: str = "pp.activations") -> Span:
    return Span("wait", reason, begin, end, {"op": op})


def two_stages() -> list[RankTrace]:
    """Two micro-batches through two stages, by hand."""
    first = [
        Span("step", "step 3", 0, 20, {"step": 3}),
        Span("action", "forward", 1, 4, {"stage": 0, "micro": 0}),
        Span("data", "data", 1, 2, {}),
        Span(UNDER_WAY, "pp.activations", 4, 19, {"op": "send"}),
        Span("action", "backward", 5, 14, {"stage": 0, "micro": 0}),
        message(5, 7),
        Span("recompute", "recompute", 8, 10, {}),
        message(9, 10, "all_reduce", "tp.reduce"),
        Span("optimizer", "norm", 15, 19, {}),
        message(16, 18, "all_reduce", "step.norm"),
    ]
    second = [
        Span("step", "step 3", 0, 20, {"step": 3}),
        Span("action", "forward", 1, 6, {"stage": 1, "micro": 0}),
        message(1, 4),
        Span("action", "backward", 6, 12, {"stage": 1, "micro": 0}),
        Span("issue", "pp.gradients", 11, 12, {"op": "send"}),
        message(12, 16, "all_reduce", "step.norm"),  # until 14 for the other's backward
    ]
    return [RankTrace(0, {"pp": 0, "dp": 0}, first), RankTrace(1, {"pp": 1, "dp": 0}, second)]


def test_where_the_step_went():
    ranks = two_stages()
    first, second = each = breakdown.seconds(ranks)
    assert first == {
        "rest": 3, "compute": 7, "data": 1, "bubble": 2, "recompute": 1, "exposed tp.reduce": 1, "optimizer": 2,
        "exposed step.norm": 3,
    } | {"exposed step.norm": 2, "rest": 4}  # fmt: skip
    assert second == {
        "rest": 5, "compute": 7, "bubble": 3 + 2, "exposed pp.gradients": 1, "exposed step.norm": 2,
    }  # fmt: skip
    assert sum(first.values()) == sum(second.values()) == 20
    assert breakdown.slowest(each) == 0
    # From the first action to the last are 13 s; the ranks compute for 8 and 7.
    assert breakdown.bubble(ranks, 0) == pytest.approx(1 - 15 / 26)
    assert breakdown.table(each, Shares(0.75, 0.05, 0.2), "where step 3 went, mean of 2 ranks:").splitlines() == [
        "where step 3 went, mean of 2 ranks:",
        "                        s a step   share  of these 3  predicted  rank 0, slowest",
        "  compute                 7.0000   35.0%       63.6%      75.0%           7.0000",
        "  recompute               0.5000    2.5%        4.5%       5.0%           1.0000",
        "  bubble                  3.5000   17.5%       31.8%      20.0%           2.0000",
        "  exposed step.norm       2.0000   10.0%                                  2.0000",
        "  exposed tp.reduce       0.5000    2.5%                                  1.0000",
        "  exposed pp.gradients    0.5000    2.5%                                  0.0000",
        "  optimizer               1.0000    5.0%                                  2.0000",
        "  data                    0.5000    2.5%                                  1.0000",
        "  rest                    4.5000   22.5%                                  4.0000",
        "  step                   20.0000  100.0%                                 20.0000",
    ]


def test_another_pipelines_ranks_are_not_waited_for():
    """What is waited for after one's own last action is no bubble where only ranks of other pipelines still compute."""
    first, second = two_stages()
    second = RankTrace(1, {"pp": 1, "dp": 1}, second.spans)
    assert breakdown.seconds([first, second])[1]["exposed step.norm"] == 4


# -- the file --------------------------------------------------------------------------------------------------------


def slices(events: list[dict], rank: int) -> dict[str, list[dict]]:
    """By the name of their track."""
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["pid"] == rank and e["name"] == "thread_name"}
    found: dict[str, list[dict]] = {name: [] for name in tracks.values()}
    for event in events:
        if event["pid"] == rank and event["ph"] == "X":
            found[tracks[event["tid"]]].append(event)
    return found


def test_a_file_of_events():
    first, second = ([*tracefile.events(one)] for one in two_stages())
    assert first[0] == {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "rank 0: pp 0, dp 0"}}
    tracks = slices(second, 1)
    assert [(e["name"], e["ts"], e["dur"]) for e in tracks["computing"]] == [
        ("step 3", 0, 20e6), ("forward 0, stage 1", 4e6, 2e6), ("backward 0, stage 1", 6e6, 6e6),
    ]  # fmt: skip
    assert [e["name"] for e in tracks["waiting"]] == ["pp.activations", "issue pp.gradients", "step.norm"]
    (message,) = slices(first, 0)["communication"]
    assert (message["ts"], message["dur"], message["args"]) == (4e6, 15e6, {"op": "send"})


def test_messages_that_overlap_have_tracks_of_their_own():
    under_way = [Span(UNDER_WAY, "r", begin, end, {}) for begin, end in [(0, 5), (1, 3), (3, 9), (5, 6)]]
    tracks = slices([*tracefile.events(RankTrace(0, {}, under_way))], 0)
    assert [e["ts"] / 1e6 for e in tracks["communication"]] == [0, 5]
    assert [e["ts"] / 1e6 for e in tracks["communication 2"]] == [1, 3]


# -- runs ------------------------------------------------------------------------------------------------------------


def life(mesh: Mesh, run: RunSpec, folder: Path) -> list[str]:
    """What rank 0 said in a whole run."""
    os.chdir(folder)
    with StopFlag() as stop:
        loop = Loop(run, mesh, stop, quiet=False)
        said: list[str] = []
        loop.progress.message = said.append
        assert loop.run() == 0 and mesh.tracing.now is None
        return said


def test_a_pipelines_run(folder, ranks):
    run = run_of("steps=4", "layout={pp: 2, dp: 1, recompute: full}", "model.tied=true")
    said, _ = ranks.run(2, life, run, folder, axes={"pp": 2})
    assert "trace: steps 3 to 4 will be recorded" in said
    assert "trace: run/trace.json has steps 3 to 4; ui.perfetto.dev opens it" in said
    table = next(text for text in said if text.startswith("where steps 3 to 4 went, mean of 2 ranks:"))
    rows = {line[2:].split("  ")[0]: line.split() for line in table.splitlines()[2:]}
    foretold = shares(run, run.layout, cpu=True)
    assert rows["recompute"][-2] == f"{foretold.recompute:.1%}" and rows["bubble"][-2] == f"{foretold.bubble:.1%}"
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    (figures,) = (line for line in lines if line["split"] == "trace")
    assert figures["step"] == 4 and figures["exposed.pp.tied"] > 0 and figures["predicted.bubble"] == foretold.bubble

    events = json.loads((folder / "run/trace.json").read_text())["traceEvents"]
    for rank in range(2):
        computing = slices(events, rank)["computing"]
        assert [e["name"] for e in computing if e["cat"] == "step"] == ["step 3", "step 4"]
        assert sum(e["name"].startswith("forward") for e in computing) == 2 * 3
        assert sum(e["cat"] == "recompute" for e in computing) == 2 * 3  # a block a stage
        assert {e["args"]["stage"] for e in computing if e["cat"] == "action"} == {rank}
        inside = [e for e in computing if e["cat"] == "recompute"]
        around = [e for e in computing if e["name"].startswith("backward")]
        assert all(any(a["ts"] <= e["ts"] and e["ts"] + e["dur"] <= a["ts"] + a["dur"] for a in around) for e in inside)
    received = [e for e in slices(events, 1)["waiting"] if e["name"] == "pp.activations"]
    assert sorted(e["args"]["micro"] for e in received) == [0, 0, 1, 1, 2, 2]
    took = sum(e["dur"] for rank in range(2) for e in slices(events, rank)["computing"] if e["cat"] == "step") / 4e6
    summed = sum(value for name, value in figures.items() if name in breakdown.FORETOLD + breakdown.LAST)
    summed += sum(value for name, value in figures.items() if name.startswith("exposed."))
    assert summed == pytest.approx(took, rel=1e-5)


class Told:
    """In place of progress and metrics."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.values: dict[str, float] = {}

    def message(self, text: str) -> None:
        self.said.append(text)

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        self.values = values


def traced(mesh: Mesh, run: RunSpec, stop: int, folder: Path) -> tuple[list[str], dict[str, float], int]:
    """Steps of a run that is stopped after `stop`: what is said and measured, and the collectives in the ledger."""
    os.chdir(folder)
    told, trainer = Told(), Trainer(run, mesh)
    tracer = Tracer(run, mesh, told)
    data = UnequalData(run.model.vocab, run.data.seq_len, run.seed)
    tracer.plan(0)
    for step in range(stop):
        mesh.ledger.clear()
        tracer.begin(step + 1)
        trainer.update(step, trainer.accumulate(data, step))
        tracer.end(step + 1)
        tracer.write_after(step + 1, told)
    tracer.write_after(stop, told, stopping=True)
    trainer.sharded.settle()
    return told.said, told.values, sum(row.count for row in mesh.ledger.rows())


def test_data_ranks_and_a_run_that_is_stopped(folder, ranks):
    """Sums of gradients are exposed; what is recorded until the stop is written; the ledger knows nothing of it."""
    (folder / "run").mkdir()
    run = run_of("steps=9", "layout.dp=2")
    (said, figures, count), (nothing, _, other) = ranks.run(2, traced, run, 4, folder)
    assert nothing == said[:1] and said[1].startswith("trace: run/trace.json has steps 3 to 4")
    assert figures["exposed.zero.reduce"] > 0 and figures["bubble"] == figures["predicted.bubble"] == 0
    assert count == other == ranks.run(2, traced, run.model_copy(update={"trace": False}), 4, folder)[0][2]


def test_a_disk_that_is_full_costs_the_file_only(folder):
    """The folder of the file is not there; what was measured is told, and nothing is left behind."""
    run = run_of("steps=3", "layout.dp=1")
    said, figures, _ = traced(Mesh.single(torch.device("cpu")), run, 3, folder)
    assert said[1] == "warning: run/trace.json could not be written: no such file or directory"
    assert figures["compute"] > 0 and list(folder.iterdir()) == [folder / "text.txt"]
    assert traced(Mesh.single(torch.device("cpu")), run, 2, folder)[0] == ["trace: step 3 will be recorded"]
