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


def run_of(model: ModelSpec, layout: Layout, precision: str = "fp32", seed: int = 1, seq_len: int = 9) -> RunSpec:
    return RunSpec(
        model=model,
        data=Data(seq_len=seq_len),
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


def trainer_of(mesh, run, where):
    """One that goes on from the checkpoint in `where`, and the manifest of that."""
    trainer, about = Trainer(run, mesh), checkpoint.manifest_of(where)
    state.check_fits(trainer, about)
    checkpoint.read(where, state.held_parts(trainer), about)
    state.restored(trainer, about.meta)
    return trainer, about


def load_each(mesh, run, found):
    """What this layout makes of each checkpoint; `found` has folders."""
    results = []
    for where in found:
        trainer, about = trainer_of(mesh, run, where)
        compute = {name: p.detach().clone() for name, p in trainer.model.named_parameters()} if mesh.world == 1 else {}
        results.append((whole(trainer), trainer.optimizer.steps, state.Counts.of(about.meta).tokens, compute))
    return results


def sources(target: int, layouts: list[Layout], turn: int) -> list[int]:
    """Whose checkpoints a layout loads: its own, and those of some that follow it, others in each turn. So each layout
    is read and reads as often as the others, from more ranks and from fewer."""
    further = ((0, 1, 3, 6), (0, 2, 4, 7))[turn]
    return [(target + steps) % len(layouts) for steps in further]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("turn", "family", "precision"), [(0, "llama", "fp32"), (1, "gpt2", "bf16")])
def test_any_layout_to_any_layout(ranks, tmp_path, turn, family, precision):
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
    for target, layout in enumerate(LAYOUTS):
        run = run_of(MODELS[family], layout, precision, seed=99)
        numbers = sources(target, LAYOUTS, turn)
        for results in ranks.run(layout.world, load_each, run, [found[number] for number in numbers]):
            for number, (tensors, steps, tokens, compute) in zip(numbers, results, strict=True):
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


# Norms of heads, biases of columns and of rows, key-value heads that two ranks of four hold; q, k and v in one matrix.
CUT = {
    "llama": ModelSpec(
        family="llama", vocab=101, hidden=8, layers=2, heads=4, kv_heads=2, head_dim=2, ffn=12, max_seq=16, tied=True,
        qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True,
    ),
    "gpt2": ModelSpec(family="gpt2", vocab=101, hidden=8, layers=2, heads=4, max_seq=16, tied=False),
}  # fmt: skip
CUT_LAYOUTS = [
    Layout(dp=2, zero=3),
    Layout(dp=1, tp=2),
    Layout(dp=1, tp=4, sp=True),
    Layout(dp=2, tp=2, zero=1, zero_join=300, order=("dp", "tp", "cp", "pp")),
    Layout(dp=2, tp=2, sp=True, zero=3),
    Layout(dp=2, tp=2, zero=2, zero_shard=1),
    Layout(dp=2, cp=2, zero=2, order=("dp", "cp", "tp", "pp")),
    Layout(dp=1, tp=2, sp=True, cp=2, zero=3, zero_shard=1),
]


def load_and_score(mesh, run, found):
    """What this layout makes of each checkpoint, and the loss that its ranks compute with what they hold then."""
    data = UnequalData(run.model.vocab, run.data.seq_len, 1)
    results = []
    for where in found:
        trainer, _ = trainer_of(mesh, run, where)
        loss = trainer.evaluate(data, torch.arange(5)).loss
        results.append((whole(trainer), trainer.optimizer.steps, loss))
    return results


def on(ranks, layout: Layout, function, *args):
    axes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.data_ranks}
    return ranks.run(layout.world, function, *args, axes=axes, order=layout.order)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("turn", "family"), list(enumerate(CUT)))
def test_layouts_that_cut_tensors(ranks, tmp_path, turn, family):
    """Words that fill a part up are in no checkpoint, and what two ranks hold is in it once; nor does it know the
    ranks that share sequences."""
    saved = {}
    for number, layout in enumerate(CUT_LAYOUTS):
        run = run_of(CUT[family], layout, seq_len=8)
        ends = on(ranks, layout, train_and_save, run, tmp_path / str(number), number % 2 == 0)
        assert all(same(tensors, ends[0][0]) for tensors, _ in ends)
        saved[number] = ends[0][0]
        assert sum(size for _, size in ends) == sum(tensor.nbytes for tensor in saved[number].values())
    found = [folders.path(tmp_path / str(number), 2) for number in saved]
    embedding = {"llama": "model/model.embed_tokens.weight", "gpt2": "model/transformer.wte.weight"}[family]
    for number, where in enumerate(found):
        tensors, _ = checkpoint.load(where)
        assert same(tensors, saved[number]) and tensors.keys() == saved[0].keys()
        assert tensors[embedding].shape == (101, 8)
        for name, tensor in tensors.items():  # the layouts differ by rounding only
            assert (tensor - saved[0][name]).abs().max() < 1e-3, (name, CUT_LAYOUTS[number])
    losses: dict[int, list[float]] = {}
    for target, layout in enumerate(CUT_LAYOUTS):
        run = run_of(CUT[family], layout, seed=99, seq_len=8)
        numbers = sources(target, CUT_LAYOUTS, turn)
        for results in on(ranks, layout, load_and_score, run, [found[number] for number in numbers]):
            for number, (tensors, steps, loss) in zip(numbers, results, strict=True):
                assert steps == 2
                assert same(tensors, saved[number]), (CUT_LAYOUTS[number], layout)
                losses.setdefault(number, []).append(loss)
    for each in losses.values():
        assert each == pytest.approx([each[0]] * len(each), rel=1e-5)
