"""What a trainer does otherwise, in comments that its format allows."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.spec.batch import micro_steps
from meshwright.spec.run import RunSpec


def commented(notes: Iterable[str], mark: str = "#") -> str:
    """One line a note; nothing where there are none."""
    return "".join(f"{mark} {note}\n" for note in notes)


def micro_batches(run: RunSpec) -> int:
    """Of a step on each data rank."""
    return micro_steps(run.batch.sequences, run.layout.data_ranks, run.batch.micro)


def uneven(run: RunSpec) -> list[str]:
    """Other trainers want as many sequences on each data rank, in whole micro-batches."""
    parts = run.layout.data_ranks * run.batch.micro
    if run.batch.sequences % parts == 0:
        return []
    return [f"{run.batch.sequences} sequences are no multiple of dp × micro-batch = {parts}: use one, or it is refused"]
