"""A product's time by its shape."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.predict.cost.constants import Constants
from meshwright.predict.cost.operators import Flash, Move, Product
from meshwright.predict.cost.roofline import kernels, seconds

ONE = Constants(product=1, units=10, tiles=((100, 100, 1.0),), depth=0, quantised=1, kernel=0, stream=1)
SIZES = st.integers(1, 20_000)


def product(constants: Constants, m: int, n: int, k: int, batch: int = 1, bandwidth: float = 1e30) -> float:
    return seconds(Product(batch, m, n, k), constants, 1e9, bandwidth, 2)


def test_whole_waves_reach_the_peak() -> None:
    assert product(ONE, 1000, 100, 50) == pytest.approx(2 * 1000 * 100 * 50 / 1e9)


def test_part_of_a_tile_and_of_a_wave_are_as_dear_as_whole_ones() -> None:
    assert product(ONE, 901, 100, 50) == product(ONE, 1000, 100, 50)
    assert product(ONE, 1001, 100, 50) == 2 * product(ONE, 1000, 100, 50)
    half = Constants(product=1, units=10, tiles=((100, 100, 1.0),), depth=0, quantised=0.5, kernel=0)
    assert product(half, 1001, 100, 50) == pytest.approx(1.55 * product(half, 1000, 100, 50)), "11 tiles: 1.1 + 0.9 / 2"


def test_the_tile_is_the_one_that_suits() -> None:
    both = Constants(product=1, units=10, tiles=((100, 100, 1.0), (10, 100, 0.5)), depth=0, quantised=1, kernel=0)
    assert product(both, 1000, 100, 50) == product(ONE, 1000, 100, 50)
    assert product(both, 10, 100, 50) == pytest.approx(product(ONE, 10, 100, 50) / 10 / 0.5)


def test_a_shallow_product_pays_for_its_ends() -> None:
    deep = Constants(product=1, units=10, tiles=((100, 100, 1.0),), depth=50, quantised=1, kernel=0)
    assert product(deep, 1000, 100, 50) == 2 * product(ONE, 1000, 100, 50)


def test_what_has_few_operations_is_bound_by_its_bytes() -> None:
    assert product(ONE, 1000, 1000, 1, bandwidth=1e6) == pytest.approx((1000 + 1000 + 1000 * 1000) * 2 / 1e6)


def test_batches_of_products_at_their_own_rate() -> None:
    slower = Constants(product=1, units=10, tiles=((100, 100, 1.0),), depth=0, quantised=1, kernel=0, batched=0.5)
    assert product(slower, 100, 100, 50, batch=10) == 2 * product(slower, 1000, 100, 50)


def test_attention_is_timed_by_what_is_seen() -> None:
    constants = Constants(flash=0.5, flash_backward=0.25, kernel=0)
    assert seconds(Flash(200, 100.0, 64), constants, 100, 1, 2) == pytest.approx(2.0)
    assert seconds(Flash(200, 100.0, 64, backward=True), constants, 100, 1, 2) == pytest.approx(4.0)


def test_moves_by_their_kind() -> None:
    constants = Constants(stream=0.5, softmax=0.25, exponential=0, kernel=1)
    assert seconds(Move(100.0), constants, 1, 100, 2) == 1 + 2
    assert seconds(Move(100.0, "softmax"), constants, 1, 100, 2) == 1 + 4
    assert seconds(Move(100.0, "exponential"), constants, 1, 100, 2) == 1 + 2, "as a stream where nobody measured it"
    assert seconds(Move(0.0), constants, 1, 100, 2) == 0
    assert kernels([Move(0.0), Move(1.0), Product(1, 1, 1, 1)]) == 2


@given(m=SIZES, n=SIZES, k=SIZES, batch=st.integers(1, 64), faster=st.floats(1, 10), wider=st.floats(1, 10))
def test_faster_devices_are_never_slower_nor_above_their_peak(
    m: int, n: int, k: int, batch: int, faster: float, wider: float
) -> None:
    work, constants = Product(batch, m, n, k), Constants()
    before = seconds(work, constants, 3e14, 2e12, 2)
    assert seconds(work, constants, 3e14 * faster, 2e12 * wider, 2) <= before * (1 + 1e-12)
    assert work.flops / before <= 3e14
