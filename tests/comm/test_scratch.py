from __future__ import annotations

import torch

from meshwright.comm.mesh import Mesh
from meshwright.comm.scratch import Scratch


def test_a_buffer_is_lent_to_one_at_a_time_and_kept() -> None:
    scratch = Scratch()
    first, second = scratch.take(10, torch.float32), scratch.take(10, torch.float64)
    assert (first.shape, second.dtype) == ((10,), torch.float64)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    place = first.data_ptr()
    scratch.give(first)
    assert scratch.take(5, torch.float64).data_ptr() == place


def test_growing_sizes_do_not_pile_up() -> None:
    scratch = Scratch()
    for size in range(1, 100):
        scratch.give(scratch.take(size, torch.float32))
    assert scratch.bytes == 99 * 4


def test_the_smallest_that_fits_is_lent() -> None:
    scratch = Scratch()
    large, small = scratch.take(100, torch.float32), scratch.take(10, torch.float32)
    scratch.give(large)
    scratch.give(small)
    assert scratch.take(8, torch.float32).data_ptr() == small.data_ptr()


def many(mesh: Mesh) -> list[float]:
    group = mesh.group("dp")
    wholes = [torch.full((6,), float(10 * i + mesh.rank)) for i in range(4)]
    parts = [torch.empty(2) for _ in wholes]
    for _ in range(2):  # the second time in buffers that were used before
        pending = [
            group.reduce_scatter(part, whole, async_=True, reason="test", phase="step")
            for part, whole in zip(parts, wholes, strict=True)
        ]
        for handle in reversed(pending):
            handle.wait()
    return [*(part[1].item() for part in parts), group.scratch.bytes]


def test_reductions_in_flight_do_not_share_a_buffer(ranks) -> None:
    assert ranks.run(3, many) == [[3, 33, 63, 93, 4 * 24]] * 3
