"""What devices and software make of the figures on data sheets: every constant of the model of time, and its source.

A set of constants holds for one kind of device and one stack of software, never for a table's row. `DEVICES` has what
kernels reach, `STACKS` what software adds: which kernels it calls, how long the host takes to issue them, what it sends
beside computing. A cluster names its stack, and may bring measured constants of its own (`meshwright probe`).

How they were found: `benchmarks/fit.py` fits the fields of `DEVICES` to timings of single operators and collectives,
and prints them; those of `STACKS` that no such timing tells were fitted to a third of the rows of tables of whole
steps, which docs/accuracy.md marks and leaves out of the errors it states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from meshwright.predict.cost.cpu import check_table
from meshwright.spec.cluster import Cluster
from meshwright.spec.errors import UserError
from meshwright.spec.words import join, near


@dataclass(frozen=True, slots=True)
class Constants:
    """Fractions are of the figures in `spec.cluster`; times are seconds."""

    # -- products of matrices: see roofline.product
    product: float = 0.85  # part of the peak that a product reaches whose tiles are many and deep
    sustained: float = 1.0  # part of the clock of short timings that a device keeps in training (power)
    units: int = 108  # multiprocessors, which take tiles in waves
    tiles: tuple[tuple[int, int, float], ...] = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
    """Rows and columns of the output that a unit computes at once, and how fast beside the largest."""
    depth: float = 100.0  # elements of the inner dimension that a tile's beginning and end are worth
    batched: float = 1.0  # how fast batches of products are beside single ones of the same shapes
    quantised: float = 0.5  # how much of a part of a wave costs as a whole one: 1 all, 0 nothing beyond its part

    # -- fused attention: part of the peak, of the pairs that are seen, in forward and backward
    flash: float = 0.55
    flash_backward: float = 0.45
    flash_width: float = 0.0  # elements of a head's width that a block of scores costs beside its products

    # -- what moves in the device's memory: part of its bandwidth
    stream: float = 0.75  # element by element
    softmax: float = 0.6
    norm: float = 0.5
    norm_backward: float = 0.5
    lookup: float = 0.3  # of single rows, by index
    exponential: float = 0.0  # element by element with an exponential of each; 0: as stream
    update: float = 0.7  # the optimizer

    # -- what each operator costs however small
    kernel: float = 4e-6  # a kernel on the device
    host: float = 10e-6  # the host, until a kernel is issued in forward
    host_backward: float = 6e-6  # the same in backward
    host_step: float = 1e-3  # the host, beside forward and backward, once a step
    beside: bool = True  # whether the host issues kernels while the device computes; a CPU does one or the other
    watched: float = 0.0  # the host, for each kernel of a region that is recomputed but for some operators' outputs
    host_block: float = 0.0  # the host, for each block and pass, beside its kernels

    # -- links
    wire: float = 0.77  # part of a link's bandwidth that a large collective within a node reaches
    network: float = 0.95  # the same between nodes
    message: float = 0.75  # part of a link's bandwidth that a single message within a node reaches
    message_network: float = 0.67  # the same between nodes
    collective: float = 1e-4  # beginning and end of any collective
    send: float = 15e-6  # beginning and end of any message
    hop: float = 0.0  # seconds for each step of a ring beside the link's latency
    crowd: float = 0.0  # how much slower the network is for each doubling of the nodes that a collective joins

    # -- what software does
    fused: bool = False  # whether chains of element-wise operators are one kernel each
    overlap_reduce: bool = True  # whether gradients are reduced while backward computes
    overlap_gather: bool = True  # whether ZeRO gathers parameters while something computes
    overlap_tensor: float = 0.0  # part of the tensor ranks' collectives that is hidden under computing
    overlap_tensor_backward: float = 0.0  # the same in backward, where that hides more
    overlap_message: bool = True  # whether messages between stages go beside computing
    scattered: bool = False  # whether tensor ranks send a part each of a message between stages, and gather it then
    contention: float = 0.0  # part of the time of hidden communication by which computing is slowed down
    accumulate_bytes: float = 10.0  # moved to add a parameter's gradient to those of other micro-batches
    update_bytes: float = 34.0  # that the optimizer moves for each parameter: see parts.optimizer
    straggle: float = 0.0  # by how much the slowest of many devices is slower, for each doubling of them

    # -- CPUs, as `meshwright probe` measures them: see cost/cpu.py
    threads: tuple[tuple[int, float], ...] = ()  # threads of a rank, and how many times faster they are than one
    busy: tuple[tuple[int, float], ...] = ()  # ranks busy at once, and how much slower each is beside its part of cores
    uneven: float = 0.0  # of cores that a pipeline's ranks leave to others, the part that these do not find in time
    collectives: tuple[tuple[str, int, int, tuple[tuple[int, float], ...]], ...] = ()
    """Operation, ranks at once, ranks of a group, and seconds by bytes; where there are any, links do not count."""

    error: float = 0.2  # mean absolute error of step time on published rows that were not fitted: docs/accuracy.md


# Fitted by `benchmarks/fit.py timings`, but for fused attention: fractions of the peak that Dao 2023 (FlashAttention-2,
# arXiv 2307.08691, figures 5 to 7) measures for causal heads of 128 at 2,048 to 4,096 tokens, forward and backward.
_A100: dict[str, Any] = {
    "units": 108, "tiles": ((256, 128, 1.0), (128, 128, 1.0), (128, 64, 0.77), (64, 64, 0.6)),
    "product": 0.88, "depth": 150.0, "quantised": 0.28, "batched": 0.79, "flash": 0.5, "flash_backward": 0.42,
    "stream": 0.79, "softmax": 0.56, "norm": 0.54, "norm_backward": 0.32, "lookup": 0.14, "kernel": 4.8e-6,
}  # fmt: skip
_H100: dict[str, Any] = {
    "units": 132, "tiles": ((256, 128, 1.0), (128, 128, 0.86), (128, 64, 0.38), (64, 64, 0.16)),
    "product": 0.9, "depth": 220.0, "quantised": 0.49, "batched": 1.04, "flash": 0.37, "flash_backward": 0.3,
    "stream": 0.71, "softmax": 0.5, "norm": 0.58, "norm_backward": 0.77, "lookup": 0.15, "kernel": 1.9e-6,
}  # fmt: skip
DEVICES: dict[str, dict[str, Any]] = {
    "A100": _A100,
    "H100": _H100,
    # Taken to be like the nearest one that was timed, but for their multiprocessors (compute units on the MI300X).
    "V100": _A100 | {"units": 80},
    "H200": _H100,
    "B200": _H100 | {"units": 148},
    "GB200": _H100 | {"units": 148},
    "MI300X": _H100 | {"units": 304, "product": 0.6},
    "RTX": _A100 | {"units": 128},
    # One core is one unit: a product's time is by its operations. `meshwright probe` measures the rest.
    "CPU": {
        "units": 1, "tiles": ((16, 16, 1.0),), "product": 0.8, "flash": 0.4, "flash_backward": 0.4, "kernel": 5e-6,
        "host": 2e-5, "host_backward": 3e-5, "beside": False, "wire": 0.8, "network": 0.8, "collective": 1e-4,
    },
}  # fmt: skip
"""By the first word of a device's name."""

# Fitted by `benchmarks/fit.py tables`, where figures are; what is true or false is how the software works.
STACKS: dict[str, dict[str, Any]] = {
    # Meshwright's own runtime. In backward, tensor ranks' sums go under the product of the weight's gradient. On CPUs
    # the cores that compute also copy for Gloo.
    "default": {"overlap_tensor_backward": 0.7},
    "nccl": {"overlap_tensor_backward": 0.7},
    "gloo": {},
    # Megatron-LM as of Narayanan et al. 2021: fused element-wise kernels; nothing is sent under computing.
    "megatron-2021": {
        "fused": True, "overlap_reduce": False, "overlap_gather": False, "overlap_message": False, "scattered": True,
        "sustained": 1.05, "straggle": 0.013, "host": 33e-6, "host_backward": 16e-6, "host_block": 650e-6,
        "network": 0.91, "accumulate_bytes": 6.0, "error": 0.07,
    },
    # ZeRO 3 as Narayanan et al. 2021 raced it: single parameters gathered at a tenth of the adapters' rate.
    "deepspeed-2021": {"fused": True, "network": 0.099, "contention": 0.55, "error": 0.1},
    # Megatron-Core 0.8 with all of its overlaps; collectives of tensor ranks go in parts beside the products.
    "megatron-core": {"fused": True, "scattered": True, "overlap_tensor": 0.66, "accumulate_bytes": 8.0, "error": 0.05},
    # torch's FSDP under autocast, with FlashAttention 1.
    "fsdp": {"error": 0.06},
}  # fmt: skip

# The A100 rows are within nodes, where communication is too short to tell how much it slows computing down: as H100's.
_FSDP_A100: dict[str, Any] = {"sustained": 0.8, "contention": 0.16}
_FSDP_H100: dict[str, Any] = {"sustained": 0.62, "contention": 0.16, "network": 0.56, "straggle": 0.0013}
TOGETHER: dict[tuple[str, str], dict[str, Any]] = {
    ("megatron-core", "H100"): {"sustained": 0.73},
    ("fsdp", "A100"): _FSDP_A100 | {"flash": 0.37, "flash_backward": 0.4},
    ("fsdp", "H100"): _FSDP_H100 | {"flash": 0.29, "flash_backward": 0.33},
    # Nobody has timed ours yet; it issues torch's kernels one by one, as FSDP's models do.
    **{("nccl", device): _FSDP_A100 for device in ("A100", "V100", "RTX")},
    **{("nccl", device): _FSDP_H100 for device in ("H100", "H200", "B200", "GB200", "MI300X")},
}
"""What a stack makes of one kind of device: how far its kernels let the clock go, what they are slowed down by."""


def constants_of(cluster: Cluster) -> Constants:
    """Those that hold on `cluster`. Raises UserError for a stack or a constant that there is none of."""
    if cluster.stack not in STACKS:
        names = list(STACKS)
        raise UserError(
            f"cluster.stack={cluster.stack}: no such stack{near(cluster.stack, names)}; there are {join(names)}"
        )
    for name, value in cluster.constants.items():
        _check(name, value)
    name = "CPU" if cluster.device.kind == "cpu" else cluster.device.name.split()[0]
    both = TOGETHER.get((cluster.stack, name), {})
    return replace(Constants(), **(DEVICES.get(name, {}) | STACKS[cluster.stack] | both | cluster.constants))


DIVIDE = ("product", "sustained", "units", "flash", "flash_backward", "stream", "softmax", "norm", "norm_backward",
          "lookup", "update", "batched", "wire", "network", "message", "message_network")  # fmt: skip


def _check(name: str, value: object) -> None:
    """Raise UserError for a measured constant that is none."""
    known = {field.name: field.default for field in fields(Constants)}
    if name not in known:
        raise UserError(f"cluster.constants.{name}: no such constant{near(name, list(known))}")
    if isinstance(known[name], bool):
        if not isinstance(value, bool):
            raise UserError(f"cluster.constants.{name}={value}: use true or false")
    elif isinstance(known[name], int | float):
        right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not right or float(str(value)) < 0 or (value == 0 and name in DIVIDE):
            raise UserError(f"cluster.constants.{name}={value}: use a number {'above 0' if name in DIVIDE else '≥ 0'}")
    else:
        check_table(name, value)
