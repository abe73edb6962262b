"""Checkpoints as folders: which there are, and how one is put in place, pointed to, set aside and removed.

A checkpoint is written to a hidden folder aside and put in place by one rename, so it is whole or absent. A step that
is saved again is moved to "former-step-…" first, and counts there until its successor is in place. A process that
dies anywhere leaves the former checkpoints as they were, and a hidden folder that the next save clears away.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meshwright.spec.errors import UserError
from meshwright.spec.run import RunSpec

FORMER = "former-"
LATEST = "latest"
_ASIDE = re.compile(r"\.saving-(\d+)-.*")  # the process that writes or removes it, and what
_CHECKPOINT = re.compile(r"(?:former-|superseded-)?step-(\d{8,})(?:-\d+)?")
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


def is_checkpoint(folder: Path) -> bool:
    """Whether the name of `folder` says that it is, or was, a checkpoint."""
    return step_of(folder) is not None


def step_of(folder: Path) -> int | None:
    """The step that the name of `folder` says, None where it says none."""
    match = _CHECKPOINT.fullmatch(folder.name)
    return int(match[1]) if match else None


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


def aside(target: Path, what: str = "") -> Path:
    """Where this process prepares what will be `target`."""
    return target.with_name(f".saving-{os.getpid()}-{what}{target.name}")


class InPlaceError(OSError):
    """A checkpoint is in place and whole; what was to be done after its rename failed."""


def put_in_place(prepared: Path, folder: Path, step: int, *unflushed: Path) -> None:
    """Make the folder `prepared` the checkpoint of `step`, and then let "latest" name it, for whoever looks at the
    folder from outside. Its files are flushed, but for `unflushed`; on return all is. Raises OSError, InPlaceError
    where only the latter failed: then nothing may be pruned."""
    target, before = place(folder, step), former(folder, step)
    pointer = aside(folder / LATEST)
    try:
        # Written first: a disk that is full is noticed while nothing has changed.
        pointer.write_text(f"{target.name}\n", encoding="utf-8")
        flush(*unflushed, pointer, prepared)
        again = target.exists()
        if again:
            os.rename(target, before)
        os.rename(prepared, target)
    except OSError:
        _unlink(pointer)
        raise
    what = f"{folder} could not be flushed, so that a loss of power may undo it"
    try:
        flush(folder)
        what = f"{folder / LATEST} does not name it"
        os.rename(pointer, folder / LATEST)
        what = f"{folder} could not be flushed, so that after a loss of power {LATEST} may name the one before"
        flush(folder)  # the one before may be removed next
    except OSError as error:
        _unlink(pointer)
        raise InPlaceError(f"{target} is in place, but {what}: {error.strerror or error}") from error
    if again:
        remove(before)


def _unlink(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


def prune(folder: Path, step: int, keep: int, keep_every: int) -> None:
    """Remove all but `step`, the `keep` − 1 newest others, and every step that `keep_every` divides (0: none).

    Raises InPlaceError, for `step` is, where one cannot be removed.
    """
    here, left = place(folder, step), []
    try:
        others = [s for s in steps(folder) if s != step]
        for old in others[::-1][keep - 1 :]:
            if not (keep_every and old % keep_every == 0):
                where = path(folder, old)
                remove(where)
                left += [where] if where.exists() else []
    except OSError as error:
        raise InPlaceError(f"{here} is in place, but older ones could not be removed: {error.strerror}") from error
    if left:
        raise InPlaceError(f"{here} is in place, but {left[0]} could not be removed")


def set_aside(folder: Path, after: int) -> list[int]:
    """Rename checkpoints of steps beyond `after`, so that a run that goes another way from there does not find them.

    Returns their steps. They keep their content, as "superseded-step-…". Raises UserError where they cannot be renamed.
    """
    beyond = [step for step in steps(folder) if step > after]
    try:
        if beyond:
            clear_leftovers(folder)
        for step in beyond:
            here = place(folder, step)
            away = here.with_name(f"superseded-{here.name}")
            number = 1
            while away.exists():
                number += 1
                away = here.with_name(f"superseded-{here.name}-{number}")
            os.rename(here, away)
    except OSError as error:
        raise UserError(
            f"out: what this run does not go on from cannot be set aside in {folder} ({error.strerror}); let it be "
            "written, or name another folder"
        ) from error
    return beyond


def remove(where: Path) -> None:
    """Take a checkpoint away: renamed first, so that a half-removed one is never mistaken for a damaged one."""
    away = aside(where, "old-")
    with contextlib.suppress(OSError):
        shutil.rmtree(away, ignore_errors=True)
        os.rename(where, away)
        _delete(away)


def _delete(entry: Path) -> None:
    """Of a link, which somebody has put in a checkpoint's place, not what it leads to. Raises OSError."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)


def clear_leftovers(folder: Path) -> None:
    """Finish what processes that died, or saves that failed, have begun; leave alone what belongs to one that lives.

    Raises OSError."""
    for entry in folder.iterdir():
        if (match := _ASIDE.fullmatch(entry.name)) and not lives(int(match[1])):
            with contextlib.suppress(OSError):
                _delete(entry)
    for step in steps(folder):
        here, before = place(folder, step), former(folder, step)
        if before.exists():
            if here.exists():
                # Its successor's rename may have been what could not be flushed.
                flush(folder)
                remove(before)
            else:
                os.rename(before, here)


def lives(process: int) -> bool:
    """Whether another process of this number is there: what this one left over is of a save that failed."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def flush(*paths: Path) -> None:
    """Let the disk have the content of files and the names in folders. Raises OSError."""
    if len(paths) == 1:
        _flush(*paths)
        return
    # At the same time: the file system writes its journal once for all of them.
    with ThreadPoolExecutor(len(paths), "flush") as together:
        for flushed in [together.submit(_flush, path) for path in paths]:
            flushed.result()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
