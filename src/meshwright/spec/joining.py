"""Which neighbouring units are joined where a unit plays no part in memory but costs collectives (ZeRO 0 and 1).

One rule, for the run (`parallel.units`) and for its prediction (`predict.params`). Pure: names and sizes in, names out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby


def joined(
    sizes: Iterable[tuple[str, int]], least: int, alone: Collection[str] = frozenset()
) -> dict[str, tuple[str, ...]]:
    """The members of each unit, by its name, from the name and parameters of each unit in the order of forward.

    Neighbours are joined until together they hold `least` parameters, and what is left over at the end of forward
    joins the last. So a joined unit holds at least `least`, unless all have fewer. Units in `alone` join nobody, and
    those on their two sides do not become neighbours. 0: never. A joined unit is named after its first and last
    member: "embedding..blocks.2".

    Backward goes the other way. It reduces the first unit of forward last, with nothing left to hide behind: that
    one stops growing as soon as it holds enough, and the left-over parameters go to the unit that backward reduces
    first, under all the others.
    """
    groups: list[list[str]] = []
    for by_itself, run in groupby(sizes, key=lambda unit: unit[0] in alone):
        groups += _walk(list(run), 0 if by_itself else least)
    return {members[0] if len(members) == 1 else f"{members[0]}..{members[-1]}": tuple(members) for members in groups}


def _walk(run: Sequence[tuple[str, int]], least: int) -> list[list[str]]:
    groups: list[list[str]] = []
    held = least
    for name, size in run:
        if held >= least:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    if held < least and len(groups) > 1:
        left_over = groups.pop()
        groups[-1] += left_over
    return groups
