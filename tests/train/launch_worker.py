"""What the ranks in test_launch.py do: `launch_worker.py CASE FOLDER`. No torch, except in the last case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from meshwright.comm.blackbox import BlackBox
from meshwright.spec.errors import RunError, UserError
from meshwright.train.signals import LAUNCHER_PID, StopFlag

case, folder = sys.argv[1], Path(sys.argv[2])
rank = int(os.environ["RANK"])
launcher = int(os.environ[LAUNCHER_PID])
(folder / f"rank{rank}.pid").write_text(str(os.getpid()))


def all_ranks_ready(name: str = "ready", ranks: int = 2) -> None:
    (folder / f"{name}{rank}").touch()
    while not all((folder / f"{name}{r}").exists() for r in range(ranks)):
        time.sleep(0.01)


def stepping(step: int = 7) -> BlackBox:
    """At this step: rank 0 waits for the others, rank 1 has just come back from a collective."""
    box = BlackBox.from_environment(rank)
    box.step = step
    box.enter("all_reduce", "dp", "zero.reduce")
    if rank:
        box.leave()
    all_ranks_ready()
    return box


def with_child() -> None:
    """A process of the rank's own, which nobody but the launcher will end."""
    child = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (folder / f"child{rank}.pid").write_text(str(child.pid))


def hello() -> None:
    print(f"out of rank {rank} {sys.argv[3:]} OMP={os.environ['OMP_NUM_THREADS']}")
    print(f"err of rank {rank}", file=sys.stderr)


def raises() -> None:
    with_child()
    stepping()
    if rank == 1:
        print("last words", file=sys.stderr)
        raise ValueError("the {loss} is odd")
    time.sleep(300)


def killed() -> None:
    with_child()
    stepping()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)


def killed_in_import() -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)


def connection_breaks() -> None:
    try:
        raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
    except RuntimeError as exc:
        raise RunError("all_reduce zero.reduce failed") from exc


def killed_and_echo() -> None:
    """Rank 0 reports the lost connection before the death of rank 1 can be seen."""
    stepping()
    if rank == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    connection_breaks()


def raises_and_echo() -> None:
    stepping()
    if rank == 0:
        raise RuntimeError("Connection reset by peer")
    time.sleep(0.05)
    raise ValueError("the cause")


def stubborn() -> None:
    """Rank 0 hangs and does not end on SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stepping()
    if rank == 1:
        sys.exit(5)
    time.sleep(300)


def wrong_input() -> None:
    all_ranks_ready()
    raise UserError("layout.dp: 3 does not divide 4; use 1, 2 or 4")


def answer_no() -> None:
    sys.exit(3)


def reader_goes() -> None:
    """Rank 0 finds out at the end that nobody reads; rank 1 has still something to do."""
    if rank == 1:
        time.sleep(0.5)
        (folder / "saved1").touch()
        return
    while not (folder / "gone").exists():
        time.sleep(0.01)
    print("farewell", flush=True)


def breaks_another_pipe() -> None:
    raise BrokenPipeError(32, "Broken pipe")


def stop_in_order(number: int, times: int = 1, seconds: float = 0.3, progress: str = "") -> None:
    """The launcher is told to stop; the ranks take some time to finish their step, save, and end."""
    box = BlackBox.from_environment(rank)
    with StopFlag() as flag:
        all_ranks_ready()
        if rank == 0:
            for _ in range(times):
                os.kill(launcher, number)
                time.sleep(0.15)
        while flag.requested is None:
            time.sleep(0.01)
        end = time.monotonic() + seconds
        if rank == 0:
            box.note("saving a checkpoint")
        while time.monotonic() < end:
            if progress == "communicates":
                box.enter("all_reduce", "dp", "zero.reduce")
            if progress == "saves" and rank == 0:
                box.tick()
            time.sleep(0.05)
        (folder / f"saved{rank}").touch()
        sys.exit(128 + flag.requested)


def one_rank_told() -> None:
    """SIGTERM reaches rank 1 alone; it shares its flag, here through a file."""
    with StopFlag() as flag:
        all_ranks_ready()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            assert flag.requested == signal.SIGTERM
            (folder / "flag").touch()
        while not (folder / "flag").exists():
            time.sleep(0.01)
        time.sleep(0.5 * (1 - rank))  # rank 0 takes longer, and must be left to finish
        (folder / f"saved{rank}").touch()
        sys.exit(143 if rank else 0)


def all_told() -> None:
    """SIGTERM reaches rank 1 alone, which shares its flag; wherever the others are, they end as it does."""
    with StopFlag() as flag:
        all_ranks_ready()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            assert flag.requested == signal.SIGTERM
            (folder / "flag").touch()
        while not (folder / "flag").exists():
            time.sleep(0.01)
    sys.exit(143)


def one_node_fails() -> None:
    """The rank of the node that is told so is killed; the other one hears the connection break."""
    stepping()
    if sys.argv[3] == "fails":
        (folder / "dead").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not (folder / "dead").exists():
        time.sleep(0.01)
    connection_breaks()


def told_too_early() -> None:
    """SIGTERM while no rank is ready to stop in order."""
    all_ranks_ready()
    if rank == 0:
        os.kill(launcher, signal.SIGTERM)
    time.sleep(300)


def second_interrupt() -> None:
    with StopFlag():
        all_ranks_ready()
        if rank == 0:
            os.kill(launcher, signal.SIGINT)
            time.sleep(1.2)
            os.kill(launcher, signal.SIGINT)
        while True:
            time.sleep(1)


def save_fails() -> None:
    """Stopping, but one rank cannot save: that is a failure, not a stop."""
    with StopFlag() as flag:
        all_ranks_ready()
        if rank == 0:
            os.kill(launcher, signal.SIGINT)
        while flag.requested is None:
            time.sleep(0.01)
        if rank == 1:
            raise OSError(28, "No space left on device")
        time.sleep(300)


def lingers() -> None:
    (folder / f"port{rank}").write_text(os.environ["MASTER_PORT"])
    all_ranks_ready()
    while not (folder / "go").exists():
        time.sleep(0.02)


def gloo() -> None:
    """Real ranks in a real collective: rank 2 is late for it, rank 1 is killed in it, rank 0 hears that from Gloo."""
    import torch
    import torch.distributed as dist

    from meshwright.comm.collectives import Group
    from meshwright.comm.ledger import Ledger

    dist.init_process_group("gloo")
    box = BlackBox.from_environment(rank)
    group = Group("dp", range(3), rank, dist.group.WORLD, Ledger(), box)
    for step in range(1, 8):
        box.step = step
        group.all_reduce(torch.ones(4), reason="zero.reduce", phase="backward").wait()
    if rank == 2:
        box.note("loading data")
        time.sleep(300)
    if rank == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    group.all_reduce(torch.ones(4), reason="step.metrics", phase="step").wait()


cases = {
    "interrupted": lambda: stop_in_order(signal.SIGINT),
    "interrupted_twice_at_once": lambda: stop_in_order(signal.SIGINT, times=2, seconds=1.0),
    "terminated": lambda: stop_in_order(signal.SIGTERM),
    "stops_slowly": lambda: stop_in_order(signal.SIGINT, seconds=1.5, progress="communicates"),
    "saves_slowly": lambda: stop_in_order(signal.SIGINT, seconds=1.5, progress="saves"),
    "does_not_stop": lambda: stop_in_order(signal.SIGINT, seconds=300),
}
(cases.get(case) or globals()[case])()
