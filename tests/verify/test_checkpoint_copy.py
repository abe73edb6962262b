"""The copy that checkpoints are written from is as large as predicted, on every rank."""

from __future__ import annotations

import pytest
import torch

from meshwright.predict.memory import memory
from meshwright.predict.params import count
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, RunSpec
from meshwright.train import state
from meshwright.train.checkpoint import Saver
from meshwright.train.trainer import Trainer

MODEL = ModelSpec(family="gpt2", vocab=101, hidden=6, layers=2, heads=3, max_seq=16, tied=True)


def staged(mesh, runs, folder):
    """Bytes of the buffers, by run, each storage once and whole."""
    found = []
    for number, run in enumerate(runs):
        trainer = Trainer(run, mesh)
        saver = Saver(folder / str(number), mesh, state.saved_parts(trainer), keep=1)
        saver.save(1, {})
        assert saver.wait().error is None
        storages = {part.tensor.untyped_storage().data_ptr(): part.tensor for part in saver._staged}
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in storages.values()))
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "float64"])
@pytest.mark.parametrize("dp", [1, 3, 4])
def test_to_the_byte(ranks, tmp_path, dp, precision):
    layouts = [Layout(dp=dp, zero=zero) for zero in range(4)]
    if dp == 4:
        layouts += [Layout(dp=4, zero=1, zero_shard=2), Layout(dp=4, zero=3, zero_shard=2)]
    runs = [
        RunSpec(model=MODEL, data=Data(seq_len=9), batch=Batch(sequences=5), layout=layout, precision=precision)
        for layout in layouts
    ]
    for rank, sizes in enumerate(ranks.run(dp, staged, runs, tmp_path)):
        foretold = [memory(run, run.layout, rank).host["checkpoint copy"] for run in runs]
        assert sizes == foretold, rank
        assert all(foretold)


@pytest.mark.parametrize("order", [("tp", "cp", "dp", "pp"), ("dp", "cp", "tp", "pp")])
def test_context_ranks_hold_shards_too(ranks, tmp_path, order):
    """Whichever of the two axes comes first."""
    shards = [{"zero": 0}, {"zero": 3}, {"zero": 1, "zero_shard": 2}]
    runs = [
        RunSpec(model=MODEL, data=Data(seq_len=8), layout=Layout(dp=2, cp=2, order=order, **fields))
        for fields in shards
    ]
    found = ranks.run(4, staged, runs, tmp_path, axes={"dp": 2, "cp": 2}, order=order)
    assert found == [[memory(run, run.layout, rank).host["checkpoint copy"] for run in runs] for rank in range(4)]
    assert len(set(map(tuple, found))) > 1


def test_the_whole_is_written_once():
    run = RunSpec(model=MODEL, data=Data(seq_len=9), precision="bf16")
    per_element = 3 * torch.float32.itemsize
    for layout in (Layout(dp=7), Layout(dp=6, zero=2, zero_shard=3), Layout(dp=5, zero=3)):
        copies = [memory(run, layout, rank).host["checkpoint copy"] for rank in range(layout.data_ranks)]
        assert sum(copies) == per_element * count(MODEL)
