"""From what pieces take to the constants of a device; at last by training steps of small models as a whole."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.model.build import DTYPES, build
from meshwright.model.init import initialise_
from meshwright.predict.cost.constants import Constants, constants_of
from meshwright.predict.cost.operators import Shard, block, embedding, head
from meshwright.predict.cost.parts import Parts, again
from meshwright.predict.cost.roofline import kernels
from meshwright.predict.cost.step import step_time
from meshwright.spec.cluster import Cluster, Flops
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec
from meshwright.train.probing import (
    CASES,
    TINY,
    Case,
    Timer,
    Work,
    bandwidth,
    cases,
    fit_operators,
    fit_products,
    kernel,
    products,
    update,
)
from meshwright.train.trainer import Trainer


class RandomTokens:
    """A data set as `Trainer` reads it, of tokens without meaning."""

    def __init__(self, vocab: int, seq_len: int) -> None:
        self.vocab, self.seq_len = vocab, seq_len

    def ids(self, step: int, sequences: int) -> Tensor:
        return torch.arange(sequences)

    def batch(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(len(ids) * self.seq_len).view(len(ids), -1) * 7919 % self.vocab
        return tokens, tokens

    def documents(self, ids: Tensor) -> Tensor | None:
        return None


def stepper(run: RunSpec, mesh: Mesh) -> Work:
    """One training step of `run` on this rank, again and again."""
    trainer = Trainer(run, mesh)
    data = RandomTokens(run.model.vocab, run.data.seq_len)

    def step() -> None:
        trainer.update(0, trainer.accumulate(data, 0))  # type: ignore[arg-type]

    return step


def step_of(timer: Timer, case: Case, precision: str) -> float:
    """Seconds of a training step of one rank."""
    return timer(stepper(case.run(precision), Mesh.single(timer.device)))


def with_constants(cluster: Cluster, constants: dict[str, Any]) -> Cluster:
    return cluster.model_copy(update={"constants": cluster.constants | constants})


def in_training(timer: Timer, cluster: Cluster, precision: str) -> float:
    """How fast whole steps are beside their prediction from single operators: the median of the cases."""
    found = []
    for case in cases(timer):
        run = case.run(precision)
        found.append(step_time(run, run.layout, cluster).seconds / step_of(timer, case, precision))
    return statistics.median(found)


FITTED = (
    "product", "depth", "flash", "flash_backward", "flash_width", "stream", "softmax", "norm", "norm_backward",
    "lookup", "exponential", "update", "kernel", "host", "host_backward", "host_step", "sustained",
)  # fmt: skip
SLOWED = ("stream", "softmax", "norm", "norm_backward", "lookup", "exponential")


def fit_device(timer: Timer, cluster: Cluster, precision: str) -> Cluster:
    """`cluster`, of one device, with what was measured of it. The device's own figures are kept unless it is a CPU's
    core, of which there is no data sheet."""
    dtype = DTYPES[precision]
    start = constants_of(cluster)
    wide = bandwidth(timer)
    with torch.no_grad():
        peak, constants = fit_products(products(timer, dtype), start, wide, dtype.itemsize)
    if cluster.device.kind != "cpu":
        known = cluster.device.flops[precision]  # type: ignore[index]
        constants = replace(constants, product=constants.product * peak / known, stream=start.stream)
        peak, wide = known, cluster.device.bandwidth
    else:
        cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update={"bandwidth": wide})})
    constants = replace(constants, kernel=kernel(timer), host=0.0, host_backward=0.0, host_block=0.0, host_step=0.0)
    constants = fit_operators(timer, constants, peak, wide, dtype)
    constants = replace(constants, update=update(timer, constants, wide))
    constants = fit_host(timer, _measured(cluster, peak, precision, constants), constants, precision)
    cluster = _measured(cluster, peak, precision, constants)
    cluster = slowed(cluster, in_training(timer, cluster, precision))
    return with_constants(cluster, {"watched": _short(watched(timer, cluster, precision))})


def slowed(cluster: Cluster, part: float) -> Cluster:
    """`cluster`, where everything that computes is `part` as fast."""
    found = {name: _short(cluster.constants[name] * part) for name in ("sustained", *SLOWED)}
    return with_constants(cluster, found)


def watched(timer: Timer, cluster: Cluster, precision: str) -> float:
    """Seconds that a kernel takes longer where a recompute looks at each operator, to keep the outputs of some."""
    case = TINY if timer.effort.small else CASES[0]
    plain = case.run(precision)
    kept = plain.model_copy(update={"layout": Layout(dp=1, recompute="selective")})
    took, known = (
        timer(stepper(kept, Mesh.single(timer.device))) - timer(stepper(plain, Mesh.single(timer.device))),
        step_time(kept, kept.layout, cluster).seconds - step_time(plain, plain.layout, cluster).seconds,
    )
    operators = block(case.sizes(DTYPES[precision].itemsize))
    seen = [*operators, *again(operators, Shard(recompute="selective"), case.spec)]
    return max(took - known, 0.0) / (case.spec.layers * sum(kernels(each.forward) for each in seen))


def middle(clusters: Sequence[Cluster]) -> Cluster:
    """The median of each figure that was measured several times."""
    first = clusters[0]
    found = {name: _short(statistics.median(each.constants[name] for each in clusters)) for name in first.constants}
    device = first.device
    flops = {
        name: statistics.median(getattr(each.device.flops, name) for each in clusters)
        for name, value in device.flops
        if value is not None
    }
    bandwidth = statistics.median(each.device.bandwidth for each in clusters)
    device = device.model_copy(update={"flops": Flops(**flops), "bandwidth": bandwidth})
    return first.model_copy(update={"device": device, "constants": found})


def _measured(cluster: Cluster, peak: float, precision: str, constants: Constants) -> Cluster:
    device = cluster.device
    if device.kind == "cpu":
        flops = device.flops.model_copy(update={precision: peak})
        device = device.model_copy(update={"flops": flops})
    found = {name: _short(getattr(constants, name)) for name in FITTED}
    return with_constants(cluster.model_copy(update={"device": device}), found)


def _short(value: float) -> float:
    """Four digits are more than a clock gives."""
    return float(f"{value:.4g}")


def fit_host(timer: Timer, cluster: Cluster, constants: Constants, precision: str) -> Constants:
    """Constants with what the interpreter adds to each kernel in forward and backward of a tiny model, where it is
    nearly all there is, and to a step beside both."""
    dtype = DTYPES[precision]
    model = build(TINY.spec, dtype=dtype, device=timer.device)
    initialise_(model, seed=0)
    tokens, targets = RandomTokens(TINY.spec.vocab, TINY.seq).batch(torch.arange(TINY.micro))
    tokens, targets = tokens.to(timer.device), targets.to(timer.device)
    forward = timer(lambda: model(tokens, targets))
    backward = timer(lambda: model(tokens, targets).backward()) - forward
    it = replace(TINY.sizes(dtype.itemsize), accumulate=constants.accumulate_bytes)
    every = [*block(it) * TINY.spec.layers, *embedding(it), *head(it)]
    parts = Parts(TINY.spec, TINY.seq, precision, cluster)  # type: ignore[arg-type]
    left = []
    for took, works in ((forward, [each.forward for each in every]), (backward, [each.backward for each in every])):
        flat = [work for of_operator in works for work in of_operator]
        left.append(max(took - sum(parts.seconds(work) for work in flat), 0.0) / kernels(flat))
    constants = replace(constants, host=left[0], host_backward=left[1])
    run = TINY.run(precision)
    known = step_time(run, run.layout, with_constants(cluster, {"host": left[0], "host_backward": left[1]}))
    return replace(constants, host_step=max(step_of(timer, TINY, precision) - known.seconds, 0.0))


def threads(timer: Timer, case: Case, precision: str, most: int) -> float:
    """How many times faster a step is with `most` threads than with one."""
    before = torch.get_num_threads()
    try:
        took = []
        for count in (1, most):
            torch.set_num_threads(count)
            took.append(step_of(timer, case, precision))
        return took[0] / took[1]
    finally:
        torch.set_num_threads(before)
