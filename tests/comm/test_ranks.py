"""The pool of test ranks itself: a case that goes wrong must fail, quickly, and leave nothing behind."""

from __future__ import annotations

import os
import time

import pytest
import torch

from meshwright.comm.mesh import Mesh
from ranks import RankFailure

STEP = {"reason": "test", "phase": "step"}


def raising(mesh: Mesh) -> int:
    if mesh.rank == 1:
        raise ValueError("planted")
    mesh.group("dp").barrier("never")
    return os.getpid()


def test_an_exception_comes_first_with_its_traceback(ranks) -> None:
    with pytest.raises(RankFailure, match=r"(?s)^--- rank 1: exit code 1.*in raising\n.*ValueError: planted.*rank 0"):
        ranks.run(2, raising)


def aborting(mesh: Mesh) -> None:
    group = mesh.group("dp")
    if mesh.rank == 0:
        group.send(torch.ones(500), 1, **STEP)
    else:
        group.recv(torch.empty(5), 0, **STEP)
    group.barrier("end")


def test_an_abort_from_cpp_is_seen(ranks) -> None:
    # Gloo's answer to a message longer than the buffer.
    outcomes = ranks.attempt(2, aborting)
    assert outcomes[1].exit == -6 and not outcomes[1].ok
    assert outcomes[1].stderr


def hanging(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(60)


def test_the_deadline_kills_what_is_left(ranks) -> None:
    done, late = ranks.attempt(2, hanging, bare=True, timeout=1)
    assert done.ok and late.late and late.exit == -9
    with pytest.raises(RankFailure, match="rank 1: had to be killed"):
        ranks.run(2, hanging, bare=True, timeout=1)


def leaving(rank: int, world: int, code: int) -> None:
    if rank == 1:
        os._exit(code)
    time.sleep(60)


@pytest.mark.parametrize("code", [0, 3])
def test_leaving_early_ends_the_case(ranks, code: int) -> None:
    stayed, left = ranks.attempt(2, leaving, code, bare=True, timeout=30)
    assert (left.exit, left.ok, stayed.late) == (code, False, True)
    assert stayed.seconds < 20


class Parcel:
    def __init__(self, t: torch.Tensor) -> None:
        self.t = t


def passing(mesh: Mesh, parcel: Parcel, size: int) -> Parcel:
    return Parcel(parcel.t.repeat(size) + mesh.rank)


def test_arguments_and_large_results_go_by_value(ranks) -> None:
    out = ranks.run(2, passing, Parcel(torch.tensor([1.0])), 1 << 20)
    assert [type(o) for o in out] == [Parcel] * 2
    assert [o.t.sum().item() for o in out] == [1 << 20, 2 << 20]


def about(mesh: Mesh) -> tuple:
    return torch.get_num_threads(), os.environ["PLANTED"], mesh.world, mesh.sizes["tp"]


def test_ranks_have_one_thread_and_the_given_environment(ranks) -> None:
    assert ranks.run(4, about, axes={"tp": 2, "dp": 2}, env={"PLANTED": "yes"}) == [(1, "yes", 4, 2)] * 4


def printing(rank: int, world: int) -> None:
    print("said on stdout")
    raise RuntimeError("planted")


def test_a_failure_shows_what_the_rank_printed(ranks) -> None:
    with pytest.raises(RankFailure, match="said on stdout"):
        ranks.run(1, printing, bare=True)


def unpicklable(rank: int, world: int) -> object:
    return lambda: rank


def test_a_value_that_cannot_be_returned_is_an_error(ranks) -> None:
    with pytest.raises(RankFailure, match="rank 0: exit code 1"):
        ranks.run(1, unpicklable, bare=True)


def test_local_functions_are_refused(ranks) -> None:
    with pytest.raises(AssertionError, match="top level"):
        ranks.run(1, lambda rank, world: 0, bare=True)
