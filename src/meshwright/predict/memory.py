"""The most bytes one rank holds at once, by category.

States (parameters, gradients, master weights, Adam moments, scalars) are exact and always there. What comes and goes
beside them is that of the fullest moment of a step: see predict/peak.py for the moments, and for what is left out.
The host's memory holds the copy that checkpoints are written from; on the CPU that is the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.predict.activations import total
from meshwright.predict.flight import kept_at_once, micros_at_once
from meshwright.predict.micros import Micro
from meshwright.predict.peak import moments_on
from meshwright.predict.states import STATES, buffers, checkpoint_copy, states
from meshwright.spec.batch import largest_micro
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Memory:
    """One rank's bytes by category when it holds most, `sequences` being its largest micro-batch.

    moment: where in the step that is. device: what the rank computes on; "cuda" stands for any accelerator. host: what
    the rank holds in the host's memory beside it: from its first checkpoint on a copy for that, and what is offloaded.
    """

    rank: int
    sequences: int
    categories: dict[str, int]
    moment: str
    device: Device
    host: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of the device's memory, and of the host's where they are one."""
        return sum(self.categories.values()) + (sum(self.host.values()) if self.device == "cpu" else 0)

    @property
    def states(self) -> int:
        """Bytes held from the first step to the last."""
        return sum(self.categories[name] for name in STATES)


def memory(run: RunSpec, layout: Layout, rank: int, device: Device | None = None) -> Memory:
    """The bytes of `rank`, its number in the world, at its peak, with its largest micro-batch, or in a pipeline with
    all that are in flight; a rank may have no sequence at all.

    device: by default that of the run; "auto" is taken for an accelerator, since no torch is asked here.
    """
    device = device or ("cpu" if run.device == "cpu" else "cuda")
    sequences = largest_micro(run.batch.sequences, layout.data_ranks, layout.coordinates(rank)["dp"], run.batch.micro)
    cpu = device == "cpu"
    fullest = max(moments_on(run, layout, rank, cpu=cpu), key=lambda moment: moment.total)
    always = {
        **states(run, layout, rank),
        "buffers": buffers(run, layout, rank),
        "inputs": 8 * sum(inputs(run, layout, micro, cpu) for micro in micros_at_once(run, layout, rank, cpu=cpu)),
    }
    host = {"checkpoint copy": checkpoint_copy(run, layout, rank)}
    if layout.offload == "activations":
        host["offloaded activations"] = total(kept_at_once(run, layout, rank, cpu=cpu))
    return Memory(rank, sequences, always | fullest.lines, fullest.what, device, host)


def inputs(run: RunSpec, layout: Layout, micro: Micro, cpu: bool) -> int:
    """Numbers, int64: tokens and targets; where a context rank's part of them is. With packing the documents, and of a
    context rank's tokens the positions too; there the documents are those of whole sequences, on the host."""
    sequences, length = micro
    packed = run.data.packing == "documents"
    tokens = length // layout.cp
    found = 2 * sequences * tokens
    if layout.cp > 1:
        found += tokens + packed * sequences * (tokens + cpu * length)
    elif packed:
        found += sequences * tokens
    return found
