"""The one place where what happened becomes an exit code and a line on stderr."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable

import click

from meshwright.spec.errors import RunError, UserError
from meshwright.spec.exits import FAILED, INTERRUPTED, OK, READER_GONE, TERMINATED, WRONG_INPUT, RanksEnded
from meshwright.train.report import run_guarded
from meshwright.train.streams import reader_gone, stdout_fails

EXIT_CODES = """\b
Exit codes:
  0    done
  1    failed while running
  2    wrong input
  3    the answer is no (verify found a difference, or damage)
  130  interrupted; 143 terminated: training saves first"""


def guarded(command: Callable[[], int | None], *, debug: bool = False) -> int:
    """Run `command`; return its exit code, or that of the exception it ended with, which is told on stderr.

    Tracebacks are shown only with `debug`. Every exception that is an Exception ends here.
    """
    try:
        code = command() or OK
        sys.stdout.flush()
        return code
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        _trace(debug)
        with contextlib.suppress(OSError):
            error.show(sys.stderr)
            if isinstance(error, click.NoSuchOption):
                _field_hint(error.option_name)
        return WRONG_INPUT
    except (KeyboardInterrupt, click.Abort):
        _trace(debug)
        _tell("interrupted")
        return INTERRUPTED
    except UserError as error:
        _trace(debug)
        _tell(f"error: {error}")
        return WRONG_INPUT
    except RanksEnded as end:
        _trace(debug)
        if end.code != WRONG_INPUT:  # a rank's sentence says it all
            _tell({INTERRUPTED: "interrupted", TERMINATED: "terminated"}.get(end.code, f"failed: {end}"))
        return end.code
    except RunError as error:
        _trace(debug)
        _tell(f"failed: {error}")
        return FAILED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and reader_gone():
            return READER_GONE
        _trace(debug)
        if isinstance(error, OSError) and (why := stdout_fails()):
            _tell(f"failed: standard output cannot be written: {why}")
            return FAILED
        words = " ".join("".join(traceback.format_exception_only(error)).split())
        _tell(f"internal error: {words}{'' if debug else ' (--debug shows where)'}")
        return FAILED


def guarded_rank(command: Callable[[], int | None], *, debug: bool = False) -> int:
    """The same for a rank, whose error the launcher must hear of too; see `train.report`."""

    def told() -> int | None:
        try:
            return command()
        except click.exceptions.Exit as stop:
            return stop.exit_code
        except click.ClickException as error:
            raise UserError(error.format_message()) from None

    return run_guarded(told, debug=debug)


def _trace(debug: bool) -> None:
    if debug:
        traceback.print_exc()


def _field_hint(option: str) -> None:
    """A field given as an option is a likely slip."""
    from meshwright.spec.load import describe

    name = option.lstrip("-").replace("-", "_")
    right = [row.name for row in describe() if name in (row.name, row.name.rpartition(".")[2])]
    if right:
        print(f"Fields are given without dashes: {' or '.join(f'{path}=…' for path in right)}", file=sys.stderr)


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # nowhere to say it; the exit code says it still
        print(f"meshwright: {text}", file=sys.stderr, flush=True)
