"""A run's ranks may be started more than once: what each start is told of the ones before it. Imports no torch.

A start that goes on for another of the same launch takes the newest checkpoint, whatever `checkpoint.resume` says:
that was said about what the launch found, not about what it has made since. The file `.launch` in the run's folder
tells the two apart: it names the launch that has begun its steps there.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

LAUNCH = "MESHWRIGHT_LAUNCH"
"""Environment variable: a name that all starts of one launch have, on all nodes, and no other launch."""
RESTARTS = "MESHWRIGHT_RESTARTS"
"""Environment variable: how often the ranks were started before this."""
ENDED_AT = "MESHWRIGHT_ENDED_AT"
"""Environment variable: when the ranks before these ended, in seconds since the epoch."""
FILE = ".launch"


@dataclass(frozen=True)
class Restart:
    """That ranks are not the first of their launch: the how-manieth start after the first, and seconds since the end
    of those before, None where the launcher is not ours and does not say."""

    count: int
    seconds: float | None


def restart() -> Restart | None:
    """What this rank is told of its forerunners; None in the first of a launch."""
    ours, torchs = os.environ.get(RESTARTS), os.environ.get("TORCHELASTIC_RESTART_COUNT")
    count = int(ours or torchs or 0)
    ended = os.environ.get(ENDED_AT)
    return Restart(count, time.time() - float(ended) if ended else None) if count else None


def goes_on(folder: Path) -> bool:
    """Whether ranks of this launch have begun their steps in the run's folder before."""
    try:
        return (folder / FILE).read_text(encoding="utf-8") == _name() and _name() != ""
    except OSError:
        return False


def begin(folder: Path) -> None:
    """Say that they have. Raises OSError."""
    if name := _name():
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{FILE}.{os.getpid()}"
        draft.write_text(name, encoding="utf-8")
        draft.replace(folder / FILE)


def _name() -> str:
    """Torchrun's own names are often the same for every launch: so one counts only if the ranks were started again."""
    if name := os.environ.get(LAUNCH):
        return name
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"torchrun {run}" if run else ""
