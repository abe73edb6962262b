"""Torch's elastic agent with our eyes: what ends the ranks, what starts them again, and what they are told.

    a rank dies                     all ranks of all nodes start again, `max_restarts` times
    a node dies, or is stopped      those of the others start again: fewer
    a node comes                    the ranks save, end, and start again: more
    wrong input, loss not finite    the run ends: it would fail again

The first row counts as a restart on the node whose rank it was, the second and third do not: the others only hear the
connection break. An echo counts too if not even one step was begun, so that no error goes round for ever.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext

from meshwright.comm.blackbox import ENVIRONMENT as BLACK_BOXES
from meshwright.spec.exits import INTERRUPTED, TERMINATED
from meshwright.train import attempts, nodes
from meshwright.train.postmortem import Evidence
from meshwright.train.rank import LOGGED
from meshwright.train.report import ERROR_FILE, LAUNCHED
from meshwright.train.signals import LAUNCHER_PID
from meshwright.train.watch import StopRequests, Watch

MONITOR_INTERVAL = 0.1
EXIT_BARRIER = 30
"""Seconds that a node whose ranks are done waits for the other nodes."""

MakeWatch = Callable[[Mapping[int, "subprocess.Popen[bytes]"], Evidence], Watch]


class Agent(LocalElasticAgent):
    """Starts and restarts the ranks of this node; `exit_code` is the command's, once `run` has returned.

    Torch's own sends SIGTERM after the first failure and waits 30 s, cannot tell which failure was first within a
    second, and answers a signal by raising an exception wherever it is.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        evidence: Evidence,
        requests: StopRequests,
        watch: MakeWatch,
        *,
        elastic: bool,
        debug: bool,
        say: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        self._files = _RankFiles(debug, nodes.launch_name(spec.rdzv_handler))
        super().__init__(spec, self._files, exit_barrier_timeout=EXIT_BARRIER)
        self._all_evidence, self._requests, self._make_watch = evidence, requests, watch
        self._elastic, self._debug, self._say, self._tell = elastic, debug, say, tell
        self._starts = 0
        self._watch: Watch | None = None
        self.exit_code: int = 0

    # -- starting -----------------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        nodes.forget_store(self._rdzv_handler)
        with self._requests.raising():
            super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        evidence = self._files.evidence = self._all_evidence.of_start(self._starts)
        self._files.restarts = nodes.round_number(self._rdzv_handler)
        self._starts += 1
        pids: dict[int, int] = super()._start_workers(worker_group)
        assert isinstance(self._pcontext, SubprocessContext)
        started = self._pcontext.subprocess_handlers
        processes = {worker.global_rank: started[worker.local_rank].proc for worker in worker_group.workers}
        self._watch = self._make_watch(processes, evidence)
        return pids

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._watch is not None and not self._watch.over:  # torch's agent has seen a node that waits
            self._say("a node has come: the ranks finish this step, save, and start again with it")
            self._watch.wind_up()
            self._files.ended_at = time.time()
        super()._stop_workers(worker_group)

    # -- watching -----------------------------------------------------------------------------------------------

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        watch = self._watch
        assert watch is not None
        code = watch.look()
        others = worker_group.group_world_size > 1
        if code is None and others and nodes.participants(self._rdzv_handler) < worker_group.group_world_size:
            watch.give_up()
            return self._again("a node has left: the ranks start again without it")
        if code is None:
            return RunResult(WorkerState.HEALTHY)
        self.exit_code = code
        self._files.ended_at = watch.ended_at or time.time()
        if watch.failed is not None:
            return self._failed(watch)
        if code in (TERMINATED, INTERRUPTED) and self._elastic and not watch.asked_here:
            return self._again("another node was stopped: the ranks start again without it")
        return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(watch.processes))

    def _exit_barrier(self) -> None:
        if not (self._elastic and self._requests.signal is not None):  # those that go on would be waited for in vain
            super()._exit_barrier()

    def _failed(self, watch: Watch) -> RunResult:
        assert watch.failed is not None
        first = watch.failed.first
        if self._requests.signal is None and not first.for_good:
            several = self._worker_group.group_world_size > 1
            if several and first.echo and any(box and box.step for box in watch.failed.boxes.values()):
                return self._again("ranks of another node have ended: those of this one start again")
            if self._remaining_restarts > 0:
                self._tell(watch.failed.tell(watch.evidence, debug=self._debug))
                most = self._worker_group.spec.max_restarts
                self._tell(f"meshwright: restart {most - self._remaining_restarts + 1} of {most}")
                return RunResult(WorkerState.FAILED)
        self._tell(watch.failed.tell(watch.evidence, debug=self._debug))
        self._remaining_restarts = 0
        return RunResult(WorkerState.FAILED)

    def _again(self, why: str) -> RunResult:
        """Start again; torch's agent will count it, so that is made up for."""
        self._say(why)
        self._files.ended_at = time.time()
        self._remaining_restarts += 1
        return RunResult(WorkerState.FAILED)


class _RankFiles(LogsSpecs):
    """Where each rank writes, and the environment by which it finds that, and what it is told of its forerunners."""

    def __init__(self, debug: bool, launch: str) -> None:
        super().__init__()
        self._debug, self._launch = debug, launch
        self.evidence: Evidence
        self.restarts = 0
        self.ended_at = 0.0

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        threads = max(1, len(os.sched_getaffinity(0)) // len(envs))
        dest = LogsDest()
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            env[ERROR_FILE] = dest.error_files[local_rank] = str(self.evidence.error_file(rank))
            env[LAUNCHED] = "debug" if self._debug else "1"
            env[LAUNCHER_PID] = str(os.getpid())
            env[BLACK_BOXES] = str(self.evidence.boxes)
            env[attempts.LAUNCH] = self._launch
            env[attempts.RESTARTS] = str(self.restarts)
            env[attempts.ENDED_AT] = repr(self.ended_at) if self.ended_at else ""
            env.setdefault("OMP_NUM_THREADS", str(threads))
            log = self.evidence.log(rank)
            dest.stdouts[local_rank] = dest.stderrs[local_rank] = ""
            if log is not None:
                dest.stdouts[local_rank], dest.stderrs[local_rank] = os.devnull, str(log)
                env[LOGGED] = "1"
        return dest

    @property
    def root_log_dir(self) -> str:
        return str(self.evidence.logs)


def worker_spec(command: list[str], ranks: int, handler: Any, max_restarts: int, address: str | None) -> WorkerSpec:
    """`ranks` ranks of this node that run `command`, a list of words."""
    return WorkerSpec(
        role="rank",
        local_world_size=ranks,
        entrypoint=sys.executable,
        # the agent expands $ in arguments; "$$" is its way to write one
        args=tuple(arg.replace("$", "$$") for arg in ("-m", "meshwright.train.rank", *command)),
        rdzv_handler=handler,
        max_restarts=max_restarts,
        monitor_interval=MONITOR_INTERVAL,
        local_addr=address,
    )
