"""How the command and its ranks end: the exit codes, named once for the command line and for the ranks."""

from __future__ import annotations

import signal

from meshwright.spec.errors import RunError

OK = 0
FAILED = 1
WRONG_INPUT = 2
ANSWER_NO = 3
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
READER_GONE = 128 + signal.SIGPIPE
"""What a shell shows for any tool whose reader went away, as in `| head`."""

ORDERLY = (OK, ANSWER_NO, INTERRUPTED, TERMINATED, READER_GONE)
"""Exit codes with which a rank ends because it has finished, or stopped in order, what it was asked to do."""


class RanksEnded(RunError):
    """Ranks that a command started have ended with `code`, which is not 0, and why has been said on stderr.

    `code` is the exit code that the command should end with.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"the ranks ended with exit code {code}")
        self.code = code
