"""Predicted beside measured step time, of many layouts of one model on this machine.

    meshwright probe --ranks 4 -o cluster.yaml
    python benchmarks/prediction.py cluster.yaml [--rounds 12] [--save measured.json]
    python benchmarks/prediction.py cluster.yaml --measured measured.json [--lines]

Each layout trains the same model on the same batch; layouts of as many ranks take turns, step by step, in one process
group, and medians are kept. The prediction knows the cluster file and nothing of the measurements. Run both in minutes
in which nothing else does. --measured compares with what an earlier call saved; --lines shows what a step is made of.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import torch

import race
from meshwright.comm.mesh import Mesh, close_all
from meshwright.predict.cost.step import StepTime, step_time
from meshwright.spec.cluster import Cluster
from meshwright.spec.clusterfile import load_cluster
from meshwright.spec.load import load_run
from meshwright.spec.run import RunSpec
from meshwright.train.probing import CASES as PROBED
from meshwright.train.probing_steps import stepper

MODEL = (
    "model={family: llama, vocab: 512, hidden: 256, layers: 4, heads: 4, kv_heads: 4, ffn: 704, max_seq: 256}",
    "data.seq_len=128", "batch.sequences=8", "batch.micro=2", "device=cpu",
)  # fmt: skip
LAYOUTS = (
    "dp=1",
    "dp=1 recompute=full",
    "dp=1 recompute=selective",
    "dp=2",
    "dp=2 zero=1",
    "dp=2 zero=2",
    "dp=2 zero=3",
    "dp=2 recompute=full",
    "tp=2",
    "tp=2 sp=true",
    "tp=2 sp=true recompute=selective",
    "cp=2 cp_method=gather",
    "cp=2 cp_method=rsa",
    "cp=2 cp_method=ring",
    "cp=2 cp_method=ulysses",
    "cp=2 zero=3",
    "pp=2 pp_schedule=gpipe",
    "pp=2",
    "pp=2 pp_schedule=interleaved pp_chunks=2",
    "pp=2 recompute=full",
    "dp=4",
    "dp=4 zero=3",
    "dp=2 tp=2",
    "tp=4",
    "dp=2 tp=2 sp=true zero=2",
    "dp=2 cp=2",
    "cp=4 cp_method=ulysses",
    "tp=2 cp=2",
    "pp=2 dp=2 zero=1",
    "pp=2 tp=2",
    "pp=4",
    "pp=4 pp_schedule=gpipe",
)
CONTROL = PROBED[0]
BOUND = 0.15  # of the median error
CORRELATION = 0.9
REGRET = 0.05


def run_of(layout: str) -> RunSpec:
    words = [f"layout.{word}" for word in layout.split()]
    if "dp=" not in layout:
        words.append("layout.dp=1")
    run = load_run(None, [*MODEL, *words])
    return run.model_copy(update={"layout": run.layout.resolve(None)})


# -- measured -------------------------------------------------------------------------------------------------------


def measure(rounds: int, save: Path | None) -> dict[str, float]:
    """Seconds of a step by layout."""
    worlds: dict[int, list[str]] = {}
    for layout in LAYOUTS:
        worlds.setdefault(run_of(layout).layout.world, []).append(layout)
    found: dict[str, float] = {}
    for ranks, layouts in worlds.items():
        with tempfile.TemporaryDirectory() as folder:
            race.start_ranks(ranks, take_turns, layouts, rounds, folder)
            times = json.loads((Path(folder) / "times.json").read_text())
        found |= times | {"control": (found.get("control", 0.0) + times["control"] / len(worlds))}
        if save is not None:
            save.write_text(json.dumps(found, indent=1))
    return found


def take_turns(rank: int, layouts: list[str], rounds: int, folder: str) -> None:
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // torch.distributed.get_world_size(), 1))
    steps = {}
    for layout in layouts:
        run = run_of(layout)
        steps[layout] = stepper(run, Mesh.create(run.layout, device=torch.device("cpu"), timeout=120))
    threads = torch.get_num_threads()
    alone = stepper(CONTROL.run("fp32"), Mesh.single(torch.device("cpu")))

    def control() -> None:
        torch.set_num_threads(1)
        alone()
        torch.set_num_threads(threads)

    times: dict[str, list[float]] = {layout: [] for layout in [*layouts, "control"]}
    for turn in range(2 + rounds):
        for layout in layouts if turn % 2 else reversed(layouts):
            took = race.timed(steps[layout])
            if turn >= 2:
                times[layout].append(took)
        took = race.timed(control if rank == 0 else lambda: None)
        if turn >= 2:
            times["control"].append(took)
    if rank == 0:
        medians = {layout: statistics.median(each) for layout, each in times.items()}
        (Path(folder) / "times.json").write_text(json.dumps(medians))
        spread = statistics.median(statistics.quantiles(each, n=4)[2] / medians[key] for key, each in times.items())
        print(f"{torch.distributed.get_world_size()} ranks: third quartile over median {spread:.2f}", flush=True)
    torch.distributed.barrier()
    close_all()


# -- beside the prediction --------------------------------------------------------------------------------------------


def predicted(cluster: Cluster) -> dict[str, StepTime]:
    """Beside the layouts, what is controlled by."""
    found = {layout: step_time(run := run_of(layout), run.layout, cluster) for layout in LAYOUTS}
    alone = CONTROL.run("fp32")
    return found | {"control": step_time(alone, alone.layout, cluster.model_copy(update={"cores": 1}))}


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Spearman's: of the places that the two give."""
    places = [[sorted(values).index(value) for value in values] for values in (one, other)]
    return statistics.correlation(*places)


def report(measured: dict[str, float], expected: dict[str, StepTime], lines: bool) -> bool:
    """Print the table and the verdicts; returns whether all hold."""
    control = measured["control"] / expected["control"].seconds
    print(f"control: a step of another model on one core takes {control:.2f} of what the cluster file says")
    measured = {layout: took for layout, took in measured.items() if layout in LAYOUTS}
    expected = {layout: expected[layout] for layout in measured}
    print(f"{'layout':44} {'measured':>9} {'predicted':>10} {'error':>7}")
    for layout, took in sorted(measured.items(), key=lambda item: item[1]):
        told = expected[layout]
        print(f"{layout:44} {1e3 * took:6.1f} ms {1e3 * told.seconds:7.1f} ms {told.seconds / took - 1:+7.1%}")
        if lines:
            print("    " + ", ".join(f"{name} {1e3 * time:.1f}" for name, time in told.lines.items() if time > 5e-5))
    errors = [abs(expected[layout].seconds / took - 1) for layout, took in measured.items()]
    median = statistics.median(errors)
    correlation = rank_correlation(list(measured.values()), [expected[layout].seconds for layout in measured])
    first = min(expected, key=lambda layout: expected[layout].seconds)
    regret = measured[first] / min(measured.values()) - 1
    print(f"{len(measured)} layouts: median error {median:.1%} (at most {BOUND:.0%}), worst {max(errors):.1%}")
    print(f"rank correlation {correlation:.3f} (at least {CORRELATION})")
    print(f"ranked first: {first}, {regret:.1%} slower than the fastest measured (at most {REGRET:.0%})")
    return median <= BOUND and correlation >= CORRELATION and regret <= REGRET


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cluster", help="what `meshwright probe --ranks 4` wrote")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--lines", action="store_true")
    options = parser.parse_args()
    took = json.loads(options.measured.read_text()) if options.measured else measure(options.rounds, options.save)
    held = report(took, predicted(load_cluster(options.cluster)), options.lines)
    raise SystemExit(0 if held else 1)
