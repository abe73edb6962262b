"""Starting and leaving torch's process group, and the device of a rank."""

from __future__ import annotations

import gc
import os
import platform
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.comm.mesh import close_all
from meshwright.comm.place import Place, launched, place
from meshwright.spec.errors import RunError, UserError

__all__ = ["Place", "init", "launched", "pick_device", "place", "set_threads", "shutdown"]

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


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
        if (here.address in _LOOPBACK or here.address.startswith("127.")) and platform.system() == "Linux":
            # All ranks are on this machine: do not depend on what its name resolves to.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        torch.accelerator.set_device_index(device.index)
    os.environ |= {
        "RANK": str(here.rank),
        "WORLD_SIZE": str(here.world),
        "LOCAL_RANK": str(here.local_rank),
        "LOCAL_WORLD_SIZE": str(here.local_world),
        "MASTER_ADDR": here.address,
        "MASTER_PORT": str(here.port),
    }
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
    """Leave the run in order: finish what is under way, meet the other ranks, destroy the groups.

    Only for a rank that is healthy; after a failure just end the process, the others may be gone.
    """
    if not dist.is_initialized():
        return
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        dist.barrier(device_ids=[torch.accelerator.current_device_index()] if dist.get_backend() == "nccl" else None)
    else:
        dist.barrier()
    # A backend ends its threads with the last reference to a group. One that is still letting go of a tensor while
    # the interpreter ends would abort the process.
    close_all()
    dist.destroy_process_group()
    gc.collect()
