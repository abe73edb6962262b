"""One step on several ranks, at its edges: nothing valid, not a number, a count of all parameters, replicas, resume."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import poison
from meshwright.comm.mesh import Mesh
from meshwright.model.build import build
from meshwright.model.init import initialise_
from meshwright.model.loss import IGNORE
from meshwright.spec.errors import RunError, UserError
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, LrSchedule, Optimizer, RunSpec
from meshwright.train import checkpoint, manifestfile, state
from meshwright.train.lossscale import FLOOR, GROWTH_INTERVAL, LossScale
from meshwright.train.parts import Part
from meshwright.train.trainer import Trainer
from meshwright.verify.unequal import UnequalData

LLAMA = ModelSpec(family="llama", vocab=37, hidden=16, layers=2, heads=2, ffn=24, max_seq=32, qk_norm=True)
GPT2 = ModelSpec(family="gpt2", vocab=37, hidden=16, layers=2, heads=2, max_seq=32)


def run_of(model: ModelSpec, dp: int, zero: int = 0, join: int = 0, **options: object) -> RunSpec:
    return RunSpec(
        model=model,
        data=Data(seq_len=10),
        batch=Batch(sequences=7, micro=2),
        layout=Layout(dp=dp, zero=zero, zero_join=join),
        lr_schedule=LrSchedule(warmup=0),
        **{"precision": "fp32", **options},
    )


def data_of(run: RunSpec) -> UnequalData:
    return UnequalData(run.model.vocab, run.data.seq_len, run.seed)


def snapshot(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights and moments, whole, by kind and name; collective. The trainer may be dropped behind it."""
    trainer.sharded.settle()
    named = [("model", placement, tensor.clone()) for placement, tensor in trainer.sharded.named_parameters()]
    named += [(kind, placement, tensor.clone()) for placement, kind, tensor in trainer.optimizer.named_moments()]
    return {f"{kind}/{placement.name}": tensor for kind, placement, tensor in named}


def save(trainer: Trainer, folder: Path, step: int = 1, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Save `trainer`, or in its name the whole `tensors`; returns where."""
    trainer.sharded.settle()
    parts = state.saved_parts(trainer)
    if tensors is not None:
        parts = [Part.whole(name, tensor) for name, tensor in tensors.items()]
    saver = checkpoint.Saver(folder, trainer.mesh, parts, keep=9, background=False)
    saver.save(step, state.meta(trainer, step, state.Counts()))
    ended = saver.wait()
    assert ended is not None and ended.error is None
    return ended.where


def restore(trainer: Trainer, where: Path) -> None:
    found = checkpoint.manifest_of(where)
    state.check_fits(trainer, found)
    checkpoint.read(where, state.held_parts(trainer), found)
    state.restored(trainer, found.meta)


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
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_batch_without_a_valid_token(ranks, loss, zero):
    """Loss 0, no gradient, and nothing but the decay of matrices: of the same names at every stage."""
    run = run_of(LLAMA, 2, zero, loss=loss)
    for totals, update, before, after in ranks.run(2, step_without_targets, run):
        assert (totals.loss, totals.tokens, update.grad_norm, update.skipped) == (0.0, 0, 0.0, False)
        for name, tensor in before.items():
            decayed = name.startswith("model/") and tensor.ndim > 1
            factor = 1 - update.lr * run.optimizer.weight_decay if decayed else 1.0
            torch.testing.assert_close(after[name], tensor * factor, rtol=1e-6, atol=0)


def step_with_poison(mesh, run, value, where):
    """One rank's gradient, or its loss, is not finite in the second step of three."""
    trainer = Trainer(run, mesh)

    def spoil():
        if mesh.rank != 1:
            return None
        if where == "gradient":
            return poison.filled(trainer.model.model.norm.weight, value)
        return trainer.model.register_forward_hook(lambda module, args, loss: loss * value)

    return poison.steps(trainer, data_of(run), spoil, snapshot)


@pytest.mark.parametrize("where", ["gradient", "loss"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_one_ranks_bad_number_skips_the_step_on_all(ranks, value, where, zero):
    for history in ranks.run(3, step_with_poison, run_of(LLAMA, 3, zero), value, where):
        assert history == poison.SKIPPED


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
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_norm_counts_each_distinct_parameter_once(ranks, model, dp, zero):
    """Padding is filled with ones here too, and must not count."""
    count = sum(p.numel() for p in build(model, device="meta").parameters())
    for norm in ranks.run(dp, norm_of_ones, run_of(model, dp, zero)):
        assert norm == pytest.approx(math.sqrt(count), rel=1e-6)


def train(mesh, run, steps):
    trainer = Trainer(run, mesh)
    for step in range(steps):
        trainer.update(step, trainer.accumulate(data_of(run), step))
    return snapshot(trainer)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_stay_bitwise_equal(ranks, zero, precision):
    first, *others = ranks.run(3, train, run_of(GPT2, 3, zero, precision=precision), 20)
    for other in others:
        assert all(torch.equal(first[name], tensor) for name, tensor in other.items())


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_initial_weights_are_the_plain_models_bit_for_bit(ranks, dp, zero, precision):
    run = run_of(GPT2, dp, zero, precision=precision)
    plain = build(run.model)
    initialise_(plain, run.seed)
    for found in ranks.run(dp, train, run, 0):
        for name, parameter in plain.named_parameters():
            assert torch.equal(found[f"model/{name}"], parameter)


def save_and_go_on(mesh, run, at, steps, folder):
    trainer = Trainer(run, mesh)
    data = data_of(run)
    for step in range(at):
        trainer.update(step, trainer.accumulate(data, step))
    where = save(trainer, folder, at)
    other = Trainer(run.model_copy(update={"seed": 99}), mesh)
    other.run = run
    restore(other, where)
    for step in range(at, steps):
        other.update(step, other.accumulate(data, step))
    return snapshot(other)


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize(("zero", "precision"), [(0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "fp16")])
def test_a_restored_trainer_goes_on_bit_for_bit(ranks, tmp_path, at, zero, precision):
    run = run_of(LLAMA, 2, zero, precision=precision)
    expected = ranks.run(2, train, run, 5)[0]
    for found in ranks.run(2, save_and_go_on, run, at, 5, tmp_path):
        assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())


def under_another_stage(mesh, run, other, steps, folder):
    """Save under one stage and go on under another."""
    trainer, data = Trainer(run, mesh), data_of(run)
    trainer.update(0, trainer.accumulate(data, 0))
    where = save(trainer, folder)
    after = Trainer(other, mesh)
    restore(after, where)
    for step in range(1, steps):
        after.update(step, after.accumulate(data, step))
    return snapshot(after)


def test_a_checkpoint_fits_other_precisions_with_masters_of_its_dtype(tmp_path):
    trainer = alone(run_of(LLAMA, 1))
    saved, where = snapshot(trainer), save(trainer, tmp_path)
    other = alone(run_of(LLAMA, 1, precision="bf16", seed=2))
    restore(other, where)
    assert all(torch.equal(saved[name], tensor) for name, tensor in snapshot(other).items())
    weight = other.model.get_parameter("model.norm.weight")
    assert torch.equal(weight, saved["model/model.norm.weight"].to(torch.bfloat16))
    with pytest.raises(UserError, match=r"precision=fp32 \(this run: float64\)"):
        restore(alone(run_of(LLAMA, 1, precision="float64")), where)


def test_a_loss_scale_goes_on_only_where_there_was_one(tmp_path):
    wide, half = alone(run_of(LLAMA, 1)), alone(run_of(LLAMA, 1, precision="fp16"))
    half.scale.value, half.scale.good_steps = 8.0, 5
    of_wide, of_half = save(wide, tmp_path, 1), save(half, tmp_path, 2)
    same = LossScale(8.0, True, 5)
    for where, precision, expected in (
        (of_wide, "fp16", LossScale.of("fp16")), (of_half, "fp16", same), (of_half, "bf16", LossScale())
    ):  # fmt: skip
        other = alone(run_of(LLAMA, 1, precision=precision))
        restore(other, where)
        assert other.scale == expected


def test_a_checkpoint_fits_every_stage(ranks, tmp_path):
    run = run_of(GPT2, 2, 3, precision="float64")
    expected = ranks.run(2, train, run, 3)[0]
    for zero in (0, 1, 2):
        other = run_of(GPT2, 2, zero, precision="float64")
        for found in ranks.run(2, under_another_stage, run, other, 3, tmp_path):
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("before", "after"), [(0, 1_000_000), (1_000_000, 0), (2_000, 4_000)])
def test_a_checkpoint_knows_no_units(ranks, tmp_path, zero, before, after):
    one, other = (run_of(GPT2, 3, zero, join, precision="float64") for join in (before, after))
    expected = ranks.run(3, train, one, 3)[0]
    for found in ranks.run(3, under_another_stage, one, other, 3, tmp_path):
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)


def clipped_gradients(mesh, run, clip):
    """What the optimizer is given to divide by, in its first step without moments: Adam's first moment tells."""
    run = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"clip": clip})})
    trainer = Trainer(run, mesh)
    update = trainer.update(0, trainer.accumulate(data_of(run), 0))
    first = {n: t / (1 - run.optimizer.betas[0]) for n, t in snapshot(trainer).items() if n.startswith("exp_avg/")}
    return update.grad_norm, first


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_clipping_at_half_the_norm_halves_every_gradient(ranks, zero):
    run = run_of(LLAMA, 2, zero, precision="float64")
    (norm, whole), _ = ranks.run(2, clipped_gradients, run, None)
    (same, half), _ = ranks.run(2, clipped_gradients, run, norm / 2)
    assert same == pytest.approx(norm, rel=1e-12)
    assert math.sqrt(sum(float(t.square().sum()) for t in half.values())) == pytest.approx(norm / 2, rel=1e-9)
    for name, gradient in whole.items():
        torch.testing.assert_close(half[name], gradient / 2, rtol=1e-9, atol=1e-15)


def overflow(mesh, run):
    """A loss scale that is too large for float16, on one rank's gradients only if need be."""
    trainer = Trainer(run, mesh)
    trainer.scale.value = 2.0**30
    history = []
    for step in range(40):
        before = snapshot(trainer)
        update = trainer.update(step, trainer.accumulate(data_of(run), step))
        changed = any(not torch.equal(before[n], t) for n, t in snapshot(trainer).items())
        history.append((update.skipped, update.overflow, changed, trainer.scale.value))
        if not update.skipped:
            break
    return history, trainer.optimizer.steps


@pytest.mark.parametrize("zero", [0, 3])
def test_an_overflow_lowers_the_scale_on_all_ranks_and_changes_nothing_else(ranks, zero):
    (history, steps), *others = ranks.run(2, overflow, run_of(LLAMA, 2, zero, precision="fp16"))
    assert all(other == (history, steps) for other in others)
    assert steps == 1 and len(history) > 3
    for number, (skipped, lowered, changed, scale) in enumerate(history[:-1], 1):
        assert (skipped, lowered, changed, scale) == (True, True, False, 2.0 ** (30 - number))
    assert history[-1][:3] == (False, False, True)


def norm_at_scale(mesh, run, scale):
    trainer = Trainer(run, mesh)
    trainer.scale.value = scale
    return trainer.update(0, trainer.accumulate(data_of(run), 0)).grad_norm


def test_the_scale_is_taken_out_again():
    run = run_of(LLAMA, 1, precision="fp16")
    one, many = (norm_at_scale(Mesh.single(torch.device("cpu")), run, scale) for scale in (1.0, 128.0))
    assert many == pytest.approx(one, rel=0.01)


def test_a_good_run_of_steps_doubles_the_scale():
    scale = LossScale.of("fp16")
    start = scale.value
    for _ in range(GROWTH_INTERVAL - 1):
        assert not scale.after(finite=True)
    assert scale.value == start
    scale.after(finite=True)
    assert scale.value == 2 * start
    assert scale.after(finite=False)
    assert (scale.value, scale.good_steps) == (start, 0)
    scale.value = FLOOR
    assert not scale.after(finite=False)  # nothing is left to lower: the step is bad in itself
    assert not LossScale.of("bf16").after(finite=False)


def alone(run: RunSpec) -> Trainer:
    return Trainer(run, Mesh.single(torch.device("cpu")))


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path):
    trainer = alone(run_of(LLAMA, 1))
    other = alone(run_of(LLAMA.model_copy(update={"ffn": 40}), 1))
    before = snapshot(trainer)
    with pytest.raises(UserError, match=r"another model: model.ffn=40 \(this run: 24\)"):
        restore(trainer, save(other, tmp_path))
    assert all(torch.equal(before[name], tensor) for name, tensor in snapshot(trainer).items())


@pytest.mark.parametrize("part", ["model", "exp_avg", "exp_avg_sq"])
def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path, part):
    trainer = alone(run_of(LLAMA, 1))
    name = f"{part}/model.norm.weight"
    whole = snapshot(trainer)
    for step, (spoilt, words) in enumerate(
        (
            ({n: t for n, t in whole.items() if n != name}, f"lacks {name}"),
            (whole | {"model/extra": torch.ones(1)}, "unexpected model/extra"),
            (whole | {name: torch.ones(3)}, f"misshapen {name}"),
            (whole | {name: whole[name].double()}, f"misshapen {name}"),
        )
    ):
        with pytest.raises(RunError, match=words):
            restore(trainer, save(trainer, tmp_path, step, spoilt))
    assert all(torch.equal(whole[n], t) for n, t in snapshot(trainer).items())


def test_a_checkpoint_that_no_run_has_written_is_refused(tmp_path):
    trainer = alone(run_of(LLAMA, 1))
    where = save(trainer, tmp_path)
    plain = manifestfile.read(where)
    del plain["meta"]["run"]
    manifestfile.write(where / manifestfile.NAME, plain)
    with pytest.raises(RunError, match="the checkpoint was not written by a run: run: field required"):
        restore(trainer, where)


def evaluate_between(mesh, run):
    trainer = Trainer(run, mesh)
    data = data_of(run)
    losses = []
    for step in range(3):
        trainer.update(step, trainer.accumulate(data, step))
        losses.append(trainer.evaluate(data, torch.arange(100, 105)).loss)
    return losses, snapshot(trainer)


@pytest.mark.parametrize("dp", [2, 7])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_evaluation_is_the_plain_models_and_changes_nothing(ranks, dp, zero):
    model = GPT2.model_copy(update={"resid_dropout": 0.2})
    run = run_of(model, dp, zero, precision="float64")
    trained = ranks.run(dp, train, run, 3)[0]
    plain = build(model, dtype=torch.float64).eval()
    plain.load_state_dict({n: trained[f"model/{n}"] for n, _ in plain.named_parameters()}, strict=False)
    tokens, targets = data_of(run).batch(torch.arange(100, 105))
    expected = float(plain(tokens, targets).detach()) / int((targets != IGNORE).sum())
    for losses, after in ranks.run(dp, evaluate_between, run):
        assert losses[-1] == pytest.approx(expected, rel=1e-12)
        assert all(torch.equal(trained[name], tensor) for name, tensor in after.items())


def broken_off(mesh, run):
    """Forwards of an evaluation that rank 0 is asked to stop, and on how many ranks that was so."""
    trainer, forwards = Trainer(run, mesh), []
    trainer.model.register_forward_hook(lambda *_: forwards.append(1))
    totals = trainer.evaluate(data_of(run), torch.arange(9), stop=lambda: float(mesh.rank == 0))
    return len(forwards), totals.stop


@pytest.mark.parametrize(
    ("fields", "forwards"),
    [
        ({"dp": 2}, [0, 2]),
        ({"dp": 2, "zero": 3}, [3, 3]),
        ({"tp": 2}, [5, 5]),
        ({"cp": 2, "cp_order": "contiguous"}, [5, 5]),
    ],
    ids=str,
)
def test_an_evaluation_is_broken_off_where_nobody_waits_for_the_rank(ranks, fields, forwards):
    """Five sequences for one data rank and four for the other, or nine for both ranks together, two at a time."""
    layout = Layout(**{"dp": 1, **fields})
    run = run_of(LLAMA, 1).model_copy(update={"layout": layout})
    axes = {axis: layout.size(axis) for axis in ("tp", "cp", "dp")}
    assert ranks.run(2, broken_off, run, axes=axes) == [(number, 1.0) for number in forwards]


def test_options_changed_since_a_checkpoint_are_told():
    trainer = alone(run_of(LLAMA, 1))
    about = state.meta(trainer, 1, state.Counts())
    changed = trainer.run.model_copy(update={"optimizer": Optimizer(lr=0.5)})
    assert state.changed_options(changed, about) == ["optimizer.lr: 0.003 → 0.5"]
    assert state.changed_options(trainer.run, about) == []
    joined = trainer.run.model_copy(update={"layout": Layout(dp=1, zero_join=7)})
    assert state.changed_options(joined, about) == ["layout.zero_join: 0 → 7"]


@pytest.mark.parametrize("part", [1, 7, 1000])
def test_gradients_widened_in_parts_update_every_element_once(monkeypatch, part):
    """Parts that end within a segment, at its end and beyond; the kernel rounds the rest of a vector otherwise."""

    def updated() -> dict[str, torch.Tensor]:
        trainer = alone(run_of(LLAMA, 1, precision="bf16", grad_dtype="bf16"))
        for step in range(2):
            trainer.update(step, trainer.accumulate(data_of(trainer.run), step))
        return snapshot(trainer)

    expected = updated()
    monkeypatch.setattr("meshwright.train.optimizer.WIDENED", part)
    for name, tensor in updated().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-5)
