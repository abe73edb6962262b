"""The ranks that share each sequence, and which keys their queries see, as every method of attention over `cp` asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.parallel.recompute import Recompute
from meshwright.spec.errors import UserError
from meshwright.spec.sequence import Block, Method, Order, arranged, head_ranks, ring_plan, spans
from meshwright.spec.traffic import Phase

T = TypeVar("T")
Places = NDArray[np.int64]
"""Tables on the host, kept from step to step; tensors are what a rank holds on its device."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a kernel: queries and keys by their places in the two parts, and who sees whom."""

    queries: slice
    keys: slice
    causal: bool
    hidden: Callable[[], Tensor] | None = None
    """Where not all is seen, nor all up to the diagonal: True for what is not, [n, m] or [B, 1, n, m]."""

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """What is added to scores: 0 or −∞. Made anew, because masks of all calls together have T × T/cp elements."""
        if self.hidden is None:
            return None
        hidden = self.hidden()
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


class Context:
    """The ranks of `cp`, as layers see them.

    heads: the ranks that deal heads out among themselves (all of cp with ulysses, `inner` neighbours with usp, else
    this one alone). ring: those that each hold a part of the sequence then. micro: the micro-batch that forward is in.
    recompute: what computes blocks again, if anything does.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        method: Method,
        order: Order = "zigzag",
        inner: int = 1,
        recompute: Recompute | None = None,
    ) -> None:
        self.ranks = mesh.sizes["cp"]
        if method == "usp" and self.ranks % inner:
            raise UserError(f"cp: usp: inner={inner} does not divide cp={self.ranks}")
        over = head_ranks(method, self.ranks, inner)
        self.heads, self.ring = mesh.split("cp", over)
        if over == 1:
            self.ring = mesh.group("cp")
        if over == self.ranks:
            self.heads = mesh.group("cp")
        self.method, self.order, self.recompute = method, order, recompute
        self.micro: int | None = None
        self._documents: Tensor | None = None
        self._packed: tuple[int, ...] | None = None
        self._calls: dict[tuple[object, ...], list[list[Call]]] = {}
        self._arranged: dict[int, Places | None] = {}

    @property
    def phase(self) -> Phase:
        return "forward" if self.recompute is None else self.recompute.phase

    @property
    def inner(self) -> int:
        return self.heads.size

    @property
    def documents(self) -> Tensor | None:
        """The document of each position of the whole sequence, i64[T], or [B, T] where sequences differ, ascending;
        queries see keys of their own only. None: all is one."""
        return self._documents

    @documents.setter
    def documents(self, documents: Tensor | None) -> None:
        self._documents = documents
        self._calls.clear()

    @property
    def packed(self) -> tuple[int, ...] | None:
        """Where documents begin, and the end, that are packed into every sequence and cut each by itself; queries see
        keys of their own only, and no masks are needed. None: the sequence is cut as a whole."""
        return self._packed

    @packed.setter
    def packed(self, packed: Sequence[int] | None) -> None:
        self._packed = None if packed is None else tuple(packed)
        self._calls.clear()
        self._arranged.clear()

    def kept(self, function: Callable[[], T]) -> T:
        """`function()`, attention and what it sends, which a recompute that keeps attention keeps as one."""
        return function() if self.recompute is None else self.recompute.call("attention", function)

    def calls(self, q: Tensor, causal: bool, window: int | None) -> list[list[Call]]:
        """The calls for q [B, T/ring, H, d] with the keys of this rank of the ring, of the one before it, and so on."""
        length = q.size(1) * self.ring.size
        key = (length, causal, window, q.device)
        if key not in self._calls:
            if len(self._calls) > 8:  # lengths that vary
                self._calls.clear()
            self._calls[key] = self._find(length, causal, window, q.device)
        return self._calls[key]

    def _find(self, length: int, causal: bool, window: int | None, device: torch.device) -> list[list[Call]]:
        plan = ring_plan(
            length, self.ranks, self.ring.rank, self.order,
            inner=self.inner, causal=causal, window=window, documents=self._packed,
        )  # fmt: skip
        sight = _Sight(causal, window, self._documents, device)
        ours = sight.part(self.positions(length, self.ring.rank))
        found = []
        for distance, blocks in enumerate(plan):
            source = (self.ring.rank - distance) % self.ring.size
            theirs = sight.part(self.positions(length, source))
            found.append([call for block in blocks if (call := sight.call(block, ours, theirs)) is not None])
        return found

    def positions(self, length: int, place: int) -> Places:
        """Those that the ring's rank `place` holds, i64[T/ring], on the host."""
        parts = spans(length, self.ranks, place, self.order, inner=self.inner, documents=self._packed)
        return np.concatenate([np.arange(part.start, part.stop, part.step) for part in parts])

    def arranged(self, length: int) -> Tensor | None:
        """Which of the positions of the ranks that deal heads out, one part after the other, comes where; of `length`
        in all of them. None where they are in place."""
        if length not in self._arranged:
            whole = length * self.ring.size
            places = arranged(whole, self.ranks, self.ring.rank, self.order, self.inner, self._packed)
            self._arranged[length] = None if places is None else np.array(places)
        found = self._arranged[length]
        return None if found is None else torch.from_numpy(found)

    def hidden(self, length: int, source: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
        """What of a whole part of keys this rank's queries do not see: see Call.hidden."""
        documents = self._documents
        if self._packed is not None and documents is None:
            documents = torch.bucketize(torch.arange(length), torch.tensor(self._packed), right=True)
        sight = _Sight(causal, window, documents, device)
        return sight.hidden(*(sight.part(self.positions(length, each)) for each in (self.ring.rank, source)))


@dataclass(frozen=True, slots=True)
class _Part:
    """Positions i64[n], and the documents there, [n] or [B, n]."""

    positions: Places
    documents: Tensor | None

    def cut(self, start: int, stop: int) -> _Part:
        documents = None if self.documents is None else self.documents[..., start:stop]
        return _Part(self.positions[start:stop], documents)


class _Sight:
    """Who sees whom."""

    def __init__(self, causal: bool, window: int | None, documents: Tensor | None, device: torch.device) -> None:
        self.causal, self.window, self.device = causal, window, device
        self.documents = None if documents is None else documents.cpu()

    def part(self, positions: Places) -> _Part:
        return _Part(positions, None if self.documents is None else self.documents[..., torch.from_numpy(positions)])

    def call(self, block: Block, ours: _Part, theirs: _Part) -> Call | None:
        """None where all keys are of other documents."""
        places = slice(*block.queries), slice(*block.keys)
        q, k = ours.cut(*block.queries), theirs.cut(*block.keys)
        masked = block.mode == "masked"
        if q.documents is not None and k.documents is not None:
            (first, last), (low, high) = (_ends(part.documents) for part in (q, k))
            if bool(((first > high) | (last < low)).all()):
                return None
            masked = masked or not bool(((first == last) & (low == high) & (first == low)).all())
        if masked:
            return Call(*places, False, lambda: self.hidden(q, k))
        return Call(*places, block.mode == "causal")

    def hidden(self, q: _Part, k: _Part) -> Tensor:
        ours, theirs = (torch.from_numpy(part.positions).to(self.device) for part in (q, k))
        ours = ours[:, None]
        hidden = torch.zeros(len(ours), len(theirs), dtype=torch.bool, device=self.device)
        if self.causal:
            hidden |= theirs > ours
        if self.window is not None:
            hidden |= ours - theirs >= self.window
        if q.documents is None or k.documents is None:
            return hidden
        other = q.documents.to(self.device)[..., :, None] != k.documents.to(self.device)[..., None, :]
        return hidden | (other if other.dim() == 2 else other.unsqueeze(1))


def _ends(documents: Tensor | None) -> tuple[Tensor, Tensor]:
    assert documents is not None
    return documents.amin(-1), documents.amax(-1)
