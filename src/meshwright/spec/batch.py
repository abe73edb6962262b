"""How the global batch is dealt out: to data ranks, then to micro-batches. Everyone who must know asks here."""

from __future__ import annotations


def part(sequences: int, ranks: int, rank: int) -> range:
    """The places in the global batch that `rank` of `ranks` takes: contiguous, sizes differing by at most one.

    With more ranks than sequences some parts are empty.
    """
    base, extra = divmod(sequences, ranks)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def micro_steps(sequences: int, ranks: int, micro: int) -> int:
    """Micro-batches every rank goes through in one step: those of the largest part."""
    largest = -(-sequences // ranks)
    return -(-largest // micro)


def largest_micro(sequences: int, ranks: int, rank: int, micro: int) -> int:
    """Sequences in the largest micro-batch of `rank`; 0 where it has none."""
    return min(len(part(sequences, ranks, rank)), micro)


def micro_batches(sequences: int, ranks: int, rank: int, micro: int) -> list[range]:
    """For each micro-batch of a step the places that `rank` computes; short or empty at the end of small parts."""
    mine = part(sequences, ranks, rank)
    return [mine[i * micro : (i + 1) * micro] for i in range(micro_steps(sequences, ranks, micro))]
