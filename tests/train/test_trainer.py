"""One step on several ranks, at its edges: nothing valid, not a number, a count of all parameters, replicas, resume."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.model.build import build
from meshwright.model.init import initialise_
from meshwright.model.loss import IGNORE
from meshwright.spec.errors import RunError, UserError
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, LrSchedule, Optimizer, RunSpec
from meshwright.train import state
from meshwright.train.trainer import Trainer
from meshwright.verify.unequal import UnequalData

LLAMA = ModelSpec(family="llama", vocab=37, hidden=16, layers=2, heads=2, ffn=24, max_seq=32, qk_norm=True)
GPT2 = ModelSpec(family="gpt2", vocab=37, hidden=16, layers=2, heads=2, max_seq=32)


def run_of(model: ModelSpec, dp: int, **options: object) -> RunSpec:
    return RunSpec(
        model=model,
        data=Data(seq_len=10),
        batch=Batch(sequences=7, micro=2),
        layout=Layout(dp=dp),
        lr_schedule=LrSchedule(warmup=0),
        **{"precision": "fp32", **options},
    )


def data_of(run: RunSpec) -> UnequalData:
    return UnequalData(run.model.vocab, run.data.seq_len, run.seed)


def snapshot(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.tensors(trainer).items()}


class Silent(UnequalData):
    """No valid target in the whole batch."""

    def batch(self, ids):
        tokens, targets = super().batch(ids)
        return tokens, torch.full_like(targets, IGNORE)


def step_without_targets(mesh, run):
    trainer = Trainer(run, mesh)
    before = snapshot(trainer)
    totals = trainer.accumulate(Silent(run.model.vocab, run.data.seq_len, 0), 0)
    update = trainer.update(0, totals)
    return totals, update, before, snapshot(trainer)


@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_a_batch_without_a_valid_token(ranks, loss):
    """Loss 0, no gradient, and nothing but the decay of matrices."""
    run = run_of(LLAMA, 2, loss=loss)
    for totals, update, before, after in ranks.run(2, step_without_targets, run):
        assert (totals.loss, totals.tokens, update.grad_norm, update.skipped) == (0.0, 0, 0.0, False)
        for name, tensor in before.items():
            decayed = name.startswith("model/") and tensor.ndim > 1
            factor = 1 - update.lr * run.optimizer.weight_decay if decayed else 1.0
            torch.testing.assert_close(after[name], tensor * factor, rtol=1e-6, atol=0)


def step_with_poison(mesh, run, value, where):
    """One rank's gradient, or its loss, is not finite in the second step of three."""
    trainer = Trainer(run, mesh)
    data = data_of(run)
    history = []
    for step in range(3):
        handle = None
        if step == 1 and mesh.rank == 1:
            if where == "gradient":
                weight = trainer.model.model.norm.weight
                handle = weight.register_hook(lambda gradient: torch.full_like(gradient, value))
            else:
                handle = trainer.model.register_forward_hook(lambda module, args, loss: loss * value)
        before = snapshot(trainer)
        update = trainer.update(step, trainer.accumulate(data, step))
        changed = any(not torch.equal(before[n], t) for n, t in snapshot(trainer).items())
        history.append((update.skipped, changed, trainer.optimizer.steps))
        if handle:
            handle.remove()
    return history


@pytest.mark.parametrize("where", ["gradient", "loss"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_ranks_bad_number_skips_the_step_on_all(ranks, value, where):
    for history in ranks.run(3, step_with_poison, run_of(LLAMA, 3), value, where):
        assert history == [(False, True, 1), (True, False, 1), (False, True, 2)]


def norm_of_ones(mesh, run):
    trainer = Trainer(run, mesh)
    finish = trainer.sharded.finish

    def ones():
        for unit in finish():
            unit.gradient_shard.fill_(1.0)
            yield unit

    trainer.sharded.finish = ones
    return trainer.accumulate(data_of(run), 0).gradient_norm


@pytest.mark.parametrize("model", [LLAMA, GPT2, LLAMA.model_copy(update={"tied": True})], ids=["llama", "gpt2", "tied"])
@pytest.mark.parametrize("dp", [1, 3])
def test_the_norm_counts_each_distinct_parameter_once(ranks, model, dp):
    count = sum(p.numel() for p in build(model, device="meta").parameters())
    for norm in ranks.run(dp, norm_of_ones, run_of(model, dp)):
        assert norm == pytest.approx(math.sqrt(count), rel=1e-6)


def train(mesh, run, steps):
    trainer = Trainer(run, mesh)
    for step in range(steps):
        trainer.update(step, trainer.accumulate(data_of(run), step))
    return snapshot(trainer)


def test_replicas_stay_bitwise_equal(ranks):
    first, *others = ranks.run(3, train, run_of(GPT2, 3), 20)
    for other in others:
        assert all(torch.equal(first[name], tensor) for name, tensor in other.items())


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_initial_weights_are_the_plain_models_bit_for_bit(ranks, dp):
    run = run_of(GPT2, dp)
    plain = build(run.model)
    initialise_(plain, run.seed)
    for found in ranks.run(dp, train, run, 0):
        for name, parameter in plain.named_parameters():
            assert torch.equal(found[f"model/{name}"], parameter)


def save_and_go_on(mesh, run, at, steps):
    trainer = Trainer(run, mesh)
    data = data_of(run)
    for step in range(at):
        trainer.update(step, trainer.accumulate(data, step))
    saved, about = snapshot(trainer), state.meta(trainer, at, state.Counts())
    other = Trainer(run.model_copy(update={"seed": 99}), mesh)
    other.run = run
    state.restore(other, saved, about)
    for step in range(at, steps):
        other.update(step, other.accumulate(data, step))
    return snapshot(other)


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_restored_trainer_goes_on_bit_for_bit(ranks, at):
    run = run_of(LLAMA, 2)
    expected = ranks.run(2, train, run, 5)[0]
    for found in ranks.run(2, save_and_go_on, run, at, 5):
        assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())


def alone(run: RunSpec) -> Trainer:
    return Trainer(run, Mesh.single(torch.device("cpu")))


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing():
    trainer = alone(run_of(LLAMA, 1))
    other = alone(run_of(LLAMA.model_copy(update={"ffn": 40}), 1))
    before = snapshot(trainer)
    with pytest.raises(UserError, match=r"another model: model.ffn=40 \(this run: 24\)"):
        state.restore(trainer, state.tensors(other), state.meta(other, 1, state.Counts()))
    assert all(torch.equal(before[name], tensor) for name, tensor in state.tensors(trainer).items())


@pytest.mark.parametrize("part", ["model", "exp_avg", "exp_avg_sq"])
def test_missing_unexpected_and_misshapen_tensors_are_named(part):
    trainer = alone(run_of(LLAMA, 1))
    about = state.meta(trainer, 1, state.Counts())
    name = f"{part}/model.norm.weight"
    whole = snapshot(trainer)
    for spoilt, words in (
        ({n: t for n, t in whole.items() if n != name}, f"lacks {name}"),
        (whole | {"model/extra": torch.ones(1)}, "unexpected model/extra"),
        (whole | {name: torch.ones(3)}, f"misshapen {name}"),
        (whole | {name: whole[name].double()}, f"misshapen {name}"),
    ):
        with pytest.raises(RunError, match=words):
            state.restore(trainer, spoilt, about)
    assert all(torch.equal(whole[n], t) for n, t in state.tensors(trainer).items())


def evaluate_between(mesh, run):
    trainer = Trainer(run, mesh)
    data = data_of(run)
    losses = []
    for step in range(3):
        trainer.update(step, trainer.accumulate(data, step))
        losses.append(trainer.evaluate(data, torch.arange(100, 105)).loss)
    return losses, snapshot(trainer)


@pytest.mark.parametrize("dp", [2, 7])
def test_evaluation_is_the_plain_models_and_changes_nothing(ranks, dp):
    model = GPT2.model_copy(update={"resid_dropout": 0.2})
    run = run_of(model, dp, precision="float64")
    trained = ranks.run(dp, train, run, 3)[0]
    plain = build(model, dtype=torch.float64).eval()
    plain.load_state_dict({n: trained[f"model/{n}"] for n, _ in plain.named_parameters()}, strict=False)
    tokens, targets = data_of(run).batch(torch.arange(100, 105))
    expected = float(plain(tokens, targets).detach()) / int((targets != IGNORE).sum())
    for losses, after in ranks.run(dp, evaluate_between, run):
        assert losses[-1] == pytest.approx(expected, rel=1e-12)
        assert all(torch.equal(trained[name], tensor) for name, tensor in after.items())


def test_options_changed_since_a_checkpoint_are_told():
    trainer = alone(run_of(LLAMA, 1))
    about = state.meta(trainer, 1, state.Counts())
    changed = trainer.run.model_copy(update={"optimizer": Optimizer(lr=0.5)})
    assert state.changed_options(changed, about) == ["optimizer.lr: 0.003 → 0.5"]
    assert state.changed_options(trainer.run, about) == []
