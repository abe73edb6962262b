"""What a run asks of a pipeline beside its steps: checkpoints across stages, evaluation, samples, bad numbers."""

from __future__ import annotations

import math

import pytest
import torch

import poison
from meshwright.model.build import build
from meshwright.model.init import initialise_
from meshwright.model.loss import IGNORE
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, LrSchedule, RunSpec
from meshwright.train import checkpoint, folders, state
from meshwright.train.checkpoint import Saver
from meshwright.train.sample import generate
from meshwright.train.trainer import Trainer
from meshwright.verify.unequal import UnequalData

# Nothing divides anything: 101 rows, 6 columns, tied weights.
MODEL = ModelSpec(
    family="gpt2", vocab=101, hidden=6, layers=4, heads=3, max_seq=16, tied=True, embd_dropout=0.1, resid_dropout=0.1
)
INTERLEAVED = {"pp": 2, "pp_schedule": "interleaved", "pp_chunks": 2}
LAYOUTS = [
    Layout(dp=2, zero=1),
    Layout(dp=1, pp=2),
    Layout(dp=2, zero=3, **INTERLEAVED),
    Layout(dp=2, pp=2, zero=2, order=("pp", "dp", "cp", "tp")),
    Layout(dp=1, tp=3, pp=2),
    Layout(dp=1, pp=4, pp_split=(1, 1, 1, 1)),
]


def run_of(layout: Layout, precision: str = "fp32", seed: int = 1) -> RunSpec:
    return RunSpec(
        model=MODEL, data=Data(seq_len=8), batch=Batch(sequences=5, micro=2), layout=layout, precision=precision,
        lr_schedule=LrSchedule(warmup=0), seed=seed,
    )  # fmt: skip


def on(ranks, run, function, *args):
    axes = {axis: run.layout.size(axis) for axis in ("tp", "cp", "dp", "pp")}
    return ranks.run(run.layout.world, function, run, *args, axes=axes, order=run.layout.order)


def data_of(run):
    return UnequalData(run.model.vocab, run.data.seq_len, 1)


def held(trainer):
    """What this rank's stages hold, gathered over its data and tensor ranks."""
    named = [("model", placement, tensor.clone()) for placement, tensor in trainer.sharded.named_parameters()]
    named += [(kind, placement, tensor.clone()) for placement, kind, tensor in trainer.optimizer.named_moments()]
    return {f"{kind}/{placement.name}": tensor.reshape(placement.shape) for kind, placement, tensor in named}


def together(found):
    """What all ranks hold; those that hold the same have the same bits."""
    whole = {}
    for tensors in found:
        for name, tensor in tensors.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), name
    return whole


def train_and_save(mesh, run, folder):
    trainer = Trainer(run, mesh)
    for step in range(2):
        trainer.update(step, trainer.accumulate(data_of(run), step))
    trainer.sharded.settle()
    saver = Saver(folder, mesh, state.saved_parts(trainer), keep=1, background=True)
    saver.save(2, state.meta(trainer, 2, state.Counts()))
    ended = saver.wait()
    assert ended.error is None, ended.error
    return held(trainer), sum(part.tensor.nbytes for part in state.saved_parts(trainer))


def load_each(mesh, run, folders_):
    results = []
    for where in folders_:
        trainer, about = Trainer(run, mesh), checkpoint.manifest_of(where)
        state.check_fits(trainer, about)
        checkpoint.read(where, state.held_parts(trainer), about)
        state.restored(trainer, about.meta)
        results.append((held(trainer), trainer.optimizer.steps, trainer.evaluate(data_of(run), torch.arange(5)).loss))
    return results


@pytest.mark.timeout(300)
def test_a_checkpoint_knows_no_stages(ranks, tmp_path):
    """Saved by any, read by any other; the tied table and its moments are in it once, and the copies the same bits."""
    saved = []
    for number, layout in enumerate(LAYOUTS):
        ends = on(ranks, run_of(layout), train_and_save, tmp_path / str(number))
        saved.append(together(tensors for tensors, _ in ends))
        assert sum(size for _, size in ends) == sum(tensor.nbytes for tensor in saved[number].values())
    found = [folders.path(tmp_path / str(number), 2) for number in range(len(LAYOUTS))]
    losses: dict[int, list[float]] = {}
    for layout in LAYOUTS:
        ends = on(ranks, run_of(layout, seed=99), load_each, found)
        for number in range(len(found)):
            each = [end[number] for end in ends]
            whole = together(tensors for tensors, _, _ in each)
            assert whole.keys() == saved[number].keys()
            assert all(torch.equal(whole[name], tensor) for name, tensor in saved[number].items()), layout
            assert {steps for _, steps, _ in each} == {2}
            losses.setdefault(number, []).extend(loss for _, _, loss in each)
    for each in losses.values():
        assert each == pytest.approx([each[0]] * len(each), rel=1e-5)


def evaluate_between(mesh, run, evaluates):
    trainer, losses = Trainer(run, mesh), []
    for step in range(2):
        trainer.update(step, trainer.accumulate(data_of(run), step))
        if evaluates:  # seven sequences: more micro-batches than a step has
            losses.append(trainer.evaluate(data_of(run), torch.arange(100, 107)).loss)
    return losses, held(trainer)


@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[2]], ids=["1f1b", "interleaved, zero 3"])
def test_evaluation_is_the_plain_models_on_all_ranks_and_changes_nothing(ranks, layout):
    run = run_of(layout, "float64")
    trained = together(tensors for _, tensors in on(ranks, run, evaluate_between, False))
    plain = build(MODEL, dtype=torch.float64).eval()
    plain.load_state_dict({n: trained[f"model/{n}"] for n, _ in plain.named_parameters()}, strict=False)
    tokens, targets = data_of(run).batch(torch.arange(100, 107))
    expected = float(plain(tokens, targets).detach()) / int((targets != IGNORE).sum())
    ends = on(ranks, run, evaluate_between, True)
    assert [losses[-1] for losses, _ in ends] == pytest.approx([expected] * layout.world, rel=1e-12)
    after = together(tensors for _, tensors in ends)
    assert all(torch.equal(trained[name], tensor) for name, tensor in after.items())


def sampled(mesh, run):
    trainer = Trainer(run, mesh)
    return generate(trainer.model, [3, 1], 9, temperature=0.8, seed=7, logits=trainer.logits)


@pytest.mark.parametrize("layout", [LAYOUTS[2], LAYOUTS[4]], ids=["interleaved, zero 3", "tp"])
def test_a_pipeline_draws_what_one_rank_would(ranks, layout):
    run = run_of(layout, "float64")
    plain = build(MODEL, dtype=torch.float64)
    initialise_(plain, run.seed)
    assert on(ranks, run, sampled) == [generate(plain, [3, 1], 9, temperature=0.8, seed=7)] * layout.world


def poisoned(mesh, run, place, value):
    """The gradient of one stage is not finite in the second step of three."""
    trainer = Trainer(run, mesh)

    def spoil():
        weight = next(iter(trainer.model.blocks)).ln_1.weight
        return poison.filled(weight, value) if mesh.coords["pp"] == place else None

    return poison.steps(trainer, data_of(run), spoil, held)


@pytest.mark.parametrize(("place", "value"), [(0, math.nan), (1, math.inf)])
def test_a_bad_number_on_one_stage_skips_the_step_on_all(ranks, place, value):
    for history in on(ranks, run_of(LAYOUTS[3]), poisoned, place, value):
        assert history == poison.SKIPPED


def norm_of_ones(mesh, run):
    """The L2 norm where every gradient is 1."""
    trainer = Trainer(run, mesh)
    finish = trainer.sharded.finish

    def ones():
        for unit in finish():
            for piece in unit.pieces:
                piece.of(unit.gradient_shard).fill_(1)
            yield unit

    trainer.sharded.finish = ones
    return trainer.accumulate(data_of(run), 0).gradient_norm


# Not with words dealt out over tensor ranks: what fills their parts up would count as ones too.
@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[2], LAYOUTS[3], LAYOUTS[5]], ids=str)
def test_the_norm_counts_each_distinct_parameter_once(ranks, layout):
    distinct = sum(p.numel() for p in build(MODEL, device="meta").parameters())
    assert on(ranks, run_of(layout), norm_of_ones) == pytest.approx([math.sqrt(distinct)] * layout.world)


def initials(mesh, run):
    return held(Trainer(run, mesh))


@pytest.mark.parametrize("layout", [LAYOUTS[2], LAYOUTS[4], LAYOUTS[5]], ids=str)
def test_initial_weights_are_the_plain_models_bit_for_bit(ranks, layout):
    run = run_of(layout)
    plain = build(MODEL)
    initialise_(plain, run.seed)
    whole = together(on(ranks, run, initials))
    for name, parameter in plain.named_parameters():
        assert torch.equal(whole[f"model/{name}"], parameter.detach()), name


def records(mesh, run):
    trainer = Trainer(run, mesh)
    return {name: (p.partial, p.counted, p.replicated) for name, p in trainer.sharded.placements.items()}


def test_both_ends_know_a_tied_table_and_the_first_counts_it(ranks):
    first, middle, *_, last = on(ranks, run_of(LAYOUTS[5]), records)
    table = "transformer.wte.weight"
    assert first[table][:2] == ("pp.ends", True) and last[table][:2] == ("pp.ends", False)
    assert table not in middle and "transformer.wpe.weight" not in last
