"""Examples in the docs, run as they stand there."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def example_of(page: str) -> str:
    """The one program on a page of docs/."""
    (found,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return str(found)


def run_example(text: str, world: int, folder: Path) -> list[str]:
    """What rank 0 prints."""
    script = folder / "own.py"
    script.write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{world}"}
    shared |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=shared | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "LOCAL_WORLD_SIZE": f"{world}"},
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
