"""Where the step went: each rank's time in traced steps by what it was spent on, so that nothing is counted twice.

    ==================  =========================================================================================
    compute             forwards and backwards, without what is below
    recompute           blocks computed again in backward, without their collectives
    bubble              the host waits for the pipeline's messages; or for anything, when it has done its last
                        action and other ranks of its pipeline have not
    exposed REASON      the host issues or waits for any other collective; what travels beside computing does not count
    optimizer           the gradients' norm, clipping and the update, without their collectives
    data                making micro-batches' tokens
    rest                what remains of the step
    ==================  =========================================================================================

Collectives under way are in none of them: only where the host stands still do they cost a step its time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from meshwright.comm.trace import UNDER_WAY, RankTrace, Span
from meshwright.predict.shares import Shares

KINDS = {"step": "rest", "action": "compute", "recompute": "recompute", "data": "data", "optimizer": "optimizer"}
"""What a span's time goes to, without that of spans within it."""
FORETOLD = ("compute", "recompute", "bubble")
LAST = ("optimizer", "data", "rest")
Seconds = dict[str, float]


def seconds(ranks: Sequence[RankTrace]) -> list[Seconds]:
    """For each rank, seconds a step by what they were spent on; they add up to the step's length."""
    done = [[_last_action(one, step) for step in one.steps] for one in ranks]
    drained: defaultdict[tuple[object, ...], float] = defaultdict(float)
    for one, ends in zip(ranks, done, strict=True):
        for number, end in enumerate(ends):
            drained[_pipeline(one), number] = max(drained[_pipeline(one), number], end)
    found = []
    for one, ends in zip(ranks, done, strict=True):
        sums: Seconds = defaultdict(float)
        for number, step in enumerate(one.steps):
            for span, own in _alone(one, step):
                if span.category in KINDS:
                    sums[KINDS[span.category]] += own
                    continue
                waiting = _bubble(span, own, ends[number], drained[_pipeline(one), number])
                sums["bubble"] += waiting
                if own > waiting:
                    sums[f"exposed {span.name}"] += own - waiting
        if "pp" not in one.coords:  # the engine has looked for messages that it has not sent
            sums["rest"] += sums.pop("bubble", 0.0)
        found.append({what: total / len(ends) for what, total in sums.items()})
    return found


def _pipeline(one: RankTrace) -> tuple[object, ...]:
    """What the ranks of its pipeline, and no others, have in common."""
    return tuple((axis, place) for axis, place in one.coords.items() if axis != "pp")


def _bubble(span: Span, own: float, done: float, drained: float) -> float:
    """What counts as bubble of `own` seconds in which a collective blocks the host, whose last action ends at `done`,
    and the last of its pipeline's at `drained`."""
    if span.category != "wait":
        return 0.0
    if span.args.get("op", "send") in ("send", "recv"):
        return own
    return min(own, max(0.0, min(span.end, drained) - max(span.begin, done)))


def bubble(ranks: Sequence[RankTrace], number: int) -> float:
    """Of traced step `number`, from 0, of one pipeline: the part of its ranks' time, from their first action to their
    last, in which they compute neither forward nor backward."""
    actions = [span for one in ranks for span in _actions(one, one.steps[number])]
    length = max(span.end for span in actions) - min(span.begin for span in actions)
    busy = sum(
        own
        for one in ranks
        for action in _actions(one, one.steps[number])
        if action.name in ("forward", "backward")
        for span, own in _alone(one, action)
        if span.category in ("action", "recompute")
    )
    return 1 - busy / (len(ranks) * length)


def _within(one: RankTrace, around: Span) -> Iterator[Span]:
    """What its host does from the beginning to the end of `around`, itself first."""
    for span in one.spans:
        if around.begin <= span.begin and span.end <= around.end and span.category != UNDER_WAY:
            yield span


def _actions(one: RankTrace, step: Span) -> list[Span]:
    return [span for span in _within(one, step) if span.category == "action"]


def _last_action(one: RankTrace, step: Span) -> float:
    return max((span.end for span in _actions(one, step)), default=step.begin)


def _alone(one: RankTrace, around: Span) -> Iterator[tuple[Span, float]]:
    """Each span from `around` on inwards, and its seconds without those of the spans within it."""
    holding: list[tuple[Span, list[float]]] = []  # those that the next one is in, and what was in them so far
    for span in _within(one, around):
        while holding and span.begin >= holding[-1][0].end:
            outer, inside = holding.pop()
            yield outer, outer.seconds - sum(inside)
        if holding:
            holding[-1][1].append(span.seconds)
        holding.append((span, []))
    for outer, inside in reversed(holding):
        yield outer, outer.seconds - sum(inside)


# -- for people -------------------------------------------------------------------------------------------------------


def mean(each: Sequence[Seconds]) -> Seconds:
    """Over ranks, in the order of the table."""
    names = dict.fromkeys(what for one in each for what in one)
    sums = {what: sum(one.get(what, 0.0) for one in each) / len(each) for what in names}
    exposed = sorted((what for what in names if what.startswith("exposed ")), key=lambda what: -sums[what])
    return {what: sums.get(what, 0.0) for what in (*FORETOLD, *exposed, *LAST)}


def slowest(each: Sequence[Seconds]) -> int:
    """The rank that waits least, and so the one that others wait for most."""
    return min(range(len(each)), key=lambda rank: sum(s for what, s in each[rank].items() if _waits(what)))


def _waits(what: str) -> bool:
    return what == "bubble" or what.startswith("exposed ")


def table(each: Sequence[Seconds], foretold: Shares, title: str) -> str:
    """Lines for people. Predicted are shares of compute, recompute and bubble alone; so those measured stand beside
    them as shares of these three, too."""
    measured, rank = mean(each), slowest(each)
    step, three = sum(measured.values()), sum(measured[what] for what in FORETOLD)
    rows = [("", "s a step", "share", "of these 3", "predicted", f"rank {rank}, slowest")]
    for what, took in measured.items():
        beside = ("", "")
        if what in FORETOLD:
            predicted: float = getattr(foretold, what)
            if not took and not predicted:
                continue
            beside = f"{took / three:.1%}" if three else "", f"{predicted:.1%}"
        rows.append((what, f"{took:.4f}", f"{took / step:.1%}", *beside, f"{each[rank].get(what, 0.0):.4f}"))
    rows.append(("step", f"{step:.4f}", "100.0%", "", "", f"{sum(each[rank].values()):.4f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [title]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return "\n".join(lines)
