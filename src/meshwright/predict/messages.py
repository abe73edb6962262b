"""What the ranks of a pipeline send each other in a step: the messages among the actions of its schedule, and the sums
of a tied table's gradients.

A message is the hidden states of a micro-batch, or their gradient, as a rank has them between two blocks. A micro-batch
that is empty for this data coordinate has none, unless its ranks compute nothing for the others' gathers (ZeRO 3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from meshwright.predict.micros import hidden_bytes, sequences_computed
from meshwright.predict.rows import row
from meshwright.predict.stages import actions_of, stages_on
from meshwright.predict.states import gradient_bytes, tied_elements
from meshwright.schedule.actions import Kind
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec
from meshwright.spec.traffic import Operation, Phase, TrafficRow

MESSAGES: dict[Kind, tuple[Operation, str, Phase]] = {
    "recv_activations": ("recv", "pp.activations", "forward"),
    "send_activations": ("send", "pp.activations", "forward"),
    "recv_gradients": ("recv", "pp.gradients", "backward"),
    "send_gradients": ("send", "pp.gradients", "backward"),
}
"""Operation, reason and phase of a schedule's actions that are messages."""


def pipeline_traffic(run: RunSpec, layout: Layout, rank: int) -> Iterator[TrafficRow | None]:
    """The rows of `rank`; none where pp=1."""
    if layout.pp == 1:
        return
    counts: Counter[tuple[Kind, int]] = Counter()
    for kind, _, micro in actions_of(run, layout, rank):
        if kind in MESSAGES:
            assert micro is not None, kind
            counts[kind, micro] += 1
    sizes = [hidden_bytes(run, layout, micro) for micro in sequences_computed(run, layout, rank)]
    for kind, (operation, reason, phase) in MESSAGES.items():
        for micro, size in enumerate(sizes):
            if size:
                yield row(operation, "pp", layout.pp, reason, phase, [size] * counts[kind, micro], micro)
    for stage in stages_on(run, layout, rank):
        if elements := tied_elements(run, layout, rank, stage):
            yield row("all_reduce", "pp.ends", 2, "pp.tied", "step", [elements * gradient_bytes(run)])
