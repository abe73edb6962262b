"""The first lines of a rank that our launcher starts: `python -m meshwright.train.rank (-m MODULE | SCRIPT) ARGS…`.

They run before torch is imported, so that a rank is tied to its launcher from its first milliseconds on and an error
during the imports is reported like any other.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys

from meshwright.train.report import run_guarded
from meshwright.train.signals import die_with_parent

LOGGED = "MESHWRIGHT_LOGGED"
"""Environment variable, set in the ranks whose output the launcher sends to a file (their stderr is that file)."""


def main() -> None:
    die_with_parent()
    # Until the loop's StopFlag takes over, a stop signal ends the rank at once, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.environ.get(LOGGED):
        os.dup2(2, 1)  # one file, in the order in which things were said, complete even after a SIGKILL
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    raise SystemExit(run_guarded(_run_entry))


def _run_entry() -> None:
    if sys.argv[1] == "-m":
        module, sys.argv = sys.argv[2], [sys.argv[2], *sys.argv[3:]]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        script, sys.argv = sys.argv[1], sys.argv[1:]
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
