"""Bytes a rank holds from the first step to the last: the sizes of the tensors that a run declares, exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.predict.params import TensorSpec, buffer_count, unit_counts, units
from meshwright.spec.boxes import boxes_of_run
from meshwright.spec.cuts import in_whole
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "float64": 8}
STATES = ("parameters", "gradients", "master weights", "adam moments", "scalars")


def states(run: RunSpec, layout: Layout) -> dict[str, int]:
    """Bytes of each of STATES on every rank, exact, for a resolved `layout`.

    ZeRO 1 shards the optimizer's states over the data and context ranks, 2 gradients too, 3 parameters too (Rajbhandari
    et al. 2020, figure 1); what is sharded is a tensor rank's part of each tensor, what fills it up included. Each unit
    is padded to equal shards. Master weights are there where parameters are narrower than they, moments have the master
    weights' dtype, and one float32 counts the steps. At stage 3 freed parameters share one element.
    """
    whole = sum(padded(run, layout).values())
    shard = whole // shards(layout)
    parameter, master, gradient = DTYPE_BYTES[run.precision], master_bytes(run), gradient_bytes(run)
    return {
        "parameters": (shard if layout.zero == 3 else whole) * parameter,
        "gradients": (shard if layout.zero >= 2 else whole) * gradient,
        "master weights": 0 if master == parameter else shard * master,
        "adam moments": 2 * shard * master,
        "scalars": 4 + (parameter if layout.zero == 3 else 0),
    }


def shards(layout: Layout) -> int:
    """Ranks that a unit is cut over."""
    return 1 if layout.zero == 0 else layout.zero_shard or layout.state_ranks


def padded(run: RunSpec, layout: Layout) -> dict[str, int]:
    """Elements of each unit's flat buffer: its parameters, and as many more as make the shards equal."""
    cut = shards(layout)
    return {name: -(-size // cut) * cut for name, size in unit_counts(run.model, layout.join, layout).items()}


def partial_sums(run: RunSpec, layout: Layout, rank: int) -> dict[str, int]:
    """Elements of `rank`'s shards whose gradients are still to be summed over tensor ranks, by these: "tp",
    "tp.inner"."""
    cut = shards(layout)
    place = layout.place(rank) % cut
    found: dict[str, int] = {}
    for unit in units(run.model, layout.join, layout).values():
        length = -(-unit.numel // cut)
        for tensor, start, stop in _pieces(unit.tensors, length * place, length * (place + 1)):
            if tensor.summed is not None:
                found[tensor.summed] = found.get(tensor.summed, 0) + stop - start
    return found


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
    tensor ranks hold is written by the first of them. 0 where nothing is saved, or training waits for it.
    """
    if not (run.checkpoint.every and run.checkpoint.background):
        return 0
    cut, tp = shards(layout), layout.coordinates(rank)["tp"]
    copies = layout.state_ranks // cut
    which, place = divmod(layout.place(rank), cut)
    elements = 0
    for unit in units(run.model, layout.join, layout).values():
        length = -(-unit.numel // cut)
        low, high = (length * place + length * part // copies for part in (which, which + 1))
        for tensor, start, stop in _pieces(unit.tensors, low, high):  # without padding
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


def buffers(run: RunSpec) -> int:
    """Bytes of the model's tables that are no parameters, in float32 at least."""
    return buffer_count(run.model, run.data.seq_len) * max(DTYPE_BYTES[run.precision], 4)
