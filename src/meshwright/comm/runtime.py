"""Starting and leaving torch's process group, and what a rank finds out about itself from its environment.

A rank is told its place by the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT); under Slurm's srun those of the latter serve where torchrun's are missing.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.spec.errors import RunError, UserError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the ranks of a run."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int


def launched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher (torchrun, ours, srun with several tasks) started this process as one rank of several."""
    env = os.environ if environment is None else environment
    several = "SLURM_PROCID" in env and _number(env, "SLURM_NTASKS", 1) > 1
    return several or "RANK" in env or "WORLD_SIZE" in env


def place(environment: Mapping[str, str] | None = None) -> Place:
    """This process's place. Raises UserError where the variables are missing, no numbers, or contradict each other."""
    env = dict(os.environ if environment is None else environment)
    if "RANK" not in env and "WORLD_SIZE" not in env and "SLURM_PROCID" in env:
        env = _from_slurm(env) | env
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise UserError(
            f"environment: {', '.join(missing)} not set; start the ranks with `meshwright train` or torchrun, "
            "which set them"
        )
    rank, world, port = (_number(env, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not 0 <= rank < world:
        raise UserError(f"environment: RANK={rank} is not among WORLD_SIZE={world} ranks; use 0 to {world - 1}")
    if not 0 < port < 65536:
        raise UserError(f"environment: MASTER_PORT={port} is no port; use 1 to 65535")
    # Without them, all ranks are taken to be on this machine.
    local_world, local_rank = _number(env, "LOCAL_WORLD_SIZE", world), _number(env, "LOCAL_RANK", rank)
    if not 0 <= local_rank < local_world <= world or local_rank > rank:
        raise UserError(
            f"environment: LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_world} contradicts RANK={rank} of "
            f"WORLD_SIZE={world}; LOCAL_RANK counts from 0 on each machine"
        )
    return Place(rank, world, local_rank, local_world, env["MASTER_ADDR"], port)


def pick_device(device: str, local_rank: int) -> torch.device:
    """The device of a rank: "cpu", "cuda", or "auto" for the accelerator that torch reports, else the CPU.

    Raises UserError where the device is missing or the machine has fewer of them than ranks.
    """
    if device == "cpu":
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or device not in ("auto", found.type):
        if device == "auto":
            return torch.device("cpu")
        has = "torch finds no accelerator" if found is None else f"torch finds {found.type}"
        raise UserError(f"device: {device} is not there, {has}; use device=cpu or device=auto")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise UserError(
            f"device: {count} {found.type} device{'s' * (count > 1)} for local rank {local_rank}; "
            f"use at most {count} ranks on this machine, or device=cpu"
        )
    return torch.device(found.type, local_rank)


def set_threads(local_world: int) -> int:
    """Share this machine's cores among its ranks, unless OMP_NUM_THREADS says otherwise; returns this rank's number."""
    if not os.environ.get("OMP_NUM_THREADS"):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_world))
    return torch.get_num_threads()


def init(device: torch.device, timeout: float) -> Place:
    """Join the run's other ranks: Gloo on the CPU, torch's default backend on an accelerator.

    `timeout`: seconds a collective, or this call, may wait for a rank. Raises UserError where the environment is
    wrong or the port in use, RunError where the other ranks do not come.
    """
    here = place()
    if device.type == "cpu":
        set_threads(here.local_world)
        if here.address in _LOOPBACK and platform.system() == "Linux":
            # All ranks are on this machine: do not depend on what its name resolves to.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        torch.accelerator.set_device_index(device.index)
    for name, value in (("RANK", here.rank), ("WORLD_SIZE", here.world), ("MASTER_PORT", here.port)):
        os.environ[name] = str(value)
    os.environ["MASTER_ADDR"] = here.address
    try:
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            rank=here.rank,
            world_size=here.world,
            timeout=timedelta(seconds=timeout),
            device_id=None if device.type == "cpu" else device,
        )
    except dist.DistNetworkError as exc:
        if "EADDRINUSE" in str(exc):
            raise UserError(f"MASTER_PORT: port {here.port} is in use; choose another") from exc
        raise RunError(f"rank {here.rank} cannot reach {here.address}:{here.port} within {timeout:g} s") from exc
    except dist.DistStoreError as exc:
        raise RunError(f"rank {here.rank} waited {timeout:g} s for the other {here.world - 1} ranks in vain") from exc
    return here


def shutdown() -> None:
    """Leave the run in order: finish what is under way, meet the other ranks, destroy the group.

    Only for a rank that is healthy; after a failure just end the process, the others may be gone.
    """
    if not dist.is_initialized():
        return
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        dist.barrier(device_ids=[torch.accelerator.current_device_index()] if dist.get_backend() == "nccl" else None)
    else:
        dist.barrier()
    dist.destroy_process_group()


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name) or ("" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(f"environment: {name}={text!r} is no whole number") from None


def _from_slurm(env: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables from srun's; the port from the job's number, so that jobs on one machine do not meet."""
    names = {
        "RANK": "SLURM_PROCID",
        "WORLD_SIZE": "SLURM_NTASKS",
        "LOCAL_RANK": "SLURM_LOCALID",
        "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE",
        "MASTER_ADDR": "SLURM_LAUNCH_NODE_IPADDR",
    }
    found = {name: env[slurm] for name, slurm in names.items() if env.get(slurm)}
    if env.get("SLURM_JOB_ID"):
        found["MASTER_PORT"] = str(20000 + _number(env, "SLURM_JOB_ID") % 20000)
    return found
