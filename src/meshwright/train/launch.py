"""Starts the ranks of a run on this machine, through torch's elastic agent, and sees them to their end.

Torch's agent does the rendezvous, the ranks' environment and their processes; how ranks are watched, stopped and
reported is ours (`watch`, `postmortem`). See docs/decisions/launcher.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler, RendezvousParameters

from meshwright.comm.blackbox import ENVIRONMENT as BLACK_BOXES
from meshwright.spec.errors import RunError, UserError
from meshwright.spec.exits import OK, RanksEnded
from meshwright.train.postmortem import Evidence
from meshwright.train.rank import LOGGED
from meshwright.train.report import ERROR_FILE, LAUNCHED
from meshwright.train.signals import LAUNCHER_PID
from meshwright.train.watch import StopRequests, Watch

MONITOR_INTERVAL = 0.1
GRACE = 60.0
"""Seconds without progress after which ranks that were asked to stop are killed."""
_STORE_TRIES = 3
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
) -> int:
    """Run `entry` with `argv` on `ranks` local ranks and return the command's exit code.

    `entry` is a module (`python -m entry …`) or the path of a script (it ends in .py). `folder` is the run's: the
    output of ranks above 0 goes to `folder`/logs, that of rank 0 where the launcher's own goes. `grace`: seconds
    that ranks have, without any progress, to end once asked to stop. `quiet` leaves out remarks, never a failure.

    Exit codes: 0 and 3 as the ranks had it; 1 a rank failed (the report is on stderr); 2 a rank found wrong input;
    130 and 143 stopped by SIGINT and SIGTERM; 141 nobody reads stdout any more. Blocks the calling thread, which
    should be the main one: signals are only handled there, and the ranks die with it. Raises UserError if the folder
    cannot be written, RunError if no rank can be started, and with `check`, RanksEnded, which has the code, for any
    but 0.
    """
    if ranks < 1:
        raise UserError(f"ranks: {ranks} asked for; at least 1 is needed")

    def say(text: str) -> None:
        if not quiet:
            _print(f"meshwright: {text}")

    command = ["-m", entry] if not entry.endswith(".py") else [entry]
    with StopRequests() as requests, _evidence(folder) as evidence, _torch_quiet(debug):
        spec = _worker_spec([*command, *argv], ranks)
        agent = _Agent(
            spec, _RankFiles(evidence, debug), lambda ps: Watch(ps, evidence, requests, grace=grace, say=say)
        )
        try:
            agent.run()
        except OSError as exc:
            raise RunError(f"launch: the {ranks} ranks cannot be started ({exc})") from exc
        finally:
            spec.rdzv_handler.shutdown()
        if agent.watch.failed is not None:
            _print(agent.watch.failed.tell(evidence, debug=debug))
        if check and agent.exit_code != OK:
            raise RanksEnded(agent.exit_code)
        return agent.exit_code


class _Agent(LocalElasticAgent):
    """Torch's agent for one host, with our watch in place of its own.

    Its own sends SIGTERM after the first failure and waits 30 s, cannot tell which failure was first within a second,
    and answers a signal by raising an exception wherever it is.
    """

    def __init__(
        self, spec: WorkerSpec, files: LogsSpecs, watch: Callable[[dict[int, subprocess.Popen[bytes]]], Watch]
    ) -> None:
        super().__init__(spec, files)
        self._make_watch = watch
        self.watch: Watch
        self.exit_code: int

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        pids: dict[int, int] = super()._start_workers(worker_group)
        assert isinstance(self._pcontext, SubprocessContext)
        self.watch = self._make_watch({r: h.proc for r, h in self._pcontext.subprocess_handlers.items()})
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        code = self.watch.look()
        if code is None:
            return RunResult(WorkerState.HEALTHY)
        self.exit_code = code
        return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(self.watch.processes))


class _RankFiles(LogsSpecs):
    """Where each rank writes, and the environment by which it finds that."""

    def __init__(self, evidence: Evidence, debug: bool) -> None:
        super().__init__(str(evidence.logs))
        self._evidence, self._debug = evidence, debug

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        threads = max(1, len(os.sched_getaffinity(0)) // len(envs))
        dest = LogsDest()
        for rank, env in envs.items():
            env[ERROR_FILE] = dest.error_files[rank] = str(self._evidence.error_file(rank))
            env[LAUNCHED] = "debug" if self._debug else "1"
            env[LAUNCHER_PID] = str(os.getpid())
            env[BLACK_BOXES] = str(self._evidence.boxes)
            env.setdefault("OMP_NUM_THREADS", str(threads))
            log = self._evidence.log(rank)
            dest.stdouts[rank] = dest.stderrs[rank] = ""
            if log is not None:
                dest.stdouts[rank], dest.stderrs[rank] = os.devnull, str(log)
                env[LOGGED] = "1"
        return dest

    @property
    def root_log_dir(self) -> str:
        return str(self._evidence.logs)


def _worker_spec(command: Sequence[str], ranks: int) -> WorkerSpec:
    """One node, a rendezvous on a port that the system picks, no restarts."""
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="127.0.0.1:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",
        is_host=True,
        timeout=60,
    )
    return WorkerSpec(
        role="rank",
        local_world_size=ranks,
        entrypoint=sys.executable,
        # the agent expands $ in arguments; "$$" is its way to write one
        args=tuple(arg.replace("$", "$$") for arg in ("-m", "meshwright.train.rank", *command)),
        rdzv_handler=_rendezvous(parameters),
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL,
        local_addr="127.0.0.1",
    )


def _rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    for attempt in range(_STORE_TRIES):
        try:
            return rendezvous_registry.get_rendezvous_handler(parameters)
        except (RendezvousConnectionError, OSError, RuntimeError) as exc:
            if attempt == _STORE_TRIES - 1:
                raise RunError(f"launch: no local port for the ranks to meet at ({exc})") from exc
            time.sleep(0.2)
    raise AssertionError


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
            for path in logs.iterdir():
                if path.suffix == ".json" or path.stat().st_size == 0:
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
