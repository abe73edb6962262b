"""The global batch is dealt out whole, evenly, and in the same number of micro-batches everywhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.batch import largest_micro, micro_batches, micro_steps, part

sizes = st.integers(1, 60)


@given(sizes, sizes, sizes)
def test_every_sequence_is_computed_once(sequences: int, ranks: int, micro: int) -> None:
    parts = [part(sequences, ranks, rank) for rank in range(ranks)]
    assert [place for mine in parts for place in mine] == list(range(sequences))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for rank, mine in enumerate(parts):
        micros = micro_batches(sequences, ranks, rank, micro)
        assert [place for places in micros for place in places] == list(mine)
        assert max(map(len, micros)) == largest_micro(sequences, ranks, rank, micro) <= micro
        assert len(micros) == micro_steps(sequences, ranks, micro)


def test_large_batches_are_not_counted_out() -> None:
    assert largest_micro(2**31, 3, 2, 1) == 1
    assert largest_micro(2**31, 2**20, 0, 2**31) == 2**11
    assert micro_steps(2**31, 2, 1) == 2**30
