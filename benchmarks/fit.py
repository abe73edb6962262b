"""Fits the constants of predict/cost/constants.py, which has what this prints.

    python benchmarks/fit.py timings FOLDER [--every 13]
    python benchmarks/fit.py links FOLDER
    python benchmarks/fit.py tables FOLDER

timings, links: FOLDER/calib_estimate_train_time holds the folders Perlmutter (A100 SXM4 80GB, four a node) and Vista
(GH200, one a node) of github.com/DebarghaG/estimate-train-time (MIT): measured seconds of GPT-NeoX's operators in fp16,
and of collectives; FOLDER/calib_vtrain_a100_allreduce_8gpu.csv an all-reduce sweep of github.com/VIA-Research/vTrain
(MIT). Of each file every so many rows are fitted, and the error is of all others. What bounds an operator is fitted
from those that it bounds: products from linear layers, streams from GELU and residual sums, and so on. Left out: the
GH200's backward of fused attention, which is faster than the device's peak, and lookups on several tensor ranks, whose
times fall with the ranks as if each looked up a part of the tokens.

tables: what only whole steps tell, from a third of the rows of published tables (published.py says which).
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from meshwright.predict.cost.constants import DEVICES, Constants, constants_of
from meshwright.predict.cost.links import Links
from meshwright.predict.cost.operators import LOSS_BYTES, Flash, Move, Product, Work
from meshwright.predict.cost.roofline import seconds
from meshwright.predict.cost.step import step_time
from meshwright.spec.cluster import Cluster, Device, Link
from meshwright.spec.devices import KINDS
from meshwright.spec.traffic import Operation
from published import TABLES, Case, cluster

SIZE = 2
MACHINES = {"A100": ("Perlmutter", "NVIDIAA100-SXM4-80GB", "a100-80"), "H100": ("Vista", "NVIDIAGH200120GB", "h100")}
"""Folder, prefix of files, and the device whose data sheet is meant. A GH200 has the H100's units and clock, and the
same HBM3 as an H200's 4 TB/s."""
BANDWIDTH = {"H100": 4.0e12}


@dataclass(frozen=True)
class Timing:
    """What one row measured: the works of one pass, and its seconds."""

    works: tuple[Work, ...]
    seconds: float


def rows(folder: Path, machine: str, operator: str) -> list[dict[str, float]]:
    place, prefix, _ = MACHINES[machine]
    with (folder / place / "operator" / f"{prefix}_{operator}_fp16.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


# -- what each operator is made of -----------------------------------------------------------------------------------


def linear(row: dict[str, float], operator: str) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    n, d, t = int(row["b"] * row["l"]), int(row["dim"]), int(row["mp"])
    words = -(-50257 // (128 * t)) * 128
    into, out = {
        "linear1": (d, 3 * d // t), "linear2": (d // t, d), "linear3": (d, 4 * d // t), "linear4": (4 * d // t, d),
        "linear_final": (d, words),
    }[operator]  # fmt: skip
    return (Product(1, n, out, into),), (Product(1, n, into, out), Product(1, into, out, n))


def batched(row: dict[str, float], operator: str) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """baddbmm: scores of queries and keys; bmm: what the values add up to."""
    b, t, w = int(row["b"] * row["h"] / row["mp"]), int(row["l"]), int(row["dim"] / row["h"])
    scores, values = Product(b, t, t, w), Product(b, t, w, t)
    if operator == "baddbmm":
        return (scores,), (values, values)
    return (values,), (scores, values)


def moved(row: dict[str, float], operator: str) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    tokens = row["b"] * row["l"]
    wide = tokens * row.get("dim", 0.0) * SIZE
    scores = row["b"] * row.get("h", 0.0) / row.get("mp", 1.0) * row["l"] ** 2 * SIZE
    logits = tokens * 50304 / row.get("mp", 1.0)
    of: dict[str, tuple[Work, Work]] = {
        "gelu": (Move(8 * wide / row.get("mp", 1.0)), Move(12 * wide / row.get("mp", 1.0))),
        "res_add": (Move(3 * wide), Move(3 * wide)),
        "layernorm": (Move(2 * wide, "norm"), Move(4 * wide, "norm_backward")),
        "ScaledUpperTriangMaskedSoftmax": (Move(1.5 * scores, "softmax"), Move(2 * scores, "softmax")),
        "embedding": (Move(2 * wide, "lookup"), Move(4 * wide, "lookup")),
        "parallel_cross_entropy_128": (Move(LOSS_BYTES[0] * logits), Move(LOSS_BYTES[1] * logits)),
    }
    forward, backward = of[operator]
    return (forward,), (backward,)


def flash(row: dict[str, float], operator: str) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    b, t, w = int(row["b"] * row["h"] / row["mp"]), int(row["l"]), int(row["dim"] / row["h"])
    each = 2 * b * t * t * w
    return (Flash(2 * each, float(each), w),), (Flash(5 * each, 2.5 * each, w, backward=True),)


# -- fitting ---------------------------------------------------------------------------------------------------------


def timings(
    folder: Path, machine: str, operators: Sequence[str], of: Callable[..., Any], passes: str = "FB"
) -> list[Timing]:
    found = []
    for operator in operators:
        for row in rows(folder, machine, operator):
            if operator == "embedding" and row["mp"] > 1:
                continue
            for which, works in zip("FB", of(row, operator), strict=True):
                if which in passes:
                    found.append(Timing(works, row[f"{which}_dur(us)"] * 1e-6))
    return found


def error(constants: Constants, device: Device, held: Sequence[Timing]) -> float:
    """Mean absolute logarithm of predicted over measured."""
    peak, bandwidth = device.flops["fp16"], device.bandwidth
    return mean(
        abs(math.log(sum(seconds(w, constants, peak, bandwidth, SIZE) for w in each.works) / each.seconds))
        for each in held
    )


def descend(wrong: Callable[[Constants], float], start: Constants, names: Sequence[str]) -> Constants:
    """The constants of `names` that are least wrong, by steps in each direction that get smaller."""
    best, least, step = start, wrong(start), 0.3
    while step > 0.01:
        better = False
        for name in names:
            for factor in (1 + step, 1 / (1 + step)):
                tried = scaled(best, name, factor)
                found = wrong(tried)
                if found < least - 1e-6:
                    best, least, better = tried, found, True
        step = step if better else step / 2
    return best


def scaled(constants: Constants, name: str, factor: float) -> Constants:
    """tiles1: the speed of the second tile. Fractions stay at 1 at most."""
    if name.startswith("tiles"):
        tiles = list(constants.tiles)
        rows_, columns, speed = tiles[int(name[-1])]
        tiles[int(name[-1])] = (rows_, columns, min(speed * factor, 1.0))
        return replace(constants, tiles=tuple(tiles))
    value = getattr(constants, name) * factor
    return replace(constants, **{name: value if name in UNBOUNDED else min(value, 1.0)})


UNBOUNDED = ("depth", "kernel", "flash_width", "batched", "sustained")

STEPS: tuple[tuple[str, Sequence[str], Callable[..., Any], str, Sequence[str]], ...] = (
    ("streams", ("gelu", "res_add"), moved, "FB", ("stream", "kernel")),
    ("softmax", ("ScaledUpperTriangMaskedSoftmax",), moved, "FB", ("softmax",)),
    ("norm", ("layernorm",), moved, "F", ("norm",)),
    ("norm's backward", ("layernorm",), moved, "B", ("norm_backward",)),
    ("lookup", ("embedding",), moved, "FB", ("lookup",)),
    ("loss", ("parallel_cross_entropy_128",), moved, "FB", ()),
    (
        "linear layers",
        ("linear1", "linear2", "linear3", "linear4", "linear_final"),
        linear,
        "FB",
        ("product", "depth", "quantised", "tiles1", "tiles2", "tiles3"),
    ),
    ("batched products", ("baddbmm", "bmm"), batched, "FB", ("batched",)),
    ("fused attention", ("flash_atten",), flash, "F", ("flash", "flash_width")),
    ("fused attention's backward", ("flash_atten",), flash, "B", ("flash_backward",)),
)


def fit_timings(folder: Path, every: int) -> None:
    for machine, (_, _, kind) in MACHINES.items():
        device = KINDS[kind].device
        if machine in BANDWIDTH:
            device = device.model_copy(update={"bandwidth": BANDWIDTH[machine]})
        constants = replace(Constants(), **DEVICES[machine])
        for name, operators, of, passes, names in STEPS:
            if (machine, names) == ("H100", ("flash_backward",)):
                continue
            found = timings(folder / "calib_estimate_train_time", machine, operators, of, passes)
            others = [each for place, each in enumerate(found) if place % every]
            constants = descend(partial(error, device=device, held=found[::every]), constants, names)
            wrong = error(constants, device, others)
            print(
                f"{machine} {name}: {told(constants, names)}; error {wrong:.1%} of {len(others):,} others", flush=True
            )


# -- links -----------------------------------------------------------------------------------------------------------


class Sweep(NamedTuple):
    """Measured seconds of one collective on one group, by bytes."""

    name: str
    operation: Operation
    cluster: Cluster
    ranks: int
    bytes: list[float]
    seconds: list[float]


def sweeps(folder: Path) -> dict[str, list[Sweep]]:
    """Within a node, and between nodes. Perlmutter's nodes spoke over sockets, at 1 GB/s: left out."""
    calib = folder / "calib_estimate_train_time"
    dgx, pairs = cluster("a100-80", 8, "default", 25e9), _one_node("a100-80", 4)
    vista = _nodes("h100", 8, 400 / 8 * 1e9)
    with (folder / "calib_vtrain_a100_allreduce_8gpu.csv").open() as file:
        rows_ = list(csv.reader(file))[1:]
    inside = [
        Sweep(
            "8 A100, NVSwitch", "all_reduce", dgx, 8, [float(r[0]) for r in rows_], [float(r[3]) * 1e-9 for r in rows_]
        )
    ]
    inside.append(_nccl(calib / "Perlmutter", "NVIDIAA100-SXM4-80GB_allreduce_fp16_1_4", "all_reduce", pairs, 4))
    between = [
        _nccl(calib / "Vista", f"NVIDIAGH200120GB_allreduce_fp16_{n}_1", "all_reduce", vista, n) for n in (2, 4, 8)
    ]
    between.append(_nccl(calib / "Vista", "NVIDIAGH200120GB_p2p_fp16_2_1", "shift", vista, 2))
    return {"wire": inside, "network": between}


def _one_node(kind: str, devices: int) -> Cluster:
    """Devices of one node, each joined with each by links that together make its bandwidth."""
    return cluster(kind, devices, "default", 25e9)


def _nodes(kind: str, nodes: int, network: float) -> Cluster:
    link = Link(name="network", devices=nodes, bandwidth=network, latency=KINDS[kind].outer.latency)
    return Cluster(device=KINDS[kind].device, nodes=nodes, links=(link,))


def _nccl(folder: Path, name: str, operation: Operation, on: Cluster, ranks: int) -> Sweep:
    with (folder / "nccl" / f"{name}.csv").open() as file:
        found = [(SIZE * float(row["shape"]), float(row["dur(us)"]) * 1e-6) for row in csv.DictReader(file)]
    return Sweep(name, operation, on, ranks, [size for size, _ in found], [time for _, time in found])


def wrong_links(constants: Constants, held: Sequence[Sweep], every: int = 1, of: int = 0) -> float:
    """Mean absolute logarithm, each sweep alike."""
    found = []
    for sweep in held:
        size, took = (np.array(each)[of::every] for each in (sweep.bytes, sweep.seconds))
        predicted = Links(sweep.cluster, constants).collective(sweep.operation, size, float(sweep.ranks))
        found.append(float(np.abs(np.log(predicted / took)).mean()))
    return mean(found)


def fit_links(folder: Path) -> None:
    constants = Constants()
    for part, names in (("wire", ("wire", "collective")), ("network", ("network", "message_network"))):
        held = sweeps(folder)[part]
        constants = descend(partial(wrong_links, held=held, every=3, of=2), constants, names)
        print(part, told(constants, names))
        for each in held:
            print(f"  {each.name}: error {mean([wrong_links(constants, [each], 3, of) for of in (0, 1)]):.1%}")


# -- whole steps -----------------------------------------------------------------------------------------------------

FITS: tuple[tuple[str, str, str, Sequence[str]], ...] = (
    ("megatron-2021", "A100", "Megatron-LM 2021, table 1|vTrain", (
        "sustained", "straggle", "host", "host_backward", "host_block", "network",
    )),
    ("deepspeed-2021", "A100", "ZeRO 3", ("network", "contention")),
    ("megatron-core", "H100", "Megatron-Core", ("sustained", "overlap_tensor")),
    ("fsdp", "A100", "MPT", ("sustained", "flash", "flash_backward")),
    ("fsdp", "H100", "MPT", ("sustained", "flash", "flash_backward", "contention", "network", "straggle")),
)  # fmt: skip
MOST = 50  # fitted rows of a table that are used


def fit_tables(folder: Path) -> None:
    for stack, device, tables, names in FITS:
        chosen = [table for table in TABLES if any(word in table.name for word in tables.split("|"))]
        groups = [[case for case, fitted in table.cases(folder) if fitted and on(case, device)] for table in chosen]
        groups = [group[:: -(-len(group) // MOST)] for group in groups]
        start = constants_of(groups[0][0].cluster)
        constants = descend(partial(wrong_steps, groups=groups, names=names), start, names)
        print(
            f"{stack} on {device}: {told(constants, names)}; error {wrong_steps(constants, groups, names):.1%}",
            flush=True,
        )


def on(case: Case, device: str) -> bool:
    return case.cluster.device.name.startswith(device)


def wrong_steps(constants: Constants, groups: Sequence[Sequence[Case]], names: Sequence[str]) -> float:
    """Mean absolute logarithm, each table alike."""
    measured = {name: getattr(constants, name) for name in names}
    return mean(mean(_wrong_step(case, measured) for case in group) for group in groups)


def _wrong_step(case: Case, measured: dict[str, float]) -> float:
    there = case.cluster.model_copy(update={"constants": measured})
    return abs(math.log(step_time(case.run, case.layout, there).seconds / case.seconds))


# -- the command -----------------------------------------------------------------------------------------------------


def told(constants: Constants, names: Sequence[str]) -> str:
    """ "stream=0.79, kernel=4.5e-06"; the tiles once."""
    values = [f"{name}={getattr(constants, name):.3g}" for name in names if not name.startswith("tiles")]
    return ", ".join([*values, f"tiles={constants.tiles}"] if len(values) < len(names) else values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("timings", "links", "tables"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=13, help="timings: one row of so many is fitted")
    options = parser.parse_args()
    match options.what:
        case "timings":
            fit_timings(options.folder, options.every)
        case "links":
            fit_links(options.folder)
        case "tables":
            fit_tables(options.folder)


if __name__ == "__main__":
    main()
