"""Collectives by what crosses which link."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.predict.cost.constants import Constants
from meshwright.predict.cost.links import Links
from meshwright.spec.cluster import Cluster, Link
from meshwright.spec.devices import KINDS
from meshwright.spec.devices import cluster as named
from meshwright.spec.traffic import Operation

PLAIN = Constants(wire=1, network=1, message=1, message_network=1, collective=0, send=0, hop=0)
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift")
MB = 1e6


def dgx(nodes: int = 4, shared: int = 1, latency: float = 0.0) -> Cluster:
    """Nodes of eight at 100 MB/s within and 10 MB/s an adapter between."""
    inner = Link(name="inner", devices=8, bandwidth=100 * MB, latency=latency)
    outer = Link(name="outer", devices=8 * nodes, bandwidth=10 * MB, shared=shared, latency=10 * latency)
    return Cluster(device=KINDS["a100-80"].device, nodes=nodes, per_node=8, links=(inner, outer))


def took(cluster: Cluster, operation: Operation, payload: float, ranks: int, stride: int = 1) -> float:
    return float(Links(cluster, PLAIN).collective(operation, payload, ranks, stride))


@pytest.mark.parametrize(("operation", "passes"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
def test_a_ring_within_a_node(operation: Operation, passes: int) -> None:
    assert took(dgx(), operation, 80 * MB, 4) == pytest.approx(passes * 80 * 3 / 4 / 100)


def test_a_ring_over_nodes_has_all_adapters_of_its_own_ranks() -> None:
    """Eight ranks a node share eight adapters, of 80 MB/s together; one a node has one."""
    assert took(dgx(), "all_reduce", 80 * MB, 32) == pytest.approx(2 * 80 * 31 / 32 / 80)
    assert took(dgx(), "all_reduce", 80 * MB, 4, 8) == pytest.approx(2 * 80 * 3 / 4 / 10)
    assert took(dgx(), "all_reduce", 80 * MB, 8, 4) == pytest.approx(2 * 80 * 7 / 8 / 20)


def test_never_faster_than_within_the_node() -> None:
    fast = dgx().model_copy(update={"links": (dgx().links[0], dgx().links[1].model_copy(update={"bandwidth": 1e12}))})
    assert took(fast, "all_gather", 80 * MB, 32) == pytest.approx(80 * 31 / 32 / 100)


def test_adapters_that_devices_share_are_divided() -> None:
    assert took(dgx(shared=4), "all_reduce", 80 * MB, 4, 8) == 4 * took(dgx(), "all_reduce", 80 * MB, 4, 8)


def test_a_group_over_a_nodes_edge_goes_over_the_network() -> None:
    """Three ranks do not fill eight places, so some group of them has one rank alone in a node."""
    assert took(dgx(), "all_reduce", 30 * MB, 3) == pytest.approx(2 * 30 * 2 / 3 / 10)
    assert took(dgx(), "all_reduce", 30 * MB, 2, 8) > took(dgx(), "all_reduce", 30 * MB, 2, 4)


def test_an_exchange_sends_most_of_itself_out_of_the_node() -> None:
    """Of 32 ranks' parts 24 are for other nodes; of a rank's 32 MB that is 24, over an adapter of its own."""
    assert took(dgx(), "all_to_all", 32 * MB, 32) == pytest.approx(24 / 10)
    assert took(dgx(), "all_to_all", 32 * MB, 8) == pytest.approx(32 * 7 / 8 / 100)


def test_messages_go_over_the_link_that_joins_their_ends() -> None:
    links = Links(dgx(), PLAIN)
    assert float(links.message(50 * MB, 1)) == pytest.approx(0.5)
    assert float(links.message(50 * MB, 8)) == pytest.approx(5.0)
    assert float(links.message(50 * MB, 6)) == pytest.approx(5.0), "some pair is in two nodes"


def test_small_sums_take_a_trees_hops_and_not_a_rings() -> None:
    """512 ranks of 64 nodes: up and down six levels between nodes and three within; a ring has 64 and 448 hops."""
    cluster = dgx(nodes=64, latency=1e-3)
    assert took(cluster, "all_reduce", 1e-6, 512) == pytest.approx(2 * (6 * 10e-3 + 3 * 1e-3))
    assert took(cluster, "all_gather", 1e-6, 512) == pytest.approx(64 * 10e-3 + 448 * 1e-3)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_rank_and_nothing_to_send_cost_nothing(operation: Operation) -> None:
    links = Links(named("4x8xh100"), Constants())
    assert float(links.collective(operation, 1e9, 1)) == 0
    assert float(links.collective(operation, 0, 8)) == 0
    assert float(links.collective(operation, 1, 8)) > 0


@pytest.mark.parametrize("operation", OPERATIONS)
def test_arrays_are_what_numbers_are(operation: Operation) -> None:
    links = Links(named("4x8xh100"), Constants())
    payload, ranks, stride = (
        np.array([1e3, 1e6, 1e9])[:, None, None],
        np.array([1, 2, 8, 32])[:, None],
        np.array([1, 4]),
    )
    together = links.collective(operation, payload, ranks, stride)
    assert together.shape == (3, 4, 2)
    for (i, j, k), found in np.ndenumerate(together):
        alone = links.collective(operation, float(payload[i, 0, 0]), float(ranks[j, 0]), float(stride[k]))
        assert found == pytest.approx(float(alone))


@given(
    operation=st.sampled_from(OPERATIONS),
    payload=st.floats(1, 1e12),
    ranks=st.integers(2, 64),
    stride=st.integers(1, 64),
    link=st.integers(0, 1),
    factor=st.floats(1, 100),
)
def test_faster_links_are_never_slower(
    operation: Operation, payload: float, ranks: int, stride: int, link: int, factor: float
) -> None:
    cluster = named("16x8xa100")
    links = list(cluster.links)
    links[link] = links[link].model_copy(update={"bandwidth": links[link].bandwidth * factor})
    faster = cluster.model_copy(update={"links": tuple(links)})
    before, after = (
        Links(each, Constants()).collective(operation, payload, ranks, stride) for each in (cluster, faster)
    )
    assert 0 < after <= before * (1 + 1e-12)


@given(
    payload=st.floats(1, 1e12), more=st.floats(1, 10), ranks=st.integers(2, 64), operation=st.sampled_from(OPERATIONS)
)
def test_more_bytes_never_take_less(payload: float, more: float, ranks: int, operation: Operation) -> None:
    links = Links(named("16x8xa100"), Constants())
    assert links.collective(operation, payload, ranks) <= links.collective(operation, payload * more, ranks) * (
        1 + 1e-12
    )
