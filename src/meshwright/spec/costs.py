"""What the parts of a model cost, in seconds, as a file: measured once (`meshwright costs`), and what the stages of a
pipeline are then balanced by (`layout.pp_split`).

    {"format": "meshwright costs 1", "embedding": 0.0021, "block": 0.0313, "head": 0.0087, "of": "…"}

A cost is that of one micro-batch, forward and backward. `block` is one number for all blocks, or a list of each one's.
`of` says what was measured, for people.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.words import join, show

FORMAT = "meshwright costs 1"
FIELDS = ("format", "embedding", "block", "head", "of")
MOST = 1e9
"""Seconds: more than a step may take, and few enough to add up."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a micro-batch's forward and backward, in one unit for all: seconds in a file, else FLOPs or parameters. block:
    of each block, or of every one."""

    embedding: float
    block: float | tuple[float, ...]
    head: float
    of: str = ""

    def blocks(self, layers: int) -> tuple[float, ...]:
        """Those of each block of a model of `layers`. Raises ValueError where they are of another number."""
        if not isinstance(self.block, tuple):
            return (self.block,) * layers
        if len(self.block) != layers:
            raise ValueError(f"it has the costs of {len(self.block)} blocks, and the model has {layers}")
        return self.block


def write(costs: Costs, path: Path) -> None:
    """Write them, over what is there. Raises UserError where that cannot be done."""
    plain = {"format": FORMAT, "embedding": costs.embedding, "block": costs.block, "head": costs.head, "of": costs.of}
    try:
        path.write_text(json.dumps(plain, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); name a file in a folder that is") from None


def read(path: Path) -> Costs:
    """The costs in a file. Raises UserError with what is wrong."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); `meshwright costs` writes such a file") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not JSON; `meshwright costs` writes such a file") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f'{path}: no file of costs; it has "format": {show(FORMAT)}')
    if odd := [key for key in content if key not in FIELDS]:
        raise UserError(f"{path}: {odd[0]}: no such field; there are {join(FIELDS, 'and')}")
    block = content.get("block")
    found = [_seconds(path, name, content.get(name)) for name in ("embedding", "head")]
    if isinstance(block, list):
        each: float | tuple[float, ...] = tuple(_seconds(path, f"block[{i}]", value) for i, value in enumerate(block))
    else:
        each = _seconds(path, "block", block)
    if not (sum(each) if isinstance(each, tuple) else each) > 0:
        raise UserError(f"{path}: block: {show(block)}; blocks cost something, or there is nothing to balance")
    return Costs(found[0], each, found[1], str(content.get("of", "")))


def _seconds(path: Path, name: str, value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not 0 <= value < MOST
    ):
        raise UserError(f"{path}: {name}: {show(value)} is no number of seconds, 0 or more")
    return float(value)
