"""Bytes a rank holds from the first step to the last: the sizes of the tensors that a run declares, exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.predict.params import TensorSpec, buffer_count, unit_counts, units
from meshwright.predict.stages import stages_on
from meshwright.spec.boxes import boxes_of_run
from meshwright.spec.cuts import in_whole
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec
from meshwright.spec.stages import Stage

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "float64": 8}
STATES = ("parameters", "gradients", "master weights", "adam moments", "scalars")


def states(run: RunSpec, layout: Layout, rank: int = 0) -> dict[str, int]:
    """Bytes of each of STATES on `rank`, its number in the world, exact, for a resolved `layout`.

    All ranks of one place on `pp` hold as much; each stage of a pipeline is sharded by itself, and a tied table is
    held by the first and the last.

    ZeRO 1 shards the optimizer's states over the data and context ranks, 2 gradients too, 3 parameters too (Rajbhandari
    et al. 2020, figure 1); what is sharded is a tensor rank's part of each tensor, what fills it up included. Each unit
    is padded to equal shards. Master weights are there where parameters are narrower than they, moments have the master
    weights' dtype, and one float32 counts the steps. At ZeRO 3 the freed parameters of a pipeline stage share one
    element.
    """
    stages = stages_on(run, layout, rank)
    whole = sum(size for stage in stages for size in padded(run, layout, stage).values())
    shard = whole // shards(layout)
    parameter, master, gradient = DTYPE_BYTES[run.precision], master_bytes(run), gradient_bytes(run)
    return {
        "parameters": (shard if layout.zero == 3 else whole) * parameter,
        "gradients": (shard if layout.zero >= 2 else whole) * gradient,
        "master weights": 0 if master == parameter else shard * master,
        "adam moments": 2 * shard * master,
        "scalars": 4 + (len(stages) * parameter if layout.zero == 3 else 0),
    }


def shards(layout: Layout) -> int:
    """Ranks that a unit is cut over."""
    return 1 if layout.zero == 0 else layout.zero_shard or layout.state_ranks


def padded(run: RunSpec, layout: Layout, stage: Stage | None = None) -> dict[str, int]:
    """Elements of each unit's flat buffer: its parameters, and as many more as make the shards equal; of a pipeline's
    `stage`, or of the whole model."""
    cut = shards(layout)
    return {name: -(-size // cut) * cut for name, size in unit_counts(run.model, layout.join, layout, stage).items()}


def partial_sums(run: RunSpec, layout: Layout, rank: int, stage: Stage | None = None) -> dict[str, int]:
    """Elements of `rank`'s shards whose gradients are still to be summed over tensor ranks, by these: "tp",
    "tp.inner"; of one of its stages, or of all."""
    found: dict[str, int] = {}
    for each in stages_on(run, layout, rank) if stage is None else (stage,):
        for tensor, elements in _held(run, layout, rank, each):
            if tensor.summed is not None:
                found[tensor.summed] = found.get(tensor.summed, 0) + elements
    return found


def tied_elements(run: RunSpec, layout: Layout, rank: int, stage: Stage) -> int:
    """Elements of `rank`'s shard of a pipeline stage that are of the tied table, whose gradients both ends sum up."""
    return sum(elements for tensor, elements in _held(run, layout, rank, stage) if tensor.tied)


def _held(run: RunSpec, layout: Layout, rank: int, stage: Stage) -> Iterator[tuple[TensorSpec, int]]:
    """The tensors of which something lies in `rank`'s shards of `stage`, and how many elements that is."""
    cut = shards(layout)
    place = layout.place(rank) % cut
    for unit in units(run.model, layout.join, layout, stage).values():
        length = -(-unit.numel // cut)
        for tensor, start, stop in _pieces(unit.tensors, length * place, length * (place + 1)):
            yield tensor, stop - start


def _pieces(tensors: Sequence[TensorSpec], low: int, high: int) -> Iterator[tuple[TensorSpec, int, int]]:
    """Of each tensor the elements [start, stop) that lie in [low, high) of their flat buffer."""
    begin = 0
    for tensor in tensors:
        start, stop = max(low - begin, 0), min(high - begin, tensor.local_numel)
        if start < stop:
            yield tensor, start, stop
        begin += tensor.local_numel


def checkpoint_copy(run: RunSpec, layout: Layout, rank: int) -> int:
    """Bytes that `rank` keeps in the host's memory to write checkpoints from while training goes on, exact.

    Master weights and both moments of its part: data ranks that hold the same shard share the writing, and what several
    tensor ranks hold is written by the first of them, a tied table by a pipeline's first stage. 0 where nothing is
    saved, or training waits for it.
    """
    if not (run.checkpoint.every and run.checkpoint.background):
        return 0
    cut, tp = shards(layout), layout.coordinates(rank)["tp"]
    copies = layout.state_ranks // cut
    which, place = divmod(layout.place(rank), cut)
    elements = 0
    for stage in stages_on(run, layout, rank):
        for unit in units(run.model, layout.join, layout, stage).values():
            length = -(-unit.numel // cut)
            low, high = (length * place + length * part // copies for part in (which, which + 1))
            for tensor, start, stop in _pieces(unit.tensors, low, high):  # without padding
                if stage.first or not tensor.tied:
                    elements += _written(tensor, start, stop, tp)
    return 3 * master_bytes(run) * elements


def _written(tensor: TensorSpec, start: int, stop: int, tp: int) -> int:
    """Elements of a tensor's run that the tensor rank at `tp` writes: none that another does, nor what fills up."""
    if tensor.cut is None:
        return stop - start if tp == 0 else 0
    cut = tensor.cut.at(tp)
    if cut.copy:
        return 0
    return sum(
        whole.numel for box in boxes_of_run(tensor.local_shape, start, stop) for _, whole in in_whole(box, (cut,))
    )


def master_bytes(run: RunSpec) -> int:
    """Bytes of one weight as the optimizer updates it: float32 at least."""
    return max(DTYPE_BYTES[run.precision], 4)


def gradient_bytes(run: RunSpec) -> int:
    """Bytes of one gradient as it accumulates."""
    return master_bytes(run) if run.grad_dtype == "auto" else DTYPE_BYTES[run.grad_dtype]


def reduce_bytes(run: RunSpec) -> int:
    """Bytes of one gradient on its way between ranks."""
    return gradient_bytes(run) if run.reduce_dtype == "auto" else DTYPE_BYTES[run.reduce_dtype]


def buffers(run: RunSpec, layout: Layout | None = None, rank: int = 0) -> int:
    """Bytes of the model's tables that are no parameters, in float32 at least; each stage that `rank` has of a pipeline
    has its own."""
    tables = 1 if layout is None else len(stages_on(run, layout, rank))
    return tables * buffer_count(run.model, run.data.seq_len) * max(DTYPE_BYTES[run.precision], 4)
