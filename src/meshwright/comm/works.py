"""What torch gives back for an operation under way, and several of them as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Work(Protocol):
    """Torch's `dist.Work`, as far as it is used here."""

    def wait(self) -> Any: ...


class Works:
    """Several operations that make up one; waits for all of them."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
