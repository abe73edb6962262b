"""The order of samples: a permutation, the same for ever, and as good as any other."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from meshwright.train.shuffle import shuffled


def order(length: int, seed: int = 1, epoch: int = 0) -> np.ndarray:
    return shuffled(np.arange(length), length, seed=seed, epoch=epoch)


@pytest.mark.parametrize("length", [1, 2, 3, 11, 63, 64, 65, 256, 257, 4096, 50_001])
def test_every_sample_comes_once(length):
    assert np.array_equal(np.sort(order(length)), np.arange(length))


def test_the_order_of_a_seed_never_changes():
    """Golden values: a run that is resumed with another version goes on with the samples it has not had."""
    assert order(11).tolist() == [10, 3, 1, 9, 8, 4, 6, 2, 0, 5, 7]
    assert order(11, epoch=1).tolist() == [9, 4, 7, 10, 1, 2, 3, 6, 8, 5, 0]
    assert order(11, seed=2**63 - 1).tolist() == [1, 8, 5, 10, 0, 2, 4, 6, 3, 7, 9]
    far = shuffled(np.array([0, 1, 10**12 - 1]), 10**12, seed=1, epoch=7)
    assert far.tolist() == [561952151980, 107457765435, 565997623393]


def test_places_are_independent_of_what_else_is_asked():
    whole = order(1000)
    some = np.array([999, 3, 3, 500])
    assert np.array_equal(shuffled(some, 1000, seed=1, epoch=0), whole[some])
    assert shuffled(some[:0], 1000, seed=1, epoch=0).shape == (0,)


def excess(counts: list[int]) -> float:
    """How many standard deviations the counts' χ² is from what equal chances give."""
    expected, freedom = sum(counts) / len(counts), len(counts) - 1
    return (sum((c - expected) ** 2 for c in counts) / expected - freedom) / (2 * freedom) ** 0.5


def test_orders_of_few_samples_are_equally_likely():
    seen = Counter(tuple(order(4, epoch=epoch).tolist()) for epoch in range(24 * 20))
    assert excess([seen[each] for each in itertools.permutations(range(4))]) < 3


def test_every_sample_is_equally_likely_in_every_place():
    counts = np.zeros((37, 37), dtype=int)
    for epoch in range(37 * 30):
        counts[np.arange(37), order(37, epoch=epoch)] += 1
    assert excess(counts.ravel().tolist()) < 3


def test_neighbours_epochs_and_seeds_have_nothing_in_common():
    n = 20_000
    first = order(n).astype(float)
    for other in (np.arange(n), np.roll(first, 1), order(n, epoch=1), order(n, seed=2)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 4 / n**0.5
