"""Bytes one rank holds, by category.

States (parameters, gradients, master weights, Adam moments, scalars) are exact: the sizes of the tensors a run
holds. With saved activations, and what the loss needs beside them, they make the peak, which is when backward
begins: all activations are there, and the loss has its copies of the logits. Left out are short-lived temporaries of
single operations (one gradient before it is copied into its buffer), the allocator's rounding, the libraries, and the
buffers of the communication library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.predict import activations
from meshwright.predict.params import buffer_count, unit_counts
from meshwright.spec.batch import micro_batches
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import LOSS_ROWS, RunSpec

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "float64": 8}
STATES = ("parameters", "gradients", "master weights", "adam moments", "scalars")


@dataclass(frozen=True)
class Memory:
    """One rank's bytes by category, `sequences` being its largest micro-batch."""

    rank: int
    sequences: int
    categories: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.categories.values())

    @property
    def states(self) -> int:
        """Bytes held from the first step to the last."""
        return sum(self.categories[name] for name in STATES)


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
    return {name: -(-size // cut) * cut for name, size in unit_counts(run.model).items()}


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


def saved(run: RunSpec, sequences: int) -> list[activations.Saved]:
    """What autograd keeps of a micro-batch of `sequences` sequences of this run."""
    return activations.saved(
        run.model,
        batch=sequences,
        seq=run.data.seq_len,
        dtype_bytes=DTYPE_BYTES[run.precision],
        attention=run.attention,
        loss=run.loss,
    )


def loss_workspace(
    spec: ModelSpec, *, tokens: int, dtype_bytes: int, loss: Literal["full", "chunked"]
) -> dict[str, int]:
    """What the loss of `tokens` tokens holds at its peak beside saved activations.

    Full: forward has the logits beside their saved log-softmax; backward instead has two gradients, that of the
    log-softmax and that of the logits, so "logits" counts the place of logits or their gradient and "loss
    workspace" the other one. Chunked: logits and log-softmax of one chunk; later the scaled gradients of hidden states
    and head, which may be more.
    """
    wide = max(dtype_bytes, 4)
    rows = tokens if loss == "full" else min(tokens, LOSS_ROWS)
    copy = rows * spec.vocab
    workspace = copy * wide
    if loss == "chunked" and tokens:
        scaled = (spec.vocab + tokens) * spec.hidden * dtype_bytes
        workspace = max(workspace, scaled - copy * dtype_bytes)
    return {"logits": copy * dtype_bytes, "loss workspace": workspace}


def memory(run: RunSpec, layout: Layout, rank: int) -> Memory:
    """The bytes of data rank `rank` at its peak, with its largest micro-batch; a rank may have no sequence at all."""
    micros = micro_batches(run.batch.sequences, layout.data_ranks, rank, run.batch.micro)
    sequences = max(len(places) for places in micros)
    tokens = sequences * run.data.seq_len
    workspace = loss_workspace(run.model, tokens=tokens, dtype_bytes=DTYPE_BYTES[run.precision], loss=run.loss)
    return Memory(
        rank,
        sequences,
        {
            **states(run, layout),
            "buffers": buffers(run),
            "inputs": 2 * 8 * tokens,  # tokens and targets, int64
            "activations": activations.total(saved(run, sequences)),
            **workspace,
        },
    )
