"""What a rank finds out about itself from its environment. Imports no torch.

A rank is told its place by the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT); under Slurm's srun those of the latter serve where torchrun's are missing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.spec.errors import UserError


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
    """Whether a launcher (torchrun, ours, srun with several tasks) started this process as one rank of several.

    Slurm gives its batch script and its interactive shell the job's variables too, SLURM_PROCID=0 and SLURM_NTASKS
    among them; the tasks of a step, which are what srun starts, are known by SLURM_STEP_NUM_TASKS.
    """
    env = os.environ if environment is None else environment
    return _by_srun(env) or "RANK" in env or "WORLD_SIZE" in env


def rank_number(environment: Mapping[str, str] | None = None) -> str | None:
    """This process's rank as its launcher wrote it, for messages; None in a process that is no rank. Never raises."""
    env = os.environ if environment is None else environment
    try:
        return env.get("RANK") or (env["SLURM_PROCID"] if _by_srun(env) else None)
    except UserError:
        return None


def place(environment: Mapping[str, str] | None = None) -> Place:
    """This process's place. Raises UserError where the variables are missing, no numbers, or contradict each other."""
    env = dict(os.environ if environment is None else environment)
    if "RANK" not in env and "WORLD_SIZE" not in env and _by_srun(env):
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


def _by_srun(env: Mapping[str, str]) -> bool:
    return "SLURM_PROCID" in env and _number(env, "SLURM_STEP_NUM_TASKS", 1) > 1


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
        "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
        "LOCAL_RANK": "SLURM_LOCALID",
        "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE",
        "MASTER_ADDR": "SLURM_LAUNCH_NODE_IPADDR",
    }
    found = {name: env[slurm] for name, slurm in names.items() if env.get(slurm)}
    if env.get("SLURM_JOB_ID"):
        found["MASTER_PORT"] = str(20000 + _number(env, "SLURM_JOB_ID") % 20000)
    return found
