"""Clusters by name: `8x8xh100`."""

from __future__ import annotations

import pytest

from meshwright.spec.devices import ALIASES, KINDS, cluster
from meshwright.spec.errors import UserError


def test_names_nodes_devices_and_kind():
    asked = cluster("4x8xh100")
    assert (asked.nodes, asked.per_node, asked.devices, asked.device.name) == (4, 8, 32, "H100 SXM5 80GB")
    inner, outer = asked.links
    assert (inner.devices, inner.bandwidth) == (8, 450e9)
    assert (outer.devices, outer.bandwidth, outer.shared) == (32, 50e9, 1)


@pytest.mark.parametrize(
    ("text", "nodes", "per_node"), [("h100", 1, 1), ("8xh100", 1, 8), ("2 × 8 × H100", 2, 8), ("2X4XA100-PCIe", 2, 4)]
)
def test_what_is_left_out_is_one(text: str, nodes: int, per_node: int):
    asked = cluster(text)
    assert (asked.nodes, asked.per_node) == (nodes, per_node)


def test_one_node_needs_no_network_and_one_device_no_link():
    assert [link.devices for link in cluster("8xh100").links] == [8]
    assert cluster("h100").links == ()


def test_a_rack_of_gb200_is_one_domain_of_nodes():
    assert [link.devices for link in cluster("18x4xgb200").links] == [72]
    assert [link.devices for link in cluster("36x4xgb200").links] == [72, 144]
    assert [link.devices for link in cluster("2x72xgb200").links] == [72, 144]


def test_a_node_with_more_devices_than_nvlink_joins_reaches_over_the_network():
    assert [link.devices for link in cluster("2x16xh100").links] == [8, 32]


def test_devices_that_share_an_adapter_are_no_more_than_a_node_has():
    assert cluster("2x8xv100").links[1].shared == 2
    assert cluster("8x1xv100").links[0].shared == 1


@pytest.mark.parametrize("name", [*KINDS, *ALIASES])
def test_every_kind_makes_a_cluster(name: str):
    asked = cluster(f"3x4x{name}")
    assert asked.devices == 12
    assert asked.links[-1].devices >= 12
    # Faster in fewer bits, and never a narrower link inside.
    assert asked.device.flops["bf16"] >= asked.device.flops["float64"] / 2
    assert asked.links[0].bandwidth >= asked.links[-1].bandwidth


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("8x8xh10", "no device h10; did you mean h100"),
        ("8x8xfoo", "there are v100, a100-40"),
        ("0x8xh100", "0 nodes; use 1 or more"),
        ("8x0xh100", "0 devices in a node"),
        ("8x8", "not nodes × devices × kind"),
        ("-1x8xh100", "not nodes"),
        ("1001x1000xh100", "1001000 devices are more than any machine has"),
    ],
)
def test_refuses_in_words(text: str, why: str):
    with pytest.raises(UserError, match=why):
        cluster(text)
