"""How figures are printed: sizes in words, and tables without lines. Sizes are decimal: 1 MB is 10⁶ bytes."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text


def size(number: float) -> str:
    """Bytes in words: 999 B, 1.23 MB."""
    return _scaled(number, "B")


def flops(number: float) -> str:
    """FLOPs in words: 1.23 TFLOPs."""
    return _scaled(number, "FLOPs")


def _scaled(number: float, unit: str) -> str:
    value = float(number)
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if not prefix else f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} E{unit}"


def titled(title: str, body: Table) -> Group:
    """A table below an empty line and its title."""
    return Group("", Text(title, style="bold"), body)


def table(*columns: str, figures: int = 0) -> Table:
    """An empty table whose last `figures` columns stand on the right."""
    made = Table(header_style="", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        figure = index >= len(columns) - figures
        made.add_column(column, justify="right" if figure else "left", no_wrap=figure, overflow="fold")
    return made
