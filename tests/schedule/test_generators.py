"""The named schedules against their papers: bubble and memory in closed form, for every size that is drawn."""

from __future__ import annotations

import sys
from fractions import Fraction
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule import NAMES, Action, Schedule, bubble, check, formula, make
from meshwright.schedule.timeline import simulate
from meshwright.spec.errors import UserError

sys.path.insert(0, str(Path(__file__).parent))
from pipelines import every

SIZES = list(every(range(1, 9), range(1, 33), range(2, 5)))
SMALL = [sizes for sizes in every(range(1, 5), range(1, 7), range(2, 4))]


def prove(name: str, p: int, m: int, v: int, forward: int, backward: int) -> None:
    """All that is claimed of a named schedule."""
    schedule = make(name, p, m, v)
    assert (schedule.pipeline_ranks, schedule.chunks, schedule.micros) == (p, v, m)
    assert schedule.stages == tuple(stage % p for stage in range(p * v))
    held = check(schedule).held
    timeline = simulate(schedule, forward=Fraction(forward), backward=Fraction(backward))
    assert timeline.bubble == bubble(name, p, m, v) == closed_form(name, p, m, v)
    assert set(timeline.busy) == {v * m * (forward + backward)}
    if name != "interleaved":
        peak = {"naive": lambda s: 1, "gpipe": lambda s: m, "1f1b": lambda s: min(m, p - s)}[name]
        assert held == timeline.held == tuple(peak(stage) for stage in range(p))


def closed_form(name: str, p: int, m: int, v: int) -> Fraction:
    if name == "naive":
        return Fraction(p - 1, p)
    if m < p and name == "interleaved":
        return 1 - Fraction(v * m, v * p + m - 1)
    return Fraction(p - 1, v * m + p - 1)


@pytest.mark.parametrize("name", NAMES)
def test_small_ones(name: str):
    for sizes in SMALL:
        if sizes[0] == name:
            prove(*sizes, forward=1, backward=2)


@settings(max_examples=100)
@given(st.sampled_from(SIZES), st.integers(1, 3), st.integers(1, 3))
def test_any_size_and_any_ratio_of_forward_and_backward(sizes, forward, backward):
    prove(*sizes, forward=forward, backward=backward)


def computing(schedule: Schedule, rank: int) -> str:
    """What a rank computes: "F0 F1 B0", chunk after micro-batch where there are several."""
    stages = schedule.of_rank(rank)
    parts = []
    for kind, stage, micro in schedule.ranks[rank]:
        if kind in ("forward", "backward"):
            chunk = "abcd"[stages.index(stage)] if len(stages) > 1 else ""
            parts.append(f"{kind[0].upper()}{micro}{chunk}")
    return " ".join(parts)


def test_orders_of_the_papers_figures():
    assert computing(make("naive", 2, 2), 1) == "F0 B0 F1 B1"
    assert computing(make("gpipe", 4, 4), 2) == "F0 F1 F2 F3 B0 B1 B2 B3"
    # PipeDream-Flush: Narayanan et al. 2021, figure 4, above.
    assert computing(make("1f1b", 4, 8), 0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert computing(make("1f1b", 4, 8), 3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"
    # The same figure, below: 4 devices, 8 micro-batches, 2 chunks.
    assert computing(make("interleaved", 4, 8, 2), 0).startswith(
        "F0a F1a F2a F3a F0b F1b F2b F3b F4a F5a F6a B0b F7a B1b F4b B2b F5b B3b F6b B0a F7b B1a B2a B3a"
    )
    assert computing(make("interleaved", 4, 8, 2), 3).startswith(
        "F0a F1a F2a F3a F0b B0b F1b B1b F2b B2b F3b B3b F4a B0a"
    )


def test_interleaved_groups_are_of_ranks_or_a_few_more_and_nearly_equal():
    for m, groups in ((8, [4, 4]), (9, [5, 4]), (11, [6, 5]), (7, [7]), (3, [3])):
        first = [a.stage for a in make("interleaved", 4, m, 2).ranks[1] if a.kind == "forward"]
        assert [len(list(group)) for stage, group in groupby(first) if stage == 1] == groups


def test_the_first_micro_batches_backward_are_not_waited_for_longer_than_need_be():
    schedule = make("interleaved", 4, 8, 2)
    ahead = [schedule.ranks[rank].index(Action("backward", 4 + rank, 0)) for rank in range(4)]
    counts = [sum(a.kind == "forward" for a in schedule.ranks[rank][:at]) for rank, at in enumerate(ahead)]
    assert counts == [2 * (4 - rank - 1) + 4 + 1 for rank in range(4)]


def test_bubbles_that_papers_print():
    assert bubble("gpipe", 4, 4) == Fraction(3, 7)
    assert bubble("1f1b", 4, 8) == Fraction(3, 11)
    assert bubble("interleaved", 4, 8, 2) == Fraction(3, 19)
    assert float(bubble("1f1b", 64, 512)) == pytest.approx(0.1096, abs=1e-4)


def test_formulas_say_what_bubbles_are():
    for name, p, m, v in SMALL:
        text = formula(name, p, m, v).replace("−", "-").replace("·", "*")
        for number in (*"pmv",):
            text = text.replace(number, f"Fraction({dict(p=p, m=m, v=v)[number]})")
        assert eval(text, {"Fraction": Fraction}) == bubble(name, p, m, v)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gpip", 2, 2), "gpip: no such schedule; did you mean gpipe"),
        (("1F1B", 2, 2), "did you mean 1f1b"),
        (("zzz", 2, 2), "use naive, gpipe, 1f1b or interleaved"),
        (("gpipe", 0, 2), "0 pipeline ranks; use 1 or more"),
        (("gpipe", 2, 0), "0 micro-batches; use 1 or more"),
        (("gpipe", 2, 2, 2), "gpipe: 2 chunks a rank; use 1, or interleaved"),
        (("interleaved", 1, 2, 2), "1 pipeline rank has nothing to interleave; use 2 or more, or 1f1b"),
        (("interleaved", 2, 2), "1 chunk a rank; use 2 or more, or 1f1b"),
        (("gpipe", 1000, 100_000), "too many to list; use 2,000 micro-batches or fewer"),
    ],
)
def test_what_cannot_be_made_is_refused_with_what_can(arguments, said):
    for function in (make, bubble, formula):
        with pytest.raises(UserError, match=said):
            function(*arguments)
