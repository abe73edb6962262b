"""Ranks for distributed tests: one fork server per session that has torch loaded, so a case costs tens of ms.

    def total(mesh, start):                        # a function at the top level of the test file
        t = torch.tensor([start + mesh.rank])
        mesh.group("dp").all_reduce(t, reason="test", phase="step")
        return t.item()

    def test_total(ranks):                         # `ranks`: the session's pool, from conftest.py
        assert ranks.run(2, total, 10) == [21, 21]

`run(world, fn, *args)` forks `world` processes, joins them with Gloo, and calls `fn(mesh, *args)` in each with the
mesh of the layout dp=world, or of `axes={"dp": 2, "tp": 2}` and `order`. It returns the ranks' return values, and
raises RankFailure with every rank's traceback, stderr and exit code if any of them failed: by an exception, by a
signal (Gloo aborts from C++), by leaving early, by an operation dropped without wait(), or by taking longer than
`timeout` seconds. Nothing is left running. `attempt` does the same and returns one Outcome a rank instead of raising.

Arguments and return values are pickled; tensors go by value. `env` is set in the ranks before the mesh is made.
A process started by this file sees no accelerator and computes on one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import inspect
import io
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEEDED = (
    "numpy.random",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "pytest",
    "hypothesis.strategies",
    "meshwright.comm.check",
    "meshwright.train.checkpoint",
    "meshwright.verify.judge",
    "meshwright.verify.peak",
    "meshwright.verify.reference",
    "meshwright.verify.worker",
    "torch.utils.flop_counter",
)
"""What the server loads once for all ranks: what tests' files import, which took each rank 0.4 s, and what torch loads
when a dispatch mode or an optimizer is first used, which took 1.5 s."""
GRACE = 3.0
"""Seconds the other ranks get to fail by themselves once one has failed."""


@dataclass
class Outcome:
    """How one rank ended."""

    rank: int
    value: Any = None
    error: str | None = None
    """Traceback, if it raised."""
    exit: int | None = None
    """Exit code, negative for a signal."""
    late: bool = False
    """Whether it had to be killed: at the deadline, or because another rank had failed."""
    stderr: str = ""
    seconds: float = 0.0
    """When it ended, after the start."""

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit == 0

    def __str__(self) -> str:
        how = "had to be killed" if self.late else f"exit code {self.exit}"
        text = f"--- rank {self.rank}: {how} after {self.seconds:.2f} s"
        return "\n".join([text, *(part for part in (self.error, self.stderr[-4000:]) if part)])


class RankFailure(AssertionError):
    """At least one rank failed; its message has them all, the first to fail first."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        failed = sorted((o for o in outcomes if not o.ok), key=lambda o: (o.late, o.seconds))
        super().__init__("\n".join(str(o) for o in failed))


@dataclass
class _Case:
    world: int
    module: str
    file: str
    function: str
    args: bytes
    timeout: float
    env: dict[str, str]
    mesh: dict[str, Any] | None
    group_timeout: float
    folder: str = field(default="")


class Ranks:
    """The pool, as its users see it."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, world: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Return `function(mesh, *args)` of every rank; raise RankFailure if one failed. Options: see `attempt`."""
        outcomes = self.attempt(world, function, *args, **options)
        if not all(o.ok for o in outcomes):
            raise RankFailure(outcomes)
        return [o.value for o in outcomes]

    def attempt(
        self,
        world: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60,
        group_timeout: float = 20,
        axes: Mapping[str, int] | None = None,
        order: Sequence[str] = ("tp", "cp", "dp", "pp"),
        env: Mapping[str, str] | None = None,
        bare: bool = False,
    ) -> list[Outcome]:
        """Run the case and tell how each rank ended.

        timeout: seconds for the whole case. group_timeout: seconds a collective waits for a rank. bare: call
        `function(rank, world, *args)` without process group or mesh; the rendezvous file's folder is in
        MESHWRIGHT_TEST_FOLDER.
        """
        assert "<locals>" not in function.__qualname__, "ranks need a function at the top level of its file"
        case = _Case(
            world=world,
            module=function.__module__,
            file=inspect.getsourcefile(function) or "",
            function=function.__qualname__,
            args=pickled(args),
            timeout=timeout,
            env=dict(env or {}),
            mesh=None if bare else {"axes": dict(axes or {"dp": world}), "order": tuple(order)},
            group_timeout=group_timeout,
        )
        if self._server is None or self._server.poll() is not None:
            self._start()
        assert self._socket is not None
        self._socket.settimeout(timeout + 30)
        _send(self._socket, pickle.dumps(case))
        return [_outcome(o) for o in pickle.loads(_receive(self._socket))]

    def close(self) -> None:
        """End the server and whatever it has started."""
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:
            try:
                self._server.wait(10)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        self._server = self._socket = None

    def _start(self) -> None:
        mine, theirs = socket.socketpair()
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._server = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        self._socket = mine


# -- the server: one thread, forks ranks and watches them ----------------------------------------------------------


def serve(fd: int) -> None:
    """Load what ranks need, then run one case after the other until the other end closes."""
    _die_with_parent()
    import torch

    torch.set_num_threads(1)
    for name in NEEDED:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(fileno=fd) as connection:
        while request := _receive(connection):
            _send(connection, pickle.dumps(_run_case(pickle.loads(request), connection)))


def _run_case(case: _Case, connection: socket.socket) -> list[tuple[Outcome, bytes]]:
    case.folder = tempfile.mkdtemp(prefix="ranks-")
    try:
        started = time.monotonic()
        pids: dict[int, int] = {}
        readers: dict[int, int] = {}
        sys.stdout.flush()
        for rank in range(case.world):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                connection.close()
                for other in readers:
                    os.close(other)
                os.close(reader)
                _be_rank(case, rank, writer)
            os.close(writer)
            pids[rank], readers[reader] = pid, rank
        return _watch(case, pids, readers, started)
    finally:
        shutil.rmtree(case.folder, ignore_errors=True)


def _watch(case: _Case, pids: dict[int, int], readers: dict[int, int], started: float) -> list[tuple[Outcome, bytes]]:
    """Collect what ranks say until all have ended; kill what is left at the deadline, or soon after one has failed."""
    outcomes = {rank: Outcome(rank) for rank in pids}
    said = {rank: bytearray() for rank in pids}
    deadline = started + case.timeout
    while pids:
        pause = max(0.0, min(0.5, deadline - time.monotonic())) if readers else 0.002
        ready, _, _ = select.select(list(readers), [], [], pause)
        for reader in ready:
            chunk = os.read(reader, 1 << 20)
            said[readers[reader]] += chunk
            if not chunk:
                del readers[reader]
                os.close(reader)
        for rank, pid in list(pids.items()):
            if time.monotonic() > deadline:
                outcomes[rank].late = True
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0 if outcomes[rank].late else os.WNOHANG)
            if done:
                del pids[rank]
                outcomes[rank].exit = os.waitstatus_to_exitcode(status)
                outcomes[rank].seconds = time.monotonic() - started
                if status or not said[rank]:
                    deadline = min(deadline, time.monotonic() + GRACE)
    for reader, rank in readers.items():  # what a killed rank has said, and nobody can add to
        os.set_blocking(reader, False)
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(reader, 1 << 20):
                said[rank] += chunk
        os.close(reader)
    for rank, outcome in outcomes.items():
        with contextlib.suppress(OSError):
            outcome.stderr = Path(case.folder, f"stderr{rank}").read_text(errors="replace")
    return [(outcomes[rank], bytes(said[rank])) for rank in sorted(outcomes)]


def _outcome(found: tuple[Outcome, bytes]) -> Outcome:
    outcome, said = found
    if said:
        try:
            kind, value = pickle.loads(said)
        except Exception as exc:
            kind, value = "error", f"return value cannot be read: {exc!r}"
        if kind == "value":
            outcome.value = value
        else:
            outcome.error = value
    elif outcome.exit == 0:
        outcome.error = "left before the end of the case"
    return outcome


# -- a rank --------------------------------------------------------------------------------------------------------


def _be_rank(case: _Case, rank: int, writer: int) -> None:
    """Run the case as one rank and leave; never returns."""
    code = 1
    try:
        _die_with_parent()
        err = os.open(Path(case.folder, f"stderr{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(err, 1)
        os.dup2(err, 2)
        os.environ |= case.env | {"MESHWRIGHT_TEST_FOLDER": case.folder}
        try:
            said = pickled(("value", _call(case, rank)))
            code = 0
        except BaseException:
            said = pickle.dumps(("error", traceback.format_exc()))
        with open(writer, "wb") as pipe:
            pipe.write(said)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # not by return: the server's stack is not ours


def _call(case: _Case, rank: int) -> Any:
    dropped: list[str] = []
    sys.unraisablehook = lambda caught: dropped.append(f"{caught.exc_value!r} in {caught.object!r}")
    warnings.simplefilter("error", _dropped_operation())
    function = _load(case)
    args = pickle.loads(case.args)
    if case.mesh is None:
        value = function(rank, case.world, *args)
    else:
        mesh = _join(case, rank)
        value = function(mesh, *args)
        del mesh
        _leave()
    gc.collect()
    assert not dropped, dropped
    return value


def _load(case: _Case) -> Any:
    """The case's function; its file is loaded by path under the name it has in the tests' process."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        spec = importlib.util.find_spec(case.module)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin and os.path.samefile(spec.origin, case.file):
        module = importlib.import_module(case.module)
    else:
        spec = importlib.util.spec_from_file_location(case.module, case.file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        parents = case.module.split(".")[:-1]
        for i in range(len(parents)):  # unpickling "tests.comm.test_x.function" asks for "tests" first
            sys.modules.setdefault(".".join(parents[: i + 1]), types.ModuleType(parents[i]))
        sys.modules[case.module] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in case.function.split("."):
        found = getattr(found, part)
    return found


def _join(case: _Case, rank: int) -> Any:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from meshwright.comm.mesh import Mesh
    from meshwright.spec.layout import Layout

    assert case.mesh is not None
    store = dist.FileStore(f"{case.folder}/store", case.world)
    timeout = timedelta(seconds=case.group_timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world, timeout=timeout)
    sizes = {"tp": 1, "cp": 1, "dp": 1, "pp": 1} | case.mesh["axes"]
    # Not validated: groups are tested for axes that no strategy uses yet.
    layout = Layout.model_construct(**sizes, order=case.mesh["order"])
    return Mesh.create(layout, device=torch.device("cpu"), timeout=case.group_timeout)


def _dropped_operation() -> type[Warning]:
    from meshwright.comm.pending import DroppedOperation

    return DroppedOperation


def _leave() -> None:
    from meshwright.comm import runtime

    runtime.shutdown()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


# -- messages between the tests and the server -----------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Pickles plain tensors as their bytes; torch's own way takes ten times as long, and proofs return thousands."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        if value.layout != torch.strided or not value.numel():
            return NotImplemented
        data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, value.dtype, tuple(value.shape))


def _tensor(data: bytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def pickled(value: Any) -> bytes:
    """What pickle.loads makes `value` of again."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(struct.pack("<Q", len(data)) + data)


def _receive(connection: socket.socket) -> bytes:
    head = _exactly(connection, 8)
    return _exactly(connection, struct.unpack("<Q", head)[0]) if head else b""


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(1 << 20, size - len(data)))
        if not chunk:
            return b""
        data += chunk
    return bytes(data)


if __name__ == "__main__":
    # Under the name by which the tests' process pickles this file's classes.
    sys.path.insert(0, str(Path(__file__).parent))
    importlib.import_module("ranks").serve(int(sys.argv[1]))
