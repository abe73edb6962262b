"""One run at a time in a folder: an advisory lock that ends with the process that holds it. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from meshwright.spec.errors import UserError

NAME = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class HeldError(UserError):
    """Another run is in the folder."""

    def __init__(self, folder: Path, holder: str) -> None:
        self.holder = holder
        super().__init__(
            f"out: another run is in {folder}: {holder or 'a process that is just starting'}; "
            "wait for its end, stop it, or name another folder with out=…"
        )


@contextlib.contextmanager
def locked(folder: Path, run: str = "") -> Iterator[None]:
    """Hold `folder`, which is made if need be, as this process's own; raises HeldError if another run holds it.

    `run` names a run of several launchers, of which the first holds the folder for all.
    The kernel gives the lock back with the process, however that ends; the file that a killed one leaves is taken
    over. Where the file system knows no locks there is none. At the end the file is removed, and so are folders that
    were made here and are empty still.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = _hold(folder / NAME, folder, run)
    except OSError as exc:
        raise UserError(f"out: {folder} cannot be written ({exc.strerror}); name a folder that can") from exc
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if held is not None:
                os.unlink(folder / NAME)  # while it is held: see _hold
                os.close(held)
            for path in made:
                path.rmdir()


def _hold(path: Path, folder: Path, run: str) -> int | None:
    """The descriptor that holds the lock; it is closed in processes that this one starts. None: there are no locks, or
    another launcher of the same run holds it."""
    of_run = f" for {run}" if run else ""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 200).decode("utf-8", "replace").strip()
            os.close(file)
            if of_run and holder.endswith(of_run):
                return None
            raise HeldError(folder, holder) from None
        except OSError as exc:
            os.close(file)
            if exc.errno in _UNSUPPORTED:
                os.unlink(path)
                return None
            raise
        # Whoever held it before may have removed the file since it was opened here: then this lock is of no file.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                os.truncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}{of_run}\n".encode())
                return file
        os.close(file)
