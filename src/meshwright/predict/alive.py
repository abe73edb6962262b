"""Bytes of activations that are alive at each place that backward comes to, from the end of the model to its beginning.

    ==========================  =====================================================================================
    place                       alive
    ==========================  =====================================================================================
    behind the blocks           what each region keeps, and what is saved behind them up to there
    in region r                 what the regions before it keep, and of r what autograd saves up to there: when
                                backward first comes to a region it is computed again, and what it kept is used up
    recompute of r              the same, and the outputs kept of r that have not had their turn
    before the blocks           what the embedding saves
    ==========================  =====================================================================================

Without recompute each block is a region that keeps what autograd saves. With offload what is kept waits on the host,
and the device has at most what is saved of the region that backward is in: without recompute an upper bound, since each
tensor comes back only when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from meshwright.predict.activations import Parts, Storage, kept, outputs, total
from meshwright.spec.layout import Layout


class Alive:
    """Bytes alive on the device, by place. `everything` is what forward leaves there to backward, `logits` what is
    there before the loss is computed from them."""

    def __init__(self, parts: Parts, layout: Layout) -> None:
        self.parts, self.layout = parts, layout
        self._begins: dict[str, int] = {}  # by module, also one around: alive when forward first comes to it
        self.block_begins: list[int] = []  # by block: alive when backward leaves it
        self.block_ends: list[int] = []  # and when backward enters it
        away = layout.offload == "activations"
        every = layout.region(len(parts.blocks))
        base = self._walk(parts.before, 0)
        for region, held in enumerate(kept(parts, layout)):
            until = 0 if away else base
            for block in parts.blocks[region * every : (region + 1) * every]:
                self.block_begins.append(until)
                until = self._walk([row for row in block if row.saved], until)
                self.block_ends.append(until)
            base += total(held)
        self.logits = self._walk(parts.after, 0 if away else base)
        self.everything = self._walk(parts.loss, self.logits)

    def before(self, *modules: str) -> int:
        """Bytes that are alive before forward comes to the first of `modules` that saves anything, or else at the
        end."""
        return next((self._begins[module] for module in modules if module in self._begins), self.everything)

    def recomputing(self, index: int, what: str) -> int:
        """Bytes alive when block `index`, a region of its own, has been computed again up to its storage `what`."""
        rows = self.parts.blocks[index]
        place = [row.what for row in rows].index(what) if rows else 0
        done = [row for row in rows[:place] if row.saved]
        waiting = [row for row in outputs(rows, self.layout) if row not in rows[:place]]
        return self.block_begins[index] + total(done) + total(waiting)

    def _walk(self, rows: Sequence[Storage], until: int) -> int:
        for row in rows:
            for around in accumulate(row.where.split("."), "{}.{}".format):
                self._begins.setdefault(around, until)
            until += row.bytes
        return until
