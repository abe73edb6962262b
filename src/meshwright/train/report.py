"""How a rank leaves: its error written down for the launcher, its exit code the command line's. Imports no torch.

The error file is the one torch's elastic launchers ask for (TORCHELASTIC_ERROR_FILE), in their format, so that
`torchrun` shows it too; the fields under "meshwright" are for our own launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator

from meshwright.comm.place import rank_number
from meshwright.spec.errors import FailsAgainError, RunError, UserError
from meshwright.spec.exits import FAILED, INTERRUPTED, OK, READER_GONE, WRONG_INPUT
from meshwright.train.streams import reader_gone, stdout_fails

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LAUNCHED = "MESHWRIGHT_LAUNCHED"
"""Environment variable: "1" in ranks of our own launcher, which prints their errors; "debug" asks for tracebacks."""

ECHO_LATER = 1
"""Seconds by which the echo of another rank's end is dated later."""

_LOST_PEER_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_LOST_PEER_WORDS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|pair closure|timed? ?out|remote process exited", re.I
)


def record_failure(exc: BaseException, step: int | None = None) -> None:
    """Write `exc` into this rank's error file, whole or not at all; the first call of a process wins.

    Does nothing where no launcher asked for an error file, and never raises: a full disk must not hide the error.
    `step`: the step that failed, if the caller knows better than the black box.
    """
    path = os.environ.get(ERROR_FILE)
    if not path or os.path.exists(path):
        return
    kinds = {UserError: "user", FailsAgainError: "again", RunError: "run"}
    kind = next((kind for known, kind in kinds.items() if isinstance(exc, known)), "bug")
    now = time.time()
    message = error_line(exc)
    trace = "".join(traceback.format_exception(exc))
    # torchrun prints the call stack if there is one: for an error meant for the user, only its words
    # and takes the earliest failure, in whole seconds, for the root cause: an echo is never earlier than its cause
    lost = lost_peer(exc)
    extra = {
        "py_callstack": trace if kind == "bug" else message,
        "timestamp": str(int(now) + (ECHO_LATER if lost else 0)),
    }
    own = {"kind": kind, "message": message, "lost_peer": lost, "step": step, "time": now, "traceback": trace}
    draft = f"{path}.{os.getpid()}"
    try:
        with open(draft, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}, "meshwright": own}, file)
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)


def error_line(exc: BaseException) -> str:
    """One error in words: its message alone if it was written for the user, else with its type in front."""
    if isinstance(exc, UserError | RunError):
        return str(exc)
    return "".join(traceback.format_exception_only(exc)).strip()


def lost_peer(exc: BaseException) -> bool:
    """Whether `exc` looks like the echo of another rank's end (a connection lost, a collective timed out).

    Judged by type and wording of the exceptions behind it, because backends raise plain RuntimeErrors. Only used to
    tell the first failure from those that followed from it.
    """
    return any(
        any(base.__name__ in _LOST_PEER_TYPES for base in type(e).__mro__)
        or isinstance(e, ConnectionError)
        or (isinstance(e, RuntimeError) and _LOST_PEER_WORDS.search(str(e)) is not None)
        for e in _chain(exc)
    )


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while exc is not None and id(exc) not in seen:
        seen.add(id(exc))
        yield exc
        exc = exc.__cause__ or (None if exc.__suppress_context__ else exc.__context__)


def run_guarded(main: Callable[[], int | None], *, debug: bool = False) -> int:
    """Run `main` and return the exit code of the command: what `main` returned, or what its exception means.

    UserError is 2, RunError and anything unexpected 1, KeyboardInterrupt 130, and 141 if nobody reads stdout any more.
    The error is recorded for the launcher; it is printed here only where no launcher of ours does so, and with its
    traceback only if `debug`. A rank never returns: it leaves by `os._exit`. The teardown of a process group whose
    peers are gone may hang or abort, and in a process that is all done, a thread of the backend that still lets go of
    a tensor while the interpreter ends aborts it.
    """
    try:
        code = main() or OK
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else OK if exc.code is None else FAILED
        if isinstance(exc.code, str):
            print(exc.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = INTERRUPTED
        _leave(code)
    except BaseException as exc:
        if isinstance(exc, BrokenPipeError) and reader_gone():
            code = READER_GONE
        else:
            if isinstance(exc, OSError) and (why := stdout_fails()):
                exc = RunError(f"standard output cannot be written: {why}")
            code = WRONG_INPUT if isinstance(exc, UserError) else FAILED
            record_failure(exc)
            if not os.environ.get(LAUNCHED):
                _print_error(exc, debug)
    _leave(code)
    _flush()
    return code


def _print_error(exc: BaseException, debug: bool) -> None:
    rank = rank_number()
    first = _first_to_speak()
    if not (first or debug) and (isinstance(exc, UserError) or lost_peer(exc)):
        return  # every rank finds the same mistake, and feels another's end; one says it
    if debug:
        traceback.print_exception(exc)
    where = f"rank {rank} " if rank is not None and not isinstance(exc, UserError) else ""
    what = "error" if isinstance(exc, UserError) else "failed" if isinstance(exc, RunError) else "internal error"
    print(f"meshwright: {where}{what}: {error_line(exc)}", file=sys.stderr)


def _first_to_speak() -> bool:
    """Whether no other rank of this machine has told its error before; without error files, local rank 0 is first.

    torchrun ends all ranks as soon as one has failed, so it cannot be left to a certain one. The error files of one
    attempt lie in folders side by side.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or rank_number()
        return rank_number() is None or local == "0"
    try:
        claim = os.path.join(os.path.dirname(os.path.dirname(path)), "meshwright-told")
        os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _leave(code: int) -> None:
    if rank_number() is not None:
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
