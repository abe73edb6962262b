"""Bytes a rank holds from the first step to the last: the sizes of the tensors that a run declares, exactly."""

from __future__ import annotations

from meshwright.predict.params import buffer_count, unit_counts
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "float64": 8}
STATES = ("parameters", "gradients", "master weights", "adam moments", "scalars")


def states(run: RunSpec, layout: Layout) -> dict[str, int]:
    """Bytes of each of STATES on every rank, exact, for a resolved `layout`.

    ZeRO 1 shards the optimizer's states over the ranks, 2 gradients too, 3 parameters too (Rajbhandari et al. 2020,
    figure 1). Each unit is padded to equal shards. Master weights are there where parameters are narrower than they,
    moments have the master weights' dtype, and one float32 counts the steps. At stage 3 freed parameters share
    one element.
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
    return 1 if layout.zero == 0 else layout.zero_shard or layout.data_ranks


def padded(run: RunSpec, layout: Layout) -> dict[str, int]:
    """Elements of each unit's flat buffer: its parameters, and as many more as make the shards equal."""
    cut = shards(layout)
    return {name: -(-size // cut) * cut for name, size in unit_counts(run.model, layout.join).items()}


def checkpoint_copy(run: RunSpec, layout: Layout, rank: int) -> int:
    """Bytes that data rank `rank` keeps in the host's memory to write checkpoints from while training goes on, exact.

    Master weights and both moments of its part: ranks that hold the same shard share the writing. 0 where nothing is
    saved, or training waits for it.
    """
    if not (run.checkpoint.every and run.checkpoint.background):
        return 0
    cut = shards(layout)
    copies, place, which = layout.data_ranks // cut, rank % cut, rank // cut
    elements = 0
    for size in unit_counts(run.model, layout.join).values():
        length = -(-size // cut)
        low, high = (min(length * place + length * part // copies, size) for part in (which, which + 1))
        elements += high - low  # without padding
    return 3 * master_bytes(run) * elements


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
    return buffer_count(run.model) * max(DTYPE_BYTES[run.precision], 4)
