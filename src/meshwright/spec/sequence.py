"""A sequence cut over the ranks of `cp`: who holds which positions, and who then computes which part of attention.

Causal attention gives the last positions the most work, so how the sequence is dealt out decides who waits for whom:

    ==============  =============================================  ==================================================
    contiguous      rank r holds the r-th of cp parts              the last rank does 2·cp − 1 times the first's work
    zigzag          rank r holds chunks r and 2·cp − 1 − r of the  all do the same, to the pair (Llama 3, section
                    2·cp                                           3.3.2; Megatron-LM)
    striped         rank r holds r, r + cp, r + 2·cp …             the same, to one part in T (Brandon et al. 2023)
    ==============  =============================================  ==================================================

Positions ascend on every rank, so its own queries and keys are causal in their local order, whatever the order is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

Method = Literal["gather", "rsa", "ring", "ulysses", "usp"]
Order = Literal["contiguous", "zigzag", "striped"]
Mode = Literal["full", "causal", "masked"]


# -- who holds what -------------------------------------------------------------------------------------------------


def granule(ranks: int, order: Order) -> int:
    """What must divide a length for all ranks to hold as many positions: 2·ranks in zigzag, else ranks."""
    return 2 * ranks if order == "zigzag" and ranks > 1 else ranks


def check_length(length: int, ranks: int, order: Order) -> None:
    """Raise ValueError, naming the next good length, for one that cannot be cut in equal parts."""
    each = granule(ranks, order)
    good = max(-(-length // each), 1) * each
    if good != length:
        parts = f"{each} equal chunks" if order == "zigzag" else "equal parts"
        raise ValueError(f"a sequence of {length} cannot be cut into {parts} for cp={ranks} ({order}); use {good}")


Documents = Sequence[int]
"""Where packed documents begin in a sequence, and its end: (0, 4, 8)."""


def check_documents(documents: Documents, length: int, ranks: int, order: Order) -> None:
    """Raise ValueError unless they make up the sequence and each can be cut by itself."""
    if documents[0] != 0 or documents[-1] != length or any(a >= b for a, b in pairwise(documents)):
        raise ValueError(f"documents {list(documents)} must ascend from 0 to the length, {length}")
    for start, stop in pairwise(documents):
        check_length(stop - start, ranks, order)


def spans(
    length: int, ranks: int, place: int, order: Order, *, inner: int = 1, documents: Documents | None = None
) -> list[range]:
    """The positions 0 … length − 1 that rank `place` holds, in the order in which it holds them: ascending.

    inner: neighbours that deal heads out hold each other's positions too; `place` is then the number of their run.
    Stripes of some of the ranks do not fit together, and stand one behind the other. documents: where packed documents
    begin, and the end, (0, 4, 8): each is then cut by itself, so that each one's work is dealt out evenly. Raises
    ValueError for a length that cannot be cut, and a document that cannot.
    """
    if documents is not None:
        check_documents(documents, length, ranks, order)
    return [
        range(part.start + start, part.stop + start, part.step)
        for start, stop in pairwise(documents or (0, length))
        for part in _spans(stop - start, ranks, place, order, inner)
    ]


def _spans(length: int, ranks: int, place: int, order: Order, inner: int) -> list[range]:
    check_length(length, ranks, order)
    if inner == ranks:
        return [range(length)]
    held = range(place * inner, (place + 1) * inner)
    if order == "striped":
        return [range(rank, length, ranks) for rank in held]
    each = length // granule(ranks, order)
    late = [2 * ranks - 1 - rank for rank in reversed(held)] if order == "zigzag" else []
    return [range(chunk * each, (chunk + 1) * each) for chunk in (*held, *late)]


def positions(
    length: int, ranks: int, place: int, order: Order, *, inner: int = 1, documents: Documents | None = None
) -> list[int]:
    """Those of `spans`, one by one."""
    return [at for part in spans(length, ranks, place, order, inner=inner, documents=documents) for at in part]


# -- who computes what ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """One call of the kernel: queries [start, stop) of a rank's part with keys [start, stop) of another's.

    full: every query sees every key. causal: query i of the block sees keys 0 … i of it. masked: where a window
    cuts through; who sees whom is to be read from the positions. Blocks in which nobody sees anything are not made.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    mode: Mode

    @property
    def size(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]

    @property
    def pairs(self) -> int:
        """(query, key) pairs of the rectangle: what torch's FLOP counter counts, causal or not."""
        queries, keys = self.size
        return queries * keys


def blocks(
    queries: Sequence[range], keys: Sequence[range], *, causal: bool = True, window: int | None = None
) -> list[Block]:
    """The calls that attention of one rank's queries to one rank's keys takes, given the positions of both.

    All ranges must have one step, as those of `spans` have. A window is of earlier keys, so it goes with causal.
    Raises ValueError for a window without.
    """
    check_window(causal, window)
    if not causal:
        return [Block((0, _total(queries)), (0, _total(keys)), "full")]
    reach = window if window is not None else 1 + max(q[-1] for q in queries)
    ascending = all(a[-1] < b[0] for a, b in pairwise(queries))
    if ascending and list(queries) == list(keys) and queries[-1][-1] - queries[0][0] < reach:
        return [Block((0, _total(queries)), (0, _total(keys)), "causal")]
    found: list[Block] = []
    at = 0
    for ours in queries:
        row: list[Block] = []
        start = 0
        for theirs in keys:
            for block in _pair(ours, theirs, reach):
                row = _joined(row, _moved(block, at, start), "keys")
            start += len(theirs)
        for block in row:
            found = _joined(found, block, "queries")
        at += len(ours)
    return found


def check_window(causal: bool, window: int | None) -> None:
    """Raise ValueError for a window without a key, and for one of attention that is not causal."""
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} has no key; use 1 or more, or no window")
    if window is not None and not causal:
        raise ValueError(f"a window of {window} is of earlier keys; use causal=True, or no window")


def _pair(queries: range, keys: range, reach: int) -> list[Block]:
    """Blocks within one range of queries and one of keys: query p sees keys p − reach + 1 … p."""
    assert queries.step == keys.step, (queries, keys)
    step, number = keys.step, len(keys)
    # Query i sees keys up to i + ahead, and from i + behind on.
    ahead = (queries.start - keys.start) // step
    behind = -((keys.start - queries.start + reach - 1) // step)
    first, last = max(0, -ahead), min(len(queries) - 1, number - 1 - behind)
    low, high = max(0, first + behind), min(number - 1, last + ahead)
    if behind > ahead or first > last or low > high:
        return []
    if first + ahead >= high and last + behind <= low:
        return [Block((first, last + 1), (low, high + 1), "full")]
    if last + behind > low:
        return [Block((first, last + 1), (low, high + 1), "masked")]
    # Keys that all see, then those of the diagonal.
    diagonal = first + ahead
    full = [Block((first, last + 1), (low, diagonal), "full")] if diagonal > low else []
    return [*full, Block((first, last + 1), (diagonal, high + 1), "causal")]


def _moved(block: Block, queries: int, keys: int) -> Block:
    (a, b), (c, d) = block.queries, block.keys
    return Block((a + queries, b + queries), (c + keys, d + keys), block.mode)


def _joined(before: list[Block], block: Block, along: Literal["queries", "keys"]) -> list[Block]:
    """`before` and `block`, as one with the last where both are full and together a rectangle."""
    last = before[-1] if before else None
    if last is None or last.mode != "full" or block.mode != "full":
        return [*before, block]
    if along == "keys" and last.queries == block.queries and last.keys[1] == block.keys[0]:
        return [*before[:-1], Block(last.queries, (last.keys[0], block.keys[1]), "full")]
    if along == "queries" and last.keys == block.keys and last.queries[1] == block.queries[0]:
        return [*before[:-1], Block((last.queries[0], block.queries[1]), last.keys, "full")]
    return [*before, block]


def _total(parts: Sequence[range]) -> int:
    return sum(map(len, parts))


def arranged(
    length: int, ranks: int, place: int, order: Order, inner: int, documents: Documents | None = None
) -> list[int] | None:
    """Where each position of the run of `inner` ranks number `place` stands in their parts, one after the other; None
    where it is in place already.

    Ascending positions make larger calls.
    """
    run = range(place * inner, (place + 1) * inner)
    before = [at for rank in run for at in positions(length, ranks, rank, order, documents=documents)]
    index = {position: at for at, position in enumerate(before)}
    found = [index[each] for each in positions(length, ranks, place, order, inner=inner, documents=documents)]
    return None if found == list(range(len(found))) else found


def ring_blocks(
    length: int,
    ranks: int,
    place: int,
    source: int,
    order: Order,
    *,
    inner: int = 1,
    causal: bool = True,
    window: int | None = None,
    documents: Documents | None = None,
) -> list[Block]:
    """The calls of a ring's rank `place` for the keys that `source` holds, of a sequence of `length`.

    Of `ranks` ranks, runs of `inner` neighbours hold a part of the ring together, each some heads of it. documents:
    those that are cut each by itself; queries see keys of their own.
    """
    ring = ranks // inner
    return [
        _moved(block, start // ring, start // ring)
        for start, stop in pairwise(documents or (0, length))
        for block in blocks(
            _spans(stop - start, ranks, place, order, inner),
            _spans(stop - start, ranks, source, order, inner),
            causal=causal,
            window=window,
        )
    ]


Plan = tuple[tuple[Block, ...], ...]


@lru_cache(maxsize=256)
def ring_plan(
    length: int,
    ranks: int,
    place: int,
    order: Order,
    *,
    inner: int = 1,
    causal: bool = True,
    window: int | None = None,
    documents: tuple[int, ...] | None = None,
) -> Plan:
    """The calls of a ring's rank `place` for its own keys, those of the rank before it, of the one before that …

    As far back as any rank of the ring sees a key: a window may end the ring early, for all ranks alike.
    """
    ring = ranks // inner

    def calls(distance: int) -> tuple[Block, ...]:
        source = (place - distance) % ring
        return tuple(
            ring_blocks(
                length, ranks, place, source, order, inner=inner, causal=causal, window=window, documents=documents
            )
        )

    furthest = ring - 1
    if window is not None or documents is not None:
        furthest = _furthest(length, ranks, order, inner, causal, window, documents)
    return tuple(calls(distance) for distance in range(furthest + 1))


@lru_cache(maxsize=256)
def _furthest(
    length: int,
    ranks: int,
    order: Order,
    inner: int,
    causal: bool,
    window: int | None,
    documents: tuple[int, ...] | None,
) -> int:
    """The longest way back around the ring at which any rank sees a key."""
    ring = ranks // inner
    return max(
        distance
        for distance in range(ring)
        if any(
            ring_blocks(
                length, ranks, rank, (rank - distance) % ring, order,
                inner=inner, causal=causal, window=window, documents=documents,
            )
            for rank in range(ring)
        )
    )  # fmt: skip


# -- which method can what ------------------------------------------------------------------------------------------


def check_method(
    method: Method, *, ranks: int, heads: int, kv_heads: int, inner: int = 1, causal: bool = True,
    window: int | None = None,
) -> None:  # fmt: skip
    """Raise ValueError, with what would work, where `method` over `ranks` ranks cannot compute such attention.

    heads, kv_heads: those that a rank has before it shares them, behind tensor parallelism. inner: the ranks that usp
    deals heads out over.
    """
    check_window(causal, window)
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} key-value heads do not divide {heads} heads")
    if method == "usp" and (ranks % inner or not 1 < inner < ranks):
        between = [n for n in range(2, ranks) if ranks % n == 0]
        right = f"use one of {', '.join(map(str, between))}" if between else "use ring, or ulysses"
        raise ValueError(f"usp: {inner} ranks with a ring of them do not make cp={ranks}; {right}")
    over = head_ranks(method, ranks, inner)
    if heads % over or (kv_heads % over and over % kv_heads):
        good = [n for n in range(1, heads + 1) if heads % n == 0 and not (kv_heads % n and n % kv_heads)]
        what = f"{heads} heads" if heads % over else f"the {kv_heads} key-value heads of {heads}"
        raise ValueError(
            f"{method}: {over} ranks do not divide {what}; use {' or '.join(map(str, good))} ranks, or cp_method=ring"
        )


def head_ranks(method: Method, ranks: int, inner: int = 1) -> int:
    """Those of `ranks` that deal heads out among themselves, neighbours: all with ulysses, `inner` with usp, else 1."""
    return {"ulysses": ranks, "usp": inner}.get(method, 1)


def shared_heads(kv_heads: int, ranks: int) -> int:
    """Key-value heads of each of the `ranks` that heads are dealt out over; several hold the same where there are
    fewer heads than ranks."""
    return max(kv_heads // ranks, 1)


# -- how much that is -----------------------------------------------------------------------------------------------


def visible_pairs(positions: Sequence[range], length: int, *, causal: bool = True, window: int | None = None) -> int:
    """(query, key) pairs of which the key is seen, for the queries at `positions` of a sequence of `length`.

    Causal: p + 1 keys of query p, `window` at the most; else all. Each pair is worth 2·d multiply-adds a head in
    forward, one product for the scores and one for the output, and 5·d in backward.
    """
    check_window(causal, window)
    if not causal:
        return _total(positions) * length
    reach = length if window is None else window
    found = 0
    for part in positions:
        ramp = len(range(part.start, min(part.stop, reach), part.step))  # those that see all before them
        found += ramp * (part.start + 1) + part.step * ramp * (ramp - 1) // 2 + (len(part) - ramp) * reach
    return found
