"""Starts the ranks of a run on this machine, through torch's elastic agent, and sees them to their end.

Torch's agent does the rendezvous, the ranks' environment and their processes; how ranks are watched, stopped and
reported is ours (`watch`, `postmortem`). See docs/decisions/launcher.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from meshwright.spec.errors import RunError, UserError
from meshwright.spec.exits import OK, RanksEnded
from meshwright.train import nodes as rendezvous
from meshwright.train.agent import Agent, worker_spec
from meshwright.train.nodes import Nodes
from meshwright.train.postmortem import Evidence
from meshwright.train.watch import StopAskedError, StopRequests, Watch

GRACE = 60.0
"""Seconds without progress after which ranks that were asked to stop are killed."""
_TORCH_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_TORCH_LOGGERS = ("torch.distributed.elastic", "torchelastic-events-null")


def launch(
    argv: Sequence[str],
    *,
    ranks: int,
    folder: Path,
    quiet: bool = False,
    debug: bool = False,
    entry: str = "meshwright",
    grace: float = GRACE,
    check: bool = False,
    max_restarts: int = 0,
    nodes: Nodes | None = None,
) -> int:
    """Run `entry` with `argv` on `ranks` local ranks and return the command's exit code.

    `entry` is a module (`python -m entry …`) or the path of a script (it ends in .py). `folder` is the run's: the
    output of ranks above 0 goes to `folder`/logs, that of rank 0 where the launcher's own goes. `grace`: seconds
    that ranks have, without any progress, to end once asked to stop. `quiet` leaves out remarks, never a failure.
    `max_restarts`: how often the ranks are started again after one has failed, unless it would fail again.
    `nodes`: the ranks are one node's of a run; how agent.py deals with the others is said there.

    Exit codes: 0 and 3 as the ranks had it; 1 a rank failed (the report is on stderr); 2 a rank found wrong input;
    130 and 143 stopped by SIGINT and SIGTERM; 141 nobody reads stdout any more. Blocks the calling thread, which
    should be the main one: signals are only handled there, and the ranks die with it. Raises UserError if the folder
    cannot be written, RunError if no rank can be started or the other nodes are lost, and with `check`, RanksEnded,
    which has the code, for any but 0.
    """
    if ranks < 1:
        raise UserError(f"ranks: {ranks} asked for; at least 1 is needed")

    def say(text: str) -> None:
        if not quiet:
            _print(f"meshwright: {text}")

    command = ["-m", entry] if not entry.endswith(".py") else [entry]
    with StopRequests() as requests, _evidence(folder) as evidence, _torch_quiet(debug):
        handler = _meet(nodes, requests)
        if handler is None:
            code = 128 + (requests.signal or 0)
        else:
            spec = worker_spec([*command, *argv], ranks, handler, max_restarts, nodes.address if nodes else "127.0.0.1")
            agent = Agent(
                spec, evidence, requests,
                lambda processes, traces: Watch(processes, traces, requests, grace=grace, say=say),
                elastic=nodes is not None and nodes.elastic, debug=debug, say=say, tell=_print,
            )  # fmt: skip
            code = _run(agent, requests, nodes, say)
    if check and code != OK:
        raise RanksEnded(code)
    return code


def _meet(nodes: Nodes | None, requests: StopRequests) -> rendezvous.RendezvousHandler | None:
    """The rendezvous, or None where this was asked to stop before there is one."""
    try:
        with requests.raising():
            return rendezvous.meet(nodes)
    except StopAskedError:
        return None


def _run(agent: Agent, requests: StopRequests, nodes: Nodes | None, say: Callable[[str], None]) -> int:
    """See the agent to its end; returns the command's exit code."""
    handler = agent.get_worker_group().spec.rdzv_handler
    try:
        agent.run()
        return agent.exit_code
    except StopAskedError:
        say("stopped while there were no ranks")
        return 128 + (requests.signal or 0)
    except RendezvousGracefulExitError:
        return OK
    except RendezvousClosedError as exc:
        raise RunError("launch: the run has ended on another node, which says why") from exc
    except RendezvousTimeoutError as exc:
        raise RunError(f"launch: waited {rendezvous.JOIN} s for other nodes in vain") from exc
    except RendezvousConnectionError as exc:
        where = nodes.endpoint if nodes else "this launcher"
        raise RunError(
            f"launch: the store at {where} is gone, where the nodes meet; start that node, and then this"
        ) from exc
    except OSError as exc:
        raise RunError(f"launch: the ranks cannot be started ({exc})") from exc
    finally:
        # A node that leaves a run to others must not close the door behind it.
        if nodes is None or not nodes.elastic or requests.signal is None:
            rendezvous.end(handler, lambda: requests.signal is not None)


@contextlib.contextmanager
def _evidence(folder: Path) -> Iterator[Evidence]:
    """A folder for this launch's logs; after the end, what is empty or of no use is removed again."""
    logs = folder / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    made = [path for path in (logs, logs.parent, *logs.parent.parent.parents, folder) if not path.exists()]
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UserError(f"out: {folder} cannot be written ({exc.strerror}); name a folder that can") from exc
    boxes = Path(tempfile.mkdtemp(prefix="meshwright-"))
    try:
        yield Evidence(logs, boxes)
    finally:
        shutil.rmtree(boxes, ignore_errors=True)
        with contextlib.suppress(OSError):
            for path in sorted(logs.rglob("*"), key=lambda p: len(p.parts), reverse=True):
                if path.is_dir():
                    if not any(path.iterdir()):
                        path.rmdir()
                elif path.suffix == ".json" or path.stat().st_size == 0:
                    path.unlink()
            for path in sorted(made, key=lambda p: len(p.parts), reverse=True):
                path.rmdir()


@contextlib.contextmanager
def _torch_quiet(debug: bool) -> Iterator[None]:
    """Keep torch's agent from handling signals and, unless `debug`, from logging."""
    loggers = [logging.getLogger(name) for name in _TORCH_LOGGERS]
    former = os.environ.get(_TORCH_SIGNALS), [logger.propagate for logger in loggers]
    mute = logging.NullHandler()
    os.environ[_TORCH_SIGNALS] = "SIGSTKFLT"  # nothing sends it; torch warns, with a traceback, about an empty list
    for logger in loggers:
        logger.addHandler(mute)
        logger.propagate = debug
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, former[1], strict=True):
            logger.removeHandler(mute)
            logger.propagate = propagate
        os.environ.pop(_TORCH_SIGNALS, None)
        if former[0] is not None:
            os.environ[_TORCH_SIGNALS] = former[0]


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(text, file=sys.stderr, flush=True)
