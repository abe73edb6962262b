"""The rule by which units are joined."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.joining import joined

UNITS = [("embedding", 4), ("blocks.0", 3), ("blocks.1", 3), ("blocks.2", 3), ("head", 1)]


@pytest.mark.parametrize(
    ("least", "expected"),
    [
        (0, ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]),
        (1, ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]),
        (2, ["embedding", "blocks.0", "blocks.1", "blocks.2..head"]),
        (4, ["embedding", "blocks.0..blocks.1", "blocks.2..head"]),
        (5, ["embedding..blocks.0", "blocks.1..head"]),
        (14, ["embedding..head"]),
        (99, ["embedding..head"]),
    ],
)
def test_neighbours_are_joined_until_they_hold_enough(least: int, expected: list[str]) -> None:
    assert list(joined(UNITS, least)) == expected


def test_members_stay_in_order() -> None:
    assert joined(UNITS, 5) == {
        "embedding..blocks.0": ("embedding", "blocks.0"),
        "blocks.1..head": ("blocks.1", "blocks.2", "head"),
    }


def test_one_that_stays_alone_parts_its_neighbours() -> None:
    units = [("tied", 1), *UNITS]
    assert list(joined(units, 99, alone={"tied"})) == ["tied", "embedding..head"]
    assert list(joined(UNITS, 99, alone={"blocks.1"})) == ["embedding..blocks.0", "blocks.1", "blocks.2..head"]


@given(
    st.lists(st.integers(0, 50), max_size=12),
    st.integers(0, 120),
    st.sets(st.integers(0, 11), max_size=3),
)
def test_what_always_holds(sizes: list[int], least: int, apart: set[int]) -> None:
    units = [(f"u{i}", size) for i, size in enumerate(sizes)]
    alone = {f"u{i}" for i in apart}
    found = joined(units, least, alone)
    assert [name for members in found.values() for name in members] == [name for name, _ in units]
    weigh = dict(units)
    runs: list[list[int]] = [[]]  # what the units between those alone hold
    for members in found.values():
        if members[0] in alone:
            assert len(members) == 1
            runs.append([])
        else:
            assert alone.isdisjoint(members)
            runs[-1].append(sum(weigh[name] for name in members))
    for held in runs:
        assert len(held) == 1 or all(size >= least for size in held)
        # None but the last holds more than it must: without its last member it held too little.
        assert all(size < least + 50 or least == 0 for size in held[:-1])
