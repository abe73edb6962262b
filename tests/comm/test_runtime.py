from __future__ import annotations

import os
import socket

import pytest
import torch

from meshwright.comm import runtime
from meshwright.comm.mesh import Mesh
from meshwright.spec.errors import RunError, UserError
from meshwright.spec.layout import Layout

GOOD = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_JOB_ID": "1020007",
}


def test_place_of_torchrun_and_of_slurm() -> None:
    assert runtime.place(GOOD) == runtime.Place(3, 4, 1, 2, "host", 29500)
    assert runtime.place(SLURM) == runtime.Place(3, 4, 1, 2, "10.0.0.1", 20007)
    # A launcher started under Slurm speaks for itself.
    assert runtime.place(SLURM | GOOD) == runtime.place(GOOD)


def test_without_local_variables_all_ranks_are_on_one_machine() -> None:
    plain = {k: v for k, v in GOOD.items() if not k.startswith("LOCAL")}
    assert runtime.place(plain) == runtime.Place(3, 4, 3, 4, "host", 29500)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"WORLD_SIZE": None}, r"environment: WORLD_SIZE not set; start the ranks with"),
        ({"MASTER_ADDR": None, "MASTER_PORT": ""}, r"environment: MASTER_ADDR, MASTER_PORT not set"),
        ({"RANK": "4"}, r"RANK=4 is not among WORLD_SIZE=4 ranks; use 0 to 3"),
        ({"RANK": "-1"}, r"RANK=-1 is not among"),
        ({"RANK": "one"}, r"RANK='one' is no whole number"),
        ({"MASTER_PORT": "70000"}, r"MASTER_PORT=70000 is no port"),
        ({"LOCAL_RANK": "2"}, r"LOCAL_RANK=2 of LOCAL_WORLD_SIZE=2 contradicts RANK=3 of WORLD_SIZE=4"),
        ({"RANK": "0"}, r"LOCAL_RANK=1 of LOCAL_WORLD_SIZE=2 contradicts RANK=0"),
        ({"LOCAL_WORLD_SIZE": "5"}, r"LOCAL_WORLD_SIZE=5 contradicts"),
    ],
)
def test_wrong_environments_are_told(change: dict[str, str | None], says: str) -> None:
    env = {k: v for k, v in (GOOD | change).items() if v is not None}
    with pytest.raises(UserError, match=says):
        runtime.place(env)


def test_launched() -> None:
    assert runtime.launched(GOOD) and runtime.launched(SLURM)
    assert not runtime.launched({}) and not runtime.launched(SLURM | {"SLURM_STEP_NUM_TASKS": "1"})
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
    assert not runtime.launched(script), "a batch script is told of the job's tasks, but is none of them"
    assert runtime.launched({"RANK": "0"})  # half of it is a mistake to be told, not a run of one


def test_devices_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert runtime.pick_device("cpu", 5) == runtime.pick_device("auto", 5) == torch.device("cpu")
    with pytest.raises(UserError, match=r"device: cuda is not there, torch finds no accelerator; use device=cpu"):
        runtime.pick_device("cuda", 0)


def test_devices_with_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert runtime.pick_device("auto", 1) == runtime.pick_device("cuda", 1) == torch.device("cuda", 1)
    assert runtime.pick_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(UserError, match="2 cuda devices for local rank 2; use at most 2 ranks on this machine"):
        runtime.pick_device("auto", 2)


def threads(rank: int, world: int, cores: int, local_world: int) -> int:
    os.sched_getaffinity = lambda pid: set(range(cores))
    os.environ.pop("OMP_NUM_THREADS", None)
    return runtime.set_threads(local_world)


@pytest.mark.parametrize(("cores", "local_world", "expect"), [(8, 2, 4), (7, 2, 3), (2, 4, 1)])
def test_ranks_share_the_cores(ranks, cores: int, local_world: int, expect: int) -> None:
    assert ranks.run(1, threads, cores, local_world, bare=True) == [expect]


def told_threads(rank: int, world: int) -> int:
    return runtime.set_threads(1)


def test_omp_num_threads_wins(ranks) -> None:
    assert ranks.run(1, told_threads, bare=True, env={"OMP_NUM_THREADS": "1"}) == [1]


def joined(rank: int, world: int, port: int) -> tuple:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    here = runtime.init(torch.device("cpu"), 30.0)
    mesh = Mesh.create(Layout(dp=world), device=torch.device("cpu"), timeout=30.0)
    t = torch.tensor([rank + 1])
    left = mesh.group("dp").all_reduce(t, reason="test", phase="step", async_=True)
    left.wait()
    runtime.shutdown()
    return here.rank, t.item(), torch.distributed.is_initialized()


def test_init_and_shutdown(ranks, free_port: int) -> None:
    assert ranks.run(2, joined, free_port, bare=True) == [(0, 3, False), (1, 3, False)]


def alone(rank: int, world: int, port: int) -> str:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        runtime.init(torch.device("cpu"), 1.5)
    except (UserError, RunError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return "joined"


def test_a_port_in_use_is_told(ranks) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert ranks.run(1, alone, port, bare=True) == [
            f"UserError: MASTER_PORT: port {port} is in use; choose another"
        ]


def test_ranks_that_do_not_come_are_told(ranks, free_port: int) -> None:
    said = ranks.run(1, alone, free_port, bare=True)[0]
    assert said == "RunError: rank 0 waited 1.5 s for the other 1 ranks in vain"


def unreachable(rank: int, world: int, port: int) -> str:
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        runtime.init(torch.device("cpu"), 1.5)
    except (UserError, RunError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return "joined"


def test_a_master_that_is_not_there_is_told(ranks, free_port: int) -> None:
    said = ranks.run(1, unreachable, free_port, bare=True)[0]
    assert said == f"RunError: rank 1 cannot reach 127.0.0.1:{free_port} within 1.5 s"


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
