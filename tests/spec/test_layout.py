"""Layouts settle their number of data ranks, or say what would."""

from __future__ import annotations

import pytest

from meshwright.spec.errors import UserError
from meshwright.spec.layout import Axis, Layout


def test_auto_takes_what_the_ranks_leave() -> None:
    assert Layout().resolve(None).dp == 2
    assert Layout().resolve(6).dp == 6
    assert Layout(dp=3).resolve(None).world == 3
    assert Layout(dp=3).resolve(3) == Layout(dp=3)


def test_other_axes_divide_the_ranks() -> None:
    # Not validated: the arithmetic holds for axes that no strategy uses yet.
    layout = Layout.model_construct(**(Layout().model_dump() | {"tp": 2, "pp": 3}))
    assert layout.resolve(12).data_ranks == 2
    with pytest.raises(UserError, match=r"tp=2 × cp=1 × pp=3 = 6 does not divide 8 ranks"):
        layout.resolve(8)
    assert layout.resolve(12).world == 12


def test_units_are_joined_where_they_play_no_part_in_memory() -> None:
    assert [Layout(zero=stage).join for stage in range(4)] == [1_000_000, 1_000_000, 0, 0]
    assert [Layout(zero=stage, zero_join=0).join for stage in range(4)] == [0] * 4
    assert Layout(zero=1, zero_join=7).join == 7


def test_ranks_that_do_not_fit() -> None:
    with pytest.raises(
        UserError, match=r"layout: 99999999999 ranks are more than any machine has; use at most 1000000"
    ):
        Layout().resolve(99999999999)
    with pytest.raises(UserError, match=r"dp=4 .* = 4 is not the number of ranks, 3; use dp=3 or dp=auto, or 4 ranks"):
        Layout(dp=4).resolve(3)


def test_the_first_axis_of_the_order_varies_fastest() -> None:
    layout = Layout(dp=3, tp=2)
    assert [layout.coordinates(rank)["tp"] for rank in range(6)] == [0, 1] * 3
    assert [layout.coordinates(rank)["dp"] for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    other = Layout(dp=3, tp=2, order=("dp", "cp", "tp", "pp"))
    assert [other.coordinates(rank)["dp"] for rank in range(6)] == [0, 1, 2] * 2
    for each in (layout, other):
        assert [each.rank_at(each.coordinates(rank)) for rank in range(6)] == list(range(6))
    assert (layout.rank_at({"dp": 2}), other.rank_at({"tp": 1})) == (4, 3)


@pytest.mark.parametrize("order", [("tp", "cp", "dp", "pp"), ("dp", "cp", "tp", "pp"), ("cp", "tp", "dp", "pp")])
def test_states_have_a_place_among_data_and_context_ranks(order: tuple[Axis, ...]) -> None:
    """By ascending number, as a group of ranks has them, whatever the order of the axes."""
    layout = Layout(dp=3, cp=2, tp=2, order=order)
    assert (layout.state_ranks, layout.world) == (6, 12)
    for tp in range(2):
        together = [rank for rank in range(12) if layout.coordinates(rank)["tp"] == tp]
        assert [layout.place(rank) for rank in together] == list(range(6))


def test_zero_shards_over_context_ranks_too() -> None:
    assert Layout(dp=1, cp=4, zero=1, zero_shard=2).resolve(4).state_ranks == 4
    with pytest.raises(UserError, match=r"zero_shard=3 does not divide dp=2 × cp=2 = 4; use one of 1, 2, 4"):
        Layout(dp=2, cp=2, zero=1, zero_shard=3).resolve(None)
