"""The one place where what happened becomes an exit code and a line on stderr."""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable

import click

from meshwright.spec.errors import RunError, UserError

DONE, FAILED, WRONG_INPUT, ANSWER_NO = 0, 1, 2, 3
INTERRUPTED = 128 + signal.SIGINT
READER_GONE = 128 + signal.SIGPIPE  # what a shell shows for any tool whose reader went away, as in `| head`

EXIT_CODES = """\b
Exit codes:
  0    done
  1    failed while running
  2    wrong input
  3    the answer is no (verify found a difference)
  130  interrupted; 143 terminated: training saves first"""


def guarded(command: Callable[[], int | None], *, debug: bool = False) -> int:
    """Run `command`; return its exit code, or that of the exception it ended with, which is told on stderr.

    Tracebacks are shown only with `debug`. Every exception that is an Exception ends here.
    """
    try:
        code = command() or DONE
        sys.stdout.flush()
        return code
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        _trace(debug)
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
    except RunError as error:
        _trace(debug)
        _tell(f"failed: {error}")
        return FAILED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_gone():
            return READER_GONE
        _trace(debug)
        words = " ".join("".join(traceback.format_exception_only(error)).split())
        _tell(f"internal error: {words}{'' if debug else ' (--debug shows where)'}")
        return FAILED


def guarded_rank(command: Callable[[], int | None], *, debug: bool = False) -> int:
    """The same for a rank, whose error the launcher must hear of too; see `train.report`."""
    from meshwright.train.report import run_guarded

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
    print(f"meshwright: {text}", file=sys.stderr, flush=True)


def _reader_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more; if so, nothing more is written to it."""
    try:
        descriptor = sys.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):
        return False
    if gone:  # the interpreter flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return gone
