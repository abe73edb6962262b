"""The tensors that a micro-batch keeps for backward, as a table: each layer's, and those outside of layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table

from meshwright.cli.tables import size, table
from meshwright.predict.activations import Saved, total

LAYER = re.compile(r"^((?:transformer\.h|model\.layers)\.)(\d+)(?=\.|$)")


def kept(rows: Sequence[Saved]) -> Table:
    """Layers that keep the same stand once, under "layers 1 to 11, each"."""
    lines = table("module", "tensor", "bytes", "", figures=2)
    for heading, members in _grouped(rows):
        for row in members:
            lines.add_row(row.where or "the model", row.what, f"{row.bytes:,}", size(row.bytes))
        if heading:
            lines.add_row(heading, "", f"{total(members):,}", size(total(members)), style="bold")
    lines.add_row("all", "", f"{total(rows):,}", size(total(rows)), style="bold")
    return lines


def _grouped(rows: Sequence[Saved]) -> Iterator[tuple[str, list[Saved]]]:
    """Rows outside of layers under "", and each run of layers that are alike by its first one's names."""
    alike: list[tuple[int, list[Saved]]] = []  # layers' indices and rows, alike but for the index
    for index, group in groupby(rows, key=_layer):
        members = list(group)
        if alike and (index is None or _bare(members) != _bare(alike[0][1])):
            yield _heading([i for i, _ in alike]), alike[0][1]
            alike = []
        if index is None:
            yield "", members
        else:
            alike.append((index, members))
    if alike:
        yield _heading([i for i, _ in alike]), alike[0][1]


def _layer(row: Saved) -> int | None:
    found = LAYER.match(row.where)
    return int(found[2]) if found else None


def _bare(rows: Sequence[Saved]) -> list[Saved]:
    return [Saved(LAYER.sub(r"\1", row.where), row.what, row.bytes) for row in rows]


def _heading(indices: Sequence[int]) -> str:
    if len(indices) == 1:
        return f"layer {indices[0]}"
    if indices[-1] - indices[0] == len(indices) - 1:
        return f"layers {indices[0]} to {indices[-1]}, each"
    return f"layers {', '.join(map(str, indices))}, each"  # the last of each region that is computed again
