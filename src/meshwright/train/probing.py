"""What one device of this machine takes for the pieces that a prediction is made of.

Products of matrices by shape, attention, what moves memory, the optimizer, an operator with nothing to do. Each is as
the model writes it, and each constant of predict/cost is what makes a piece's prediction equal to what it took.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.model.attention import Sdpa
from meshwright.model.build import DTYPES
from meshwright.model.layers import Embedding, RMSNorm
from meshwright.model.loss import cross_entropy
from meshwright.model.rope import rotate
from meshwright.predict.cost.constants import Constants
from meshwright.predict.cost.operators import Flash, Move, Operator, Product, Shard, Sizes, block, embedding, head
from meshwright.predict.cost.roofline import product
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, RunSpec

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


def kernel(timer: Timer) -> float:
    """Seconds of an operator that has next to nothing to do."""
    x, y = torch.ones(8, device=timer.device), torch.ones(8, device=timer.device)
    return timer(lambda: x.add_(y))


def peaks(timer: Timer) -> dict[str, float]:
    """FLOP/s of a large product in each precision."""
    size = 128 if timer.effort.small else 512 if timer.device.type == "cpu" else 8192
    found = {}
    with torch.no_grad():
        for precision, dtype in DTYPES.items():
            a = torch.ones(size, size, device=timer.device, dtype=dtype)
            found[precision] = 2 * size**3 / timer(lambda a=a: a @ a)  # type: ignore[misc]
    return found
