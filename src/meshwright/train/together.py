"""All ranks train on the same tokens, whatever becomes of the text while they start.

One rank of each machine tokenises, where that is not done yet. Rank 0 says under which key its token files lie; the
others open those and do not look at the text again. A rank that cannot see them, because its machine shares no disk
with rank 0's, takes what its own machine prepared and compares a digest of the tokens with rank 0's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from meshwright.comm.collectives import Group
from meshwright.spec.errors import UserError
from meshwright.spec.run import RunSpec
from meshwright.train.report import LAUNCHED
from meshwright.train.text import Prepared, digest, follow, prepare


def prepare_together(
    run: RunSpec, world: Group, device: torch.device, say: Callable[[str], None] = lambda text: None
) -> Prepared:
    """The run's token files, of equal content on all ranks; every rank of `world` calls it. `say` is told of damage.

    Raises what `prepare` raises, and UserError on a rank whose machine holds other tokens than rank 0's.
    """
    folder = Path(run.out) / "data"
    # LOCAL_RANK is absent where a rank was started by hand: then each looks for itself.
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    # Our launcher has looked at their content just before it started the ranks.
    check = not os.environ.get(LAUNCHED)
    mine = prepare(run.data, run.model.vocab, folder, check=check, say=say) if first else None
    world.barrier("data.prepared")
    key = _from_rank_0(world, device, "data.choose", mine.key if mine else 0)
    chosen = mine if mine and mine.key == key else follow(run.data, run.model.vocab, folder, key)
    lacking = torch.tensor([chosen is None], dtype=torch.int64, device=device)
    world.all_reduce(lacking, reason="data.lacking", phase="step")
    if not lacking:
        assert chosen is not None
        return chosen
    found = chosen or mine or prepare(run.data, run.model.vocab, folder)
    theirs = _from_rank_0(world, device, "data.digest", digest(found) if world.rank == 0 else 0)
    if chosen is None and digest(found) != theirs:
        raise UserError(
            f"data.path: {run.data.path} is not the same for rank {world.rank} as for rank 0; give all machines the "
            "same files, leave them unchanged while the run starts, or set out to a folder that all machines share"
        )
    return found


def _from_rank_0(world: Group, device: torch.device, reason: str, number: int) -> int:
    shared = torch.tensor([number], dtype=torch.int64, device=device)
    world.broadcast(shared, 0, reason=reason, phase="step")
    return int(shared)


def first_error(world: Group, device: torch.device, error: Exception | None) -> str | None:
    """The error of the lowest rank that has one, in words, on every rank; None where no rank has any.

    Where that is not rank 0, the words name the rank: what it sees the others may not.
    """
    failed = torch.tensor([world.size if error is None else world.rank], dtype=torch.int64, device=device)
    world.all_reduce(failed, op="min", reason="agree", phase="step")
    rank = int(failed)
    if rank == world.size:
        return None
    words = list((str(error) + (f" (as rank {rank} sees it)" if rank else "")).encode()) if rank == world.rank else []
    length = torch.tensor([len(words)], dtype=torch.int64, device=device)
    world.broadcast(length, rank, reason="agree", phase="step")
    text = (
        torch.tensor(words, dtype=torch.uint8, device=device)
        if words
        else torch.zeros(int(length), dtype=torch.uint8, device=device)
    )
    world.broadcast(text, rank, reason="agree", phase="step")
    return bytes(text.tolist()).decode()
