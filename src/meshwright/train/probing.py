"""What one device of this machine takes for the pieces that a prediction is made of, as constants of predict/cost.

Each constant is what makes the prediction of a piece equal to what the piece took: products of matrices by shape,
attention, what moves memory, the optimizer, what every operator costs however small. At last a training step of a small
model is taken as a whole, since in training caches are colder than in a loop over one operator.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.model.attention import Sdpa
from meshwright.model.build import DTYPES, build
from meshwright.model.init import initialise_
from meshwright.model.layers import Embedding, RMSNorm
from meshwright.model.loss import cross_entropy
from meshwright.model.rope import rotate
from meshwright.predict.cost.constants import Constants, constants_of
from meshwright.predict.cost.operators import Flash, Move, Operator, Product, Shard, Sizes, block, embedding, head
from meshwright.predict.cost.parts import Parts, again
from meshwright.predict.cost.roofline import kernels, product
from meshwright.predict.cost.step import step_time
from meshwright.spec.cluster import Cluster, Flops
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, RunSpec
from meshwright.train.trainer import Trainer

Work = Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """How much is measured. seconds: for each piece; passes: over all of a device's pieces, since a machine is faster
    in one moment than in another; rounds: of all collectives; small: sizes for a test."""

    seconds: float = 0.04
    passes: int = 3
    rounds: int = 9
    small: bool = False


@dataclass(frozen=True)
class Timer:
    """Times work on `device`."""

    device: torch.device
    effort: Effort

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def __call__(self, work: Work) -> float:
        """Seconds of `work`, by runs of it that are long enough for the clock: the lower quartile, since whatever else
        the machine does makes them longer, and long ones more than short ones."""
        once = max(self._run(work, 1), self._run(work, 1), 1e-7)
        repeats = max(1, round(min(2e-3, self.effort.seconds / 5) / once))
        end = time.perf_counter() + self.effort.seconds
        samples = [self._run(work, repeats)]
        while time.perf_counter() < end or len(samples) < 4:
            samples.append(self._run(work, repeats))
        return statistics.quantiles(samples, n=4)[0]

    def _run(self, work: Work, repeats: int) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        self.wait()
        return (time.perf_counter() - start) / repeats


# -- products -------------------------------------------------------------------------------------------------------

SHAPES = (
    (512, 512, 512), (1024, 256, 256), (256, 1024, 256), (256, 256, 1024), (2048, 192, 192), (512, 688, 256),
    (512, 256, 688), (128, 512, 512), (256, 64, 256), (64, 256, 256), (1024, 128, 64), (688, 256, 512), (64, 64, 64),
)  # fmt: skip
"""Rows, columns and inner dimension, as products of small models have them."""
LARGE = 8  # times that, on an accelerator


def shapes(timer: Timer) -> list[tuple[int, int, int]]:
    """Those that are measured on the timer's device."""
    scale = LARGE if timer.device.type != "cpu" else 1
    some = SHAPES[:4] if timer.effort.small else SHAPES
    return [(m * scale, n * scale, k * scale) for m, n, k in some]


def products(timer: Timer, dtype: torch.dtype) -> dict[tuple[int, int, int], float]:
    """Seconds of a linear layer's product by its shape."""
    found = {}
    for m, n, k in shapes(timer):
        x, weight = (torch.randn(rows, k, device=timer.device).to(dtype) for rows in (m, n))
        found[m, n, k] = timer(lambda x=x, weight=weight: F.linear(x, weight))  # type: ignore[misc]
    return found


def fit_products(measured: dict[tuple[int, int, int], float], constants: Constants, bandwidth: float, size: int) -> Any:
    """The peak, and constants with the `depth` and `product` that are nearest to all shapes by their ratio."""
    peak = max(2 * m * n * k / took for (m, n, k), took in measured.items())
    best: tuple[float, Constants] = (math.inf, constants)
    for depth in (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0):
        trial = replace(constants, product=1.0, depth=depth, sustained=1.0)
        ratios = [product(Product(1, *shape), trial, peak, bandwidth, size) / took for shape, took in measured.items()]
        middle = statistics.median(ratios)
        off = statistics.fmean(abs(math.log(ratio / middle)) for ratio in ratios)
        if off < best[0]:
            best = off, replace(trial, product=middle)
    return peak, best[1]


# -- what moves memory, and attention -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One size in which the operators of a block are measured."""

    hidden: int
    micro: int
    seq: int

    @property
    def spec(self) -> ModelSpec:
        heads = max(self.hidden // 64, 1)
        return ModelSpec(
            family="llama", vocab=512, hidden=self.hidden, layers=2, heads=heads, ffn=self.hidden * 11 // 4 // 8 * 8,
            max_seq=self.seq,
        )  # fmt: skip

    def sizes(self, size: int) -> Sizes:
        return Sizes(self.spec, Shard(micro=self.micro), self.seq, size, "sdpa", False)

    def run(self, precision: str) -> RunSpec:
        """A run of one rank with one micro-batch."""
        return RunSpec(
            model=self.spec, data=Data(seq_len=self.seq), batch=Batch(sequences=self.micro, micro=self.micro),
            layout=Layout(dp=1), precision=precision,
        )  # fmt: skip


CASES = (Case(192, 2, 256), Case(384, 4, 256))
TINY = Case(64, 1, 8)


def cases(timer: Timer) -> tuple[Case, ...]:
    if timer.effort.small:
        return (Case(64, 1, 64),)
    return CASES if timer.device.type == "cpu" else (Case(2048, 2, 2048), Case(4096, 2, 4096))


def operators(case: Case, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Work, Work]]:
    """Name, forward and backward of each operator but products, as the model writes it."""
    spec, tokens = case.spec, (case.micro, case.seq)

    def values(*shape: int) -> Tensor:
        return torch.randn(*tokens, *shape, device=device).to(dtype).requires_grad_()

    def both(name: str, function: Callable[..., Tensor], *inputs: Tensor) -> tuple[str, Work, Work]:
        out = function(*inputs)
        wanted = [each for each in inputs if each.requires_grad]
        gradient = torch.ones_like(out)
        return (
            name,
            lambda: function(*inputs),
            lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True),
        )

    norm = RMSNorm(spec.hidden, spec.norm_eps, dtype=dtype, device=device)
    table = Embedding(spec.vocab, spec.hidden, dtype=dtype, device=device)
    for parameter in (norm.weight, table.weight):
        torch.nn.init.ones_(parameter)
    words = torch.randint(spec.vocab, tokens, device=device)
    heads = [values(count, spec.head_width) for count in (spec.heads, spec.num_kv_heads, spec.num_kv_heads)]
    turn = torch.ones(case.seq, 1, spec.head_width, device=device)
    hidden, wide = values(spec.hidden), values(spec.ffn_width)
    core = Sdpa(causal=True, window=None)
    yield both("norm", lambda x, _: norm(x), hidden, norm.weight)
    yield both("rotate", lambda q, k: torch.cat([rotate(q, turn, turn), rotate(k, turn, turn)], -2), *heads[:2])
    yield both("attention", lambda q, k, v: core(q, k, v, None, None), *heads)
    yield both("residual", torch.add, hidden, values(spec.hidden))
    yield both("activation", F.silu, wide)
    yield both("gate", torch.mul, wide, values(spec.ffn_width))
    yield both("lookup", lambda _: table(words), table.weight)
    yield both("loss", lambda logits: cross_entropy(logits, words), values(spec.vocab))


def fit_operators(timer: Timer, constants: Constants, peak: float, bandwidth: float, dtype: torch.dtype) -> Constants:
    """Constants with the part of bandwidth, or of the peak, that each kind of operator reaches."""
    reached: dict[str, list[tuple[float, float]]] = {}
    for case in cases(timer):
        it = case.sizes(dtype.itemsize)
        known = {each.name: each for each in (*block(it), *embedding(it), *head(it))}
        for operator, forward, backward in operators(case, timer.device, dtype):
            for work, took in _timed(timer, known[operator], forward, backward):
                spent = max(took - constants.kernel, took / 4)
                if isinstance(work, Flash):
                    name = "flash_backward" if work.backward else "flash"
                    reached.setdefault(name, []).append((work.seen / peak, spent))
                else:
                    reached.setdefault(work.kind, []).append((work.bytes / bandwidth, spent))
    # What takes long counts most.
    parts = {name: sum(least for least, _ in all_) / sum(spent for _, spent in all_) for name, all_ in reached.items()}
    return replace(constants, softmax=parts["exponential"], sustained=1.0, flash_width=0.0, **parts)  # type: ignore[arg-type]


def _timed(timer: Timer, known: Operator, forward: Work, backward: Work) -> Iterator[tuple[Flash | Move, float]]:
    for works, measured in ((known.forward, forward), (known.backward, backward)):
        for work in works:
            if isinstance(work, Flash) or (isinstance(work, Move) and work.bytes):
                yield work, timer(measured)


def bandwidth(timer: Timer) -> float:
    """Bytes/s of adding one large tensor to another."""
    size = 1 << (18 if timer.effort.small else 24 if timer.device.type == "cpu" else 28)
    x, y = (torch.ones(size, device=timer.device) for _ in range(2))
    return 3 * 4 * size / timer(lambda: x.add_(y))


def update(timer: Timer, constants: Constants, bandwidth: float) -> float:
    """Part of the bandwidth that the optimizer reaches."""
    size = 1 << (14 if timer.effort.small else 20)
    weight, gradient, first, second = ([torch.rand(size, device=timer.device)] for _ in range(4))
    steps = [torch.ones((), device=timer.device)]

    def step() -> None:
        torch._fused_adamw_(
            weight, gradient, first, second, [], steps, lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    return constants.update_bytes * size / (bandwidth * timer(step))


# -- training steps -------------------------------------------------------------------------------------------------


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


def kernel(timer: Timer) -> float:
    """Seconds of an operator that has next to nothing to do."""
    x, y = torch.ones(8, device=timer.device), torch.ones(8, device=timer.device)
    return timer(lambda: x.add_(y))


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


def peaks(timer: Timer) -> dict[str, float]:
    """FLOP/s of a large product in each precision."""
    size = 128 if timer.effort.small else 512 if timer.device.type == "cpu" else 8192
    found = {}
    with torch.no_grad():
        for precision, dtype in DTYPES.items():
            a = torch.ones(size, size, device=timer.device, dtype=dtype)
            found[precision] = 2 * size**3 / timer(lambda a=a: a @ a)  # type: ignore[misc]
    return found


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


__all__ = ["Effort", "Parts", "Timer", "fit_device", "peaks", "threads"]
