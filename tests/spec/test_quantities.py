"""Quantities as people write them."""

from __future__ import annotations

import pytest

from meshwright.spec.errors import UserError
from meshwright.spec.quantities import BYTES, COUNT, FLOPS, RATE, SECONDS, Unit, whole


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4M", 4 * 10**6),
        ("4Mi", 4 * 2**20),
        ("15T", 15 * 10**12),
        ("1.5B", 1_500_000_000),
        ("1_536", 1536),
        ("3,000", 3000),
        ("2 k", 2000),
        ("1e6", 10**6),
        ("9007199254740993", 9007199254740993),  # one more than a float holds
    ],
)
def test_whole_numbers_are_exact(text: str, number: int):
    assert whole(text) == number
    assert isinstance(whole(text), int)


@pytest.mark.parametrize(
    ("unit", "text", "number"),
    [
        (BYTES, "80GB", 80e9),
        (BYTES, "24.5 GiB", 24.5 * 2**30),
        (BYTES, "512", 512),
        (RATE, "400Gb/s", 50e9),
        (RATE, "900 GB/s", 900e9),
        (RATE, "12.5e9", 12.5e9),
        (FLOPS, "989.4 TFLOP/s", 989.4e12),
        (FLOPS, "19.5T", 19.5e12),
        (SECONDS, "5us", 5e-6),
        (SECONDS, "5 µs", 5e-6),
        (SECONDS, "5 μs", 5e-6),  # the Greek letter, which looks the same
        (SECONDS, "0.25", 0.25),
        (COUNT, "-3", -3),
    ],
)
def test_units(unit: Unit, text: str, number: float):
    assert unit(text) == number


@pytest.mark.parametrize(
    ("unit", "text", "why"),
    [
        (COUNT, "4X", r"'4X' is no number: X is none of k, M, G, T, .* Ki, Mi.*; write 4M \(4·10⁶\) or 4Mi"),
        (COUNT, "4m", "m is none of .*; write 4M"),
        (COUNT, "many", "'many' is no number; write, for example, 4M"),
        (COUNT, "", "'' is no number"),
        (BYTES, "80gb", "write 80GB"),
        (RATE, "9x", r"none of B/s and b/s \(bits\)"),
        (SECONDS, "1 h", "h is none of s, ms, us, ns"),
        (FLOPS, "1Ti", "Ti is none of FLOP/s"),
    ],
)
def test_refuses_in_words(unit: Unit, text: str, why: str):
    with pytest.raises(UserError, match=why):
        unit(text)


@pytest.mark.parametrize("text", ["0", "-4M", "1.5", "0.0001k"])
def test_a_count_is_whole_and_above_zero(text: str):
    with pytest.raises(UserError, match="1 or more without a fraction"):
        whole(text)
