"""Examples in the docs, run as they stand there."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def example_of(page: str) -> str:
    """The one program on a page of docs/."""
    (found,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return str(found)


def started(world: int) -> dict[str, str]:
    """What a launcher tells all ranks of one machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
        "WORLD_SIZE": f"{world}",
        "LOCAL_WORLD_SIZE": f"{world}",
    }


def run_example(text: str, world: int, folder: Path) -> list[str]:
    """What rank 0 prints, each rank being an interpreter of its own."""
    script = folder / "own.py"
    script.write_text(text)
    shared = os.environ | started(world) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=shared | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        told = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, told
    return told[0][0].splitlines()


def run_example_on(ranks: Any, text: str, world: int, folder: Path) -> list[str]:
    """The same on the session's ranks, which have torch loaded already."""
    script = folder / "own.py"
    script.write_text(text)
    told: list[str] = ranks.run(world, printed, str(script), bare=True, env=started(world))
    return told[0].splitlines()


def printed(rank: int, world: int, script: str) -> str:
    """What this rank prints as the script's program."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(script, run_name="__main__")
    return said.getvalue()
