"""What joins which devices."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from meshwright.spec.cluster import Cluster, Device, Flops, Link
from meshwright.spec.devices import cluster
from meshwright.spec.errors import UserError

DEVICE = Device(name="d", flops=Flops(fp32=1e12), memory=1, bandwidth=1.0)


def joined(*devices: int, **fields: Any) -> Cluster:
    links = tuple(Link(name=f"link{n}", devices=n, bandwidth=1e9) for n in devices)
    return Cluster(device=DEVICE, links=links, **fields)


def test_groups_take_the_innermost_link_that_joins_them():
    asked = cluster("8x8xh100")
    assert [asked.level(ranks, 1) for ranks in (2, 4, 8, 16, 64)] == [0, 0, 0, 1, 1]
    assert [asked.level(2, stride) for stride in (1, 4, 8, 32)] == [0, 0, 1, 1]


def test_groups_that_do_not_fit_side_by_side_reach_over_the_edge():
    # Of groups of six among eight, the second lies on both sides.
    asked = cluster("3x8xh100")
    assert asked.level(6, 1) == 1
    assert asked.level(3, 2) == 1


def test_every_layer_counts():
    asked = joined(2, 8, 32, nodes=4, per_node=8)
    assert [asked.level(2, stride) for stride in (1, 2, 4, 8)] == [0, 1, 1, 2]


def test_a_precision_without_a_figure_is_as_fast_as_float32():
    assert DEVICE.flops["bf16"] == 1e12
    assert DEVICE.flops["float64"] == 5e11
    assert Flops(fp32=1e12, bf16=4e12)["bf16"] == 4e12


def test_equal_clusters_are_one_key():
    assert {cluster("8xh100"): 1}[cluster("8xh100")] == 1
    assert cluster("8xh100") != cluster("8xh200")


@pytest.mark.parametrize(
    ("devices", "fields", "why"),
    [
        ((8, 4), {"per_node": 4}, "link4 with devices=4 cannot follow one with 8"),
        ((8, 12), {"per_node": 4}, "use a multiple of 8"),
        ((1,), {}, "joins nothing"),
        ((8,), {"nodes": 2, "per_node": 8}, "must join all nodes × per_node = 16 devices, and link8 has devices=8"),
        ((), {"nodes": 2}, "there is none; give a link with devices=2"),
        ((2**30,), {"nodes": 1001, "per_node": 1000}, "at most 1000000"),
    ],
)
def test_refuses_links_that_join_nothing(devices: tuple[int, ...], fields: dict[str, int], why: str):
    with pytest.raises(ValidationError, match=why):
        joined(*devices, **fields)


def test_a_part_is_of_one_node_or_of_whole_ones():
    asked = cluster("4x8xh100")
    parts = [asked.part(devices) for devices in (1, 8, 24, 32)]
    assert [(part.nodes, part.per_node) for part in parts] == [(1, 1), (1, 8), (3, 8), (4, 8)]
    for devices, right in ((12, 8), (64, 32)):
        with pytest.raises(UserError, match=f"use {right}"):
            asked.part(devices)
