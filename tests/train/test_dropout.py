"""Dropout through the trainer: what is computed again drops the same, and a resumed run goes on as it would have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.model.dropout import Dropout, DropoutKey, TorchDropout
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, LrSchedule, RunSpec
from meshwright.train import checkpoint, state
from meshwright.train.trainer import Trainer
from meshwright.verify.unequal import proof_data

MODEL = ModelSpec(
    family="gpt2", vocab=37, hidden=16, layers=3, heads=2, max_seq=32,
    embd_dropout=0.1, attn_dropout=0.2, resid_dropout=0.3,
)  # fmt: skip
WAYS = {
    "counter": {"attention": "explicit"},
    "torch": {"attention": "explicit", "dropout": "torch"},
    "torch, fused": {"attention": "sdpa", "dropout": "torch"},
}
RECOMPUTE = {
    "full": {"recompute": "full"},
    "every 2": {"recompute": "full", "recompute_every": 2},
    "selective": {"recompute": "selective"},
    "keep softmax": {"recompute": "selective", "recompute_keep": ("softmax", "activation")},
}


def run_of(dp: int = 1, layout: dict[str, object] | None = None, **options: object) -> RunSpec:
    return RunSpec(
        model=options.pop("model", MODEL),
        data=Data(seq_len=10),
        batch=Batch(sequences=5, micro=2),
        layout=Layout(dp=dp, **(layout or {})),
        lr_schedule=LrSchedule(warmup=0),
        device="cpu",
        **options,
    )


def alone(run: RunSpec) -> Trainer:
    return Trainer(run, Mesh.single(torch.device("cpu")))


def train(
    mesh: Mesh | None, run: RunSpec, steps: int, save_at: int | None = None, folder: Path | None = None
) -> dict[str, Tensor]:
    """The state after `steps` steps; with `save_at` by way of `folder` and a second trainer that goes on from there."""
    trainer, data = alone(run) if mesh is None else Trainer(run, mesh), proof_data(run)
    for step in range(steps):
        if step == save_at:
            assert folder is not None
            trainer.sharded.settle()
            saver = checkpoint.Saver(folder, trainer.mesh, state.saved_parts(trainer), keep=1, background=False)
            saver.save(step, state.meta(trainer, step, state.Counts()))
            saved = saver.wait()
            assert saved is not None and saved.error is None
            torch.manual_seed(99)  # as another process would find its generator
            trainer = alone(run) if mesh is None else Trainer(run, mesh)
            checkpoint.read(saved.where, state.held_parts(trainer))
            state.restored(trainer, checkpoint.manifest_of(saved.where).meta)
        trainer.update(step, trainer.accumulate(data, step))
    return snapshot(trainer)


def snapshot(trainer: Trainer) -> dict[str, Tensor]:
    named = [("model", placement, tensor.clone()) for placement, tensor in trainer.sharded.named_parameters()]
    named += [(kind, placement, tensor.clone()) for placement, kind, tensor in trainer.optimizer.named_moments()]
    return {f"{kind}/{placement.name}": tensor for kind, placement, tensor in named}


def same(these: dict[str, Tensor], those: dict[str, Tensor]) -> bool:
    return all(torch.equal(these[name], tensor) for name, tensor in those.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("way", WAYS)
def test_recompute_changes_no_bit(way: str, recompute: str, precision: str) -> None:
    plain = train(None, run_of(precision=precision, **WAYS[way]), 2)
    again = train(None, run_of(layout=RECOMPUTE[recompute], precision=precision, **WAYS[way]), 2)
    assert same(plain, again)


def test_recompute_that_does_not_set_generators_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: drawn on from where the generator is, masks are others."""
    plain = train(None, run_of(**WAYS["torch"]), 1)
    monkeypatch.setattr("meshwright.parallel.recompute._Rng.again", lambda self: torch.random.fork_rng(devices=[]))
    assert not same(plain, train(None, run_of(layout=RECOMPUTE["full"], **WAYS["torch"]), 1))


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_drops_what_it_would_have(ranks, tmp_path: Path, way: str, zero: int) -> None:
    run = run_of(dp=2, layout={"zero": zero}, **WAYS[way])
    for whole, resumed in zip(ranks.run(2, train, run, 4), ranks.run(2, train, run, 4, 2, tmp_path), strict=True):
        assert same(whole, resumed)


class Watched:
    """Every mask of the first residual dropout of a run, as one bool tensor a micro-batch."""

    def __init__(self, trainer: Trainer) -> None:
        self.masks: list[Tensor] = []
        trainer.model.blocks[0].attn_dropout.register_forward_hook(self._see)

    def _see(self, module: Dropout | TorchDropout, args: tuple[Tensor, DropoutKey | None], out: Tensor) -> None:
        self.masks.append((out == 0) & (args[0] != 0))


def masks(mesh: Mesh, run: RunSpec, steps: int) -> list[Tensor]:
    trainer, data = Trainer(run, mesh), proof_data(run)
    watched = Watched(trainer)
    for step in range(steps):
        trainer.accumulate(data, step)
    return watched.masks


@pytest.mark.parametrize("dropout", ["counter", "torch"])
def test_steps_ranks_and_micro_batches_have_masks_of_their_own(ranks, dropout: str) -> None:
    """Two ranks, each with two micro-batches of two sequences in each of two steps."""
    run = run_of(dp=2, attention="explicit", dropout=dropout, layout={"zero": 1})
    run = run.model_copy(update={"batch": Batch(sequences=8, micro=2)})
    found = [mask for each in ranks.run(2, masks, run, 2) for mask in each]
    assert len(found) == 8
    for index, mask in enumerate(found):
        assert 0.2 < mask.float().mean() < 0.4
        assert not any(torch.equal(mask, other) for other in found[:index])


@pytest.mark.parametrize("micro", [1, 2, 5])
@pytest.mark.parametrize("dp", [1, 3])
def test_counted_masks_are_the_same_however_the_batch_is_dealt(ranks, dp: int, micro: int) -> None:
    run = run_of(attention="explicit")
    (whole,) = masks(Mesh.single(torch.device("cpu")), with_batch(run, 1, 5), 1)
    dealt = torch.cat([mask for each in ranks.run(dp, masks, with_batch(run, dp, micro), 1) for mask in each])
    assert torch.equal(whole, dealt)


def with_batch(run: RunSpec, dp: int, micro: int) -> RunSpec:
    return run.model_copy(update={"batch": Batch(sequences=5, micro=micro), "layout": Layout(dp=dp)})


def test_the_same_seed_gives_the_same_run_and_another_another() -> None:
    runs: Iterator[RunSpec] = (run_of(seed=seed, model=MODEL, **WAYS["torch, fused"]) for seed in (1, 1, 2))
    first, again, other = (train(None, run, 1) for run in runs)
    assert same(first, again) and not same(first, other)
