"""Parts that are no runs (as tensor parallelism makes), and torch's own planners and DTensors over our storage."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright.comm.mesh import Mesh
from meshwright.convert.checking import check
from meshwright.spec.boxes import Box
from meshwright.train import checkpoint, folders, storage, tensorfile
from meshwright.train.checkpoint import Saver
from meshwright.train.parts import Part
from meshwright.train.storage import Reader, Writer

SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


def grid(whole: torch.Tensor, cuts: list[list[int]]) -> list[Part]:
    """`whole` cut along each dimension; parts of memory of their own."""
    boxes = [Box((), ())]
    for dim, size in enumerate(whole.shape):
        edges = [0, *cuts[dim], size]
        spans = [(a, b - a) for a, b in itertools.pairwise(edges) if b > a]
        boxes = [Box((*box.offsets, o), (*box.sizes, s)) for box in boxes for o, s in spans]
    return [Part("w", tuple(whole.shape), box, cut(whole, box).contiguous()) for box in boxes]


def cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]


@settings(max_examples=40)
@given(SIZES, st.data(), st.integers(1, 60), st.integers(1, 30), st.booleans())
def test_any_cut_to_any_other(tmp_path_factory, shape, data, slab, block, strided):
    """Whatever is read at once, and wherever checksums begin and end; into memory with gaps, too."""

    def cuts() -> list[list[int]]:
        return [sorted(data.draw(st.lists(st.integers(0, n), max_size=2, unique=True))) for n in shape]

    whole = torch.randn(shape)
    folder = tmp_path_factory.mktemp("cuts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "SLAB", slab)
        patch.setattr(tensorfile, "BLOCK", block)
        patch.setattr(storage.manifest, "BLOCK", block)
        saver = Saver(folder, Mesh.single(torch.device("cpu")), grid(whole, cuts()), keep=1, background=False)
        saver.save(1, {})
        ended = saver.wait()
        assert ended.error is None
        parts = grid(torch.full(shape, float("nan")), cuts())
        if strided:
            parts = [Part(p.name, p.shape, p.box, torch.full((*p.box.sizes, 2), float("nan"))[..., 0]) for p in parts]
        checkpoint.read(ended.where, parts)
    for part in parts:
        assert torch.equal(part.tensor, cut(whole, part.box))


def test_slabs_are_no_larger_than_they_may_be(tmp_path, monkeypatch):
    """One column of a wide box: read by rows that fit, not all at once, and nothing of the box beside is kept."""
    whole = torch.randn(64, 50)
    saver = Saver(tmp_path, Mesh.single(torch.device("cpu")), [Part.whole("w", whole)], keep=1, background=False)
    saver.save(1, {})
    where = saver.wait().where
    monkeypatch.setattr(storage, "SLAB", 4 * 120)
    sizes, empty = [], torch.empty

    def watched(*size, **options):
        made = empty(*size, **options)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(torch, "empty", watched)
    part = Part("w", (64, 50), Box((0, 7), (64, 2)), torch.zeros(64, 2))
    checkpoint.read(where, [part])
    assert torch.equal(part.tensor, whole[:, 7:9])
    slabs = [size for size in sizes if size != tensorfile.BLOCK]
    assert len(slabs) == 22 and max(slabs) <= 120
    # A whole box that goes to a part of the columns of another tensor, too.
    sizes.clear()
    wide = torch.zeros(64, 60)
    checkpoint.read(where, [Part("w", (64, 50), Box((0, 0), (64, 50)), wide[:, 5:55])])
    assert torch.equal(wide[:, 5:55], whole) and max(size for size in sizes if size != tensorfile.BLOCK) <= 120


MATRIX = torch.arange(7 * 10.0).view(7, 10)
PLACED = {"rows": [Shard(0)], "columns": [Shard(1)], "both": [Shard(0), Shard(1)], "copies": [Shard(1), Replicate()]}


def with_torchs_own(mesh, folder, monkeyed_slab):
    """Save DTensors of each placement with torch's planner and our writer; load each in every other with our reader."""
    storage.SLAB = monkeyed_slab
    meshes = {1: init_device_mesh("cpu", (4,)), 2: init_device_mesh("cpu", (2, 2))}
    found = {}
    for step, (name, placements) in enumerate(PLACED.items()):
        on = meshes[len(placements)]
        state = {
            "w": distribute_tensor(MATRIX, on, placements),
            "half": distribute_tensor(MATRIX.bfloat16(), on, placements),
        }
        state["bias"] = torch.arange(3.0)
        dcp.save(state, storage_writer=Writer(folder, step, {"of": name}, keep=9))
        where = folders.path(folder, step)
        for other, wanted in PLACED.items():
            into = {
                "w": distribute_tensor(torch.zeros(7, 10), meshes[len(wanted)], wanted),
                "half": distribute_tensor(torch.zeros(7, 10, dtype=torch.bfloat16), meshes[len(wanted)], wanted),
                "bias": torch.zeros(3),
            }
            dcp.load(into, storage_reader=Reader(where))
            same = torch.equal(into["w"].full_tensor(), MATRIX) and torch.equal(
                into["half"].full_tensor(), MATRIX.bfloat16()
            )
            found[name, other] = same and into["bias"].tolist() == [0, 1, 2]
        dist.barrier()
    return found


@pytest.mark.parametrize("slab", [16, 1 << 26])
def test_dtensors_through_torchs_planners(ranks, tmp_path, slab):
    for found in ranks.run(4, with_torchs_own, tmp_path, slab):
        assert len(found) == 16 and all(found.values()), found
    for step in range(len(PLACED)):
        tensors, meta = checkpoint.load(folders.path(tmp_path, step))
        assert torch.equal(tensors["w"], MATRIX) and torch.equal(tensors["half"], MATRIX.bfloat16())
        assert meta == {"of": list(PLACED)[step]}


def read_columns(mesh, folder):
    """What our planner wrote, by torch's: a DTensor cut along columns; and one that the file has no room for."""
    on = init_device_mesh("cpu", (2,))
    into = {"w": distribute_tensor(torch.zeros(7, 10), on, [Shard(1)])}
    dcp.load(into, storage_reader=Reader(folder))
    with pytest.raises(CheckpointException, match="lacking"):
        dcp.load({"lacking": torch.zeros(1)}, storage_reader=Reader(folder))
    return into["w"].full_tensor()


def test_our_parts_by_torchs_planner(ranks, tmp_path):
    parts = grid(MATRIX, [[2, 3], [4]])
    saver = Saver(tmp_path, Mesh.single(torch.device("cpu")), parts, keep=1, background=False)
    saver.save(1, {})
    for found in ranks.run(2, read_columns, saver.wait().where):
        assert torch.equal(found, MATRIX)


def test_what_is_no_tensor_is_refused_in_words(tmp_path):
    """It would have to be pickled."""
    with pytest.raises(CheckpointException, match=r"epoch is no tensor; only tensors are saved"):
        dcp.save({"w": MATRIX, "epoch": object()}, storage_writer=Writer(tmp_path, 1, {}, keep=1), no_dist=True)
    assert folders.steps(tmp_path) == []


def uneven(mesh, folder):
    """Three rows over four ranks: torch plans a box without rows for the last one."""
    on = init_device_mesh("cpu", (4,))
    rows = MATRIX[:3]
    dcp.save({"w": distribute_tensor(rows, on, [Shard(0)])}, storage_writer=Writer(folder, 1, {}, keep=1))
    into = {"w": distribute_tensor(torch.zeros(3, 10), on, [Shard(0)])}
    dcp.load(into, storage_reader=Reader(folders.path(folder, 1)))
    return torch.equal(into["w"].full_tensor(), rows)


def test_a_rank_without_rows(ranks, tmp_path):
    assert ranks.run(4, uneven, tmp_path) == [True] * 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0, 3), torch.empty(3, 0), torch.empty(0, dtype=torch.int64),
        *(torch.arange(5).to(dtype) for dtype in (torch.uint16, torch.uint32, torch.uint64)),
    ],
    ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)}",
)  # fmt: skip
def test_tensors_that_no_model_has(tmp_path, tensor):
    dcp.save({"odd": tensor, "w": MATRIX}, storage_writer=Writer(tmp_path, 1, {}, keep=1), no_dist=True)
    into = {"odd": torch.zeros_like(tensor), "w": torch.zeros(7, 10)}
    dcp.load(into, storage_reader=Reader(folders.path(tmp_path, 1)), no_dist=True)
    found, _ = checkpoint.load(folders.path(tmp_path, 1))
    for name, expected in (("odd", tensor), ("w", MATRIX)):
        for one in (into[name], found[name]):
            assert (one.dtype, one.shape, one.tolist()) == (expected.dtype, expected.shape, expected.tolist())
    assert check(folders.path(tmp_path, 1)).findings == ()


def test_a_dtype_that_is_not_saved_is_refused_in_words(tmp_path):
    with pytest.raises(CheckpointException, match=r"z is of dtype torch.complex64; what is saved is float64, float32,"):
        dcp.save({"z": MATRIX + 1j}, storage_writer=Writer(tmp_path, 1, {}, keep=1), no_dist=True)
    assert folders.steps(tmp_path) == []


def test_a_tensor_in_another_dtype_is_converted_on_the_way(tmp_path):
    saver = Saver(tmp_path, Mesh.single(torch.device("cpu")), [Part.whole("w", MATRIX)], keep=1, background=False)
    saver.save(1, {})
    narrow = torch.zeros(7, 10, dtype=torch.bfloat16)
    checkpoint.read(saver.wait().where, [Part.whole("w", narrow)])
    assert torch.equal(narrow, MATRIX.bfloat16())
