"""The rules between rooms, read from the source: which room may import which, and who may communicate."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import meshwright

SOURCE = Path(meshwright.__file__).parent
ROOT = SOURCE.parents[1]
COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send", "recv", "isend", "irecv",
}  # fmt: skip


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_go_one_way():
    """The contracts in pyproject.toml."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports"))], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_plain_model_knows_no_distribution():
    for path in (SOURCE / "model").glob("*.py"):
        assert not [name for name in imports(path) if name.startswith("torch.distributed")], path


def test_only_comm_communicates():
    for path in SOURCE.rglob("*.py"):
        if path.parent.name == "comm":
            continue
        calls = [
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
            and node.attr in COLLECTIVES
            and isinstance(node.value, ast.Name)
            and node.value.id in ("dist", "distributed")
        ]
        assert not calls, (path, calls)
