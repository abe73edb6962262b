"""The proof that the lists of a schedule fit together, whoever made them.

`check` proves of any schedule that

1. every stage takes every micro-batch forward and backward once, in an order in which that can be done, and reduces
   its gradients once, behind all its backwards; each rank ends with its step (`lists`);
2. what is computed has its input: a receive is posted before it; a send stands behind what makes it (`lists`);
3. every send has its receive and every receive its send, in the same order at both ends of a channel (`channels`);
4. no rank waits for ever, even if every send blocked until its receive is posted (`channels`).

It is proven for one pipeline. Data-parallel copies of it meet in `reduce` and `step`, tensor and context ranks in every
action, and all of them run the same list. Ranks that wait for one another in a circle across copies would, if one does
not say which copy, do so within one; and there they do not. So no collective stops a schedule, as long as each rank
issues its own in the order of its list.

Beside the proof it counts what each rank holds at most (`held`), which is how much memory activations take.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.schedule.actions import Schedule
from meshwright.schedule.channels import check_channels, check_waiting
from meshwright.schedule.errors import ScheduleError
from meshwright.schedule.held import Posted, held, peaks
from meshwright.schedule.lists import check_lists


@dataclass(frozen=True)
class Checked:
    """What the ranks of a proven schedule hold at most.

    held: for each stage, micro-batches whose forward is done and whose backward is not. together: for each rank, such
    counts of its stages (as `Schedule.of_rank` has them) at one moment; all that no other exceeds in every stage, so
    the most memory, Σ count · bytes, is that of one of them. posted: for each rank, receives that are posted and whose
    message is not used yet, each a buffer.
    """

    held: tuple[int, ...]
    together: tuple[tuple[tuple[int, ...], ...], ...]
    posted: tuple[Posted, ...]


def check(schedule: Schedule) -> Checked:
    """Prove that a schedule can be run, and count what it holds; raises ScheduleError, with what would mend it."""
    _check_shape(schedule)
    check_lists(schedule)
    check_channels(schedule)
    check_waiting(schedule)
    ranks = [held(schedule, rank) for rank in range(schedule.pipeline_ranks)]
    return Checked(peaks(schedule, ranks), tuple(each.together for each in ranks), tuple(each.posted for each in ranks))


def _check_shape(schedule: Schedule) -> None:
    ranks = len(schedule.ranks)
    if schedule.micros < 1:
        raise ScheduleError(f"{schedule.micros} micro-batches: use 1 or more")
    if not ranks:
        raise ScheduleError("no rank does anything: give each rank a list of actions")
    for stage, rank in enumerate(schedule.stages):
        if not 0 <= rank < ranks:
            raise ScheduleError(f"stage {stage} is on rank {rank}: there are lists for ranks 0 to {ranks - 1}")
    for rank in range(ranks):
        if not schedule.of_rank(rank):
            raise ScheduleError(f"rank {rank} has no stage: give it one, or leave its list out")
