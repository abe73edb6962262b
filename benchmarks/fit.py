"""Fits constants of devices to timings of single operators: see predict/cost/constants.py, which has what this prints.

    python benchmarks/fit.py TIMINGS [--every 13]

TIMINGS holds the folders Perlmutter (A100 SXM4 80GB) and Vista (GH200) of github.com/DebarghaG/estimate-train-time (MIT),
with measured seconds of GPT-NeoX's operators in fp16. Of each file every so many rows are fitted, and the error is of
all others. What bounds an operator is fitted from those that it bounds: matrix products from the linear layers, streams
from GELU and residual sums, and so on.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from meshwright.predict.cost.constants import DEVICES, Constants
from meshwright.predict.cost.operators import LOSS_BYTES, Flash, Move, Product, Work
from meshwright.predict.cost.roofline import seconds
from meshwright.spec.cluster import Device
from meshwright.spec.devices import KINDS

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
                tried = _scaled(best, name, factor)
                found = wrong(tried)
                if found < least - 1e-6:
                    best, least, better = tried, found, True
        step = step if better else step / 2
    return best


def _scaled(constants: Constants, name: str, factor: float) -> Constants:
    if name.startswith("tiles"):
        place = int(name[-1])
        tiles = list(constants.tiles)
        rows_, columns, speed = tiles[place]
        tiles[place] = (rows_, columns, min(speed * factor, 1.2))
        return replace(constants, tiles=tuple(tiles))
    value = getattr(constants, name) * factor
    return replace(constants, **{name: min(value, 1.0) if name not in ("depth", "kernel", "flash_width") else value})


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
    ("batched products", ("baddbmm", "bmm"), batched, "FB", ()),
    ("fused attention", ("flash_atten",), flash, "F", ("flash", "flash_width")),
    ("fused attention's backward", ("flash_atten",), flash, "B", ("flash_backward",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("timings", type=Path)
    parser.add_argument("--every", type=int, default=13)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    for machine, (_, _, kind) in MACHINES.items():
        device = KINDS[kind].device
        if machine in BANDWIDTH:
            device = device.model_copy(update={"bandwidth": BANDWIDTH[machine]})
        constants = replace(Constants(), **DEVICES[machine])
        for name, operators, of, passes, names in STEPS:
            if options.only and options.only not in name:
                continue
            every = timings(options.timings, machine, operators, of, passes)
            fitted = every[:: options.every]
            others = [each for place, each in enumerate(every) if place % options.every]
            constants = descend(lambda tried: error(tried, device, fitted), constants, names)
            told = ", ".join(f"{n}={_told(constants, n)}" for n in names)
            print(
                f"{machine} {name}: error {error(constants, device, others):.1%} of {len(others):,} others; {told}",
                flush=True,
            )


def _told(constants: Constants, name: str) -> str:
    return str(constants.tiles) if name.startswith("tiles") else f"{getattr(constants, name):.3g}"


if __name__ == "__main__":
    main()
