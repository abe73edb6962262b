"""Which checkpoints a run's folder has, by the names of their folders alone. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.spec.errors import UserError
from meshwright.spec.run import RunSpec

FORMER = "former-"
_NAME = re.compile(r"step-(\d{8,})")


def place(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is put."""
    return folder / f"step-{step:08d}"


def former(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` waits while its successor is put in place."""
    return folder / f"{FORMER}step-{step:08d}"


def path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies, or would lie."""
    here, before = place(folder, step), former(folder, step)
    return before if before.exists() and not here.exists() else here


def steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint, ascending; whether each is whole is `checkpoint.load`'s to find out."""
    if not folder.is_dir():
        return []
    names = (entry.name.removeprefix(FORMER) for entry in folder.iterdir() if entry.is_dir())
    return sorted({int(match[1]) for match in map(_NAME.fullmatch, names) if match})


def check_resume(run: RunSpec) -> None:
    """Raise UserError where `checkpoint.resume` is a step that has no checkpoint."""
    folder, resume = Path(run.out) / "checkpoints", run.checkpoint.resume
    if isinstance(resume, str):
        return
    there = steps(folder)
    if resume not in there:
        listed = f"only of {', '.join(map(str, there))}; name one of these, or auto"
        choice = listed if there else "and none of any other; use auto"
        raise UserError(f"checkpoint.resume={resume}: {folder} has no checkpoint of step {resume}, {choice}")
