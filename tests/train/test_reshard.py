"""A checkpoint of any layout, loaded in any other: weights, moments and steps are the same bits, by name."""

from __future__ import annotations

import itertools

import pytest
import torch

from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, LrSchedule, RunSpec
from meshwright.train import checkpoint, folders, state
from meshwright.train.checkpoint import Saver
from meshwright.train.trainer import Trainer
from meshwright.verify.unequal import UnequalData

# Nothing divides anything: 101 rows, 6 columns, tied weights.
MODELS = {
    "llama": ModelSpec(
        family="llama", vocab=101, hidden=6, layers=2, heads=3, kv_heads=1, ffn=7, max_seq=16, tied=True
    ),
    "gpt2": ModelSpec(family="gpt2", vocab=101, hidden=6, layers=2, heads=3, max_seq=16, tied=True),
}
LAYOUTS = [
    Layout(dp=1),
    Layout(dp=2),
    Layout(dp=3),
    Layout(dp=2, zero=1),
    Layout(dp=3, zero=2),
    Layout(dp=3, zero=3),
    Layout(dp=4, zero=3),
    Layout(dp=4, zero=1, zero_shard=2),
    Layout(dp=4, zero=3, zero_shard=2),
    Layout(dp=8, zero=3),  # more ranks than a weight has rows
    Layout(dp=8, zero=2, zero_shard=4),
]


def run_of(model: ModelSpec, layout: Layout, precision: str = "fp32", seed: int = 1) -> RunSpec:
    return RunSpec(
        model=model,
        data=Data(seq_len=9),
        batch=Batch(sequences=5, micro=2),
        layout=layout,
        lr_schedule=LrSchedule(warmup=0),
        precision=precision,
        seed=seed,
    )


def whole(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All that a checkpoint should hold, gathered by the strategies and not by what saves; collective."""
    named = [("model", placement, tensor.clone()) for placement, tensor in trainer.sharded.named_parameters()]
    named += [(kind, placement, tensor.clone()) for placement, kind, tensor in trainer.optimizer.named_moments()]
    return {f"{kind}/{placement.name}": tensor.reshape(placement.shape) for kind, placement, tensor in named}


def train_and_save(mesh, run, folder, background):
    trainer, data = Trainer(run, mesh), UnequalData(run.model.vocab, run.data.seq_len, run.seed)
    for step in range(2):
        trainer.update(step, trainer.accumulate(data, step))
    trainer.sharded.settle()
    saver = Saver(folder, mesh, state.saved_parts(trainer), keep=1, background=background)
    saver.save(2, state.meta(trainer, 2, state.Counts(tokens=5)))
    ended = saver.wait()
    assert ended.error is None, ended.error
    return whole(trainer), sum(part.tensor.nbytes for part in state.saved_parts(trainer))


def load_each(mesh, run, found):
    """What this layout makes of each checkpoint; `found` has folders."""
    results = []
    for where in found:
        trainer = Trainer(run, mesh)
        about = checkpoint.manifest_of(where)
        state.check_fits(trainer, about)
        checkpoint.read(where, state.held_parts(trainer), about)
        state.restored(trainer, about.meta)
        compute = {name: p.detach().clone() for name, p in trainer.model.named_parameters()} if mesh.world == 1 else {}
        results.append((whole(trainer), trainer.optimizer.steps, state.Counts.of(about.meta).tokens, compute))
    return results


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "precision"), [("llama", "fp32"), ("gpt2", "bf16")])
def test_any_layout_to_any_layout(ranks, tmp_path, family, precision):
    saved = {}
    for number, layout in enumerate(LAYOUTS):
        run = run_of(MODELS[family], layout, precision)
        ends = ranks.run(layout.world, train_and_save, run, tmp_path / str(number), number % 2 == 0)
        assert all(same(tensors, ends[0][0]) for tensors, _ in ends)
        saved[number] = ends[0][0]
        # Each element is written once in all, and the ranks share the work.
        sizes = [size for _, size in ends]
        assert sum(sizes) == sum(tensor.nbytes for tensor in saved[number].values())
        if layout.zero == 0 or layout.zero_shard:
            assert max(sizes) < 1.2 * sum(sizes) / len(sizes) + 600
    found = [folders.path(tmp_path / str(number), 2) for number in saved]
    for number, where in enumerate(found):
        tensors, meta = checkpoint.load(where)
        assert same(tensors, saved[number]) and meta["updates"] == 2
    for layout in LAYOUTS:
        run = run_of(MODELS[family], layout, precision, seed=99)
        for results in ranks.run(layout.world, load_each, run, found):
            for number, (tensors, steps, tokens, compute) in enumerate(results):
                assert (steps, tokens) == (2, 5)
                assert same(tensors, saved[number]), (LAYOUTS[number], layout)
                for name, weight in compute.items():
                    assert torch.equal(weight, tensors[f"model/{name}"].to(weight.dtype))


def test_the_layouts_differ(ranks, tmp_path):
    """What is compared above is not one and the same thing: updates differ from layout to layout by rounding only."""
    runs = [run_of(MODELS["llama"], layout) for layout in LAYOUTS[:3]]
    all_ = [
        ranks.run(run.layout.world, train_and_save, run, tmp_path / str(n), False)[0][0] for n, run in enumerate(runs)
    ]
    for a, b in itertools.pairwise(all_):
        assert a.keys() == b.keys() and not same(a, b)
