"""A trainer's whole state as named tensors, and back: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from meshwright.parallel.flat import Piece
from meshwright.spec.errors import RunError, UserError
from meshwright.spec.run import RunSpec
from meshwright.train.optimizer import MOMENTS
from meshwright.train.trainer import Trainer


def tensors(trainer: Trainer, keep: bool = True) -> dict[str, Tensor]:
    """Parameters as "model/NAME", moments as "exp_avg/NAME" and "exp_avg_sq/NAME", by public name.

    Parameters are the master weights. Above ZeRO 0 it is collective, and whole tensors are copies on the CPU; a rank
    that passes keep=False takes part and gets none. At ZeRO 0 they are views.
    """
    kept: dict[str, Tensor] = {}

    def add(name: str, whole: Tensor) -> None:
        if keep:
            kept[name] = whole if trainer.sharded.stage == 0 else whole.to("cpu", copy=True)

    for placement, parameter in trainer.sharded.named_parameters():
        add(f"model/{placement.name}", parameter)
    for placement, kind, moment in trainer.optimizer.named_moments():
        add(f"{kind}/{placement.name}", moment)
    return kept


@dataclass
class Counts:
    """What a run has counted up to a step. Checkpoints carry it, so that a run that goes on counts on."""

    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> Self:
        """Those of a checkpoint's `meta`; what it does not carry counts as 0."""
        return cls(**{field.name: int(about.get(field.name, 0)) for field in fields(cls)})


def meta(trainer: Trainer, step: int, counts: Counts) -> dict[str, Any]:
    """What goes with the tensors: steps done, what was counted, updates made, and the whole resolved run."""
    return {
        "step": step,
        **asdict(counts),
        "updates": trainer.optimizer.steps,
        "loss_scale": [trainer.scale.value, trainer.scale.good_steps],
        "run": trainer.run.model_dump(mode="json"),
    }


def restore(trainer: Trainer, saved: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Copy a checkpoint's tensors into `trainer`. Nothing is changed before all of them are known to fit.

    Raises UserError for a checkpoint of another model, RunError for missing, unexpected or misshapen tensors.
    """
    check_same_model(trainer.run, about)
    wanted = _wanted(trainer)
    missing, unexpected = sorted(set(wanted) - set(saved)), sorted(set(saved) - set(wanted))
    misshapen = [
        f"{name} is {tuple(saved[name].shape)} {saved[name].dtype}, needed {shape} {dtype}"
        for name, (shape, dtype) in wanted.items()
        if name in saved and (saved[name].shape != shape or saved[name].dtype != dtype)
    ]
    for what, names in (("lacks", missing), ("has unexpected", unexpected), ("has misshapen", misshapen)):
        if names:
            raise RunError(f"checkpoint {what} {'; '.join(names[:5])}{' …' if len(names) > 5 else ''}")

    def run_of(kind: str, piece: Piece) -> Tensor:
        return saved[f"{kind}/{piece.placement.name}"].flatten()[piece.start : piece.stop]

    trainer.sharded.fill(lambda piece, local: local.copy_(run_of("model", piece)))
    for piece, kind, local in trainer.optimizer.pieces():
        local.copy_(run_of(kind, piece))
    trainer.optimizer.set_steps(about["updates"])
    if trainer.scale.dynamic and about["run"]["precision"] == trainer.run.precision:
        trainer.scale.value, trainer.scale.good_steps = about["loss_scale"]


def check_same_model(run: RunSpec, about: Mapping[str, Any]) -> None:
    """Raise UserError where the checkpoint's model or precision is not the run's, naming what differs."""
    ours = run.model_dump(mode="json")
    theirs = about["run"]
    differ = [
        f"model.{field}={theirs['model'].get(field)} (this run: {value})"
        for field, value in ours["model"].items()
        if theirs["model"].get(field) != value
    ]
    # Of the others each has float32 master weights and moments.
    if (theirs["precision"] == "float64") != (ours["precision"] == "float64"):
        differ.append(f"precision={theirs['precision']} (this run: {ours['precision']})")
    if differ:
        raise UserError(
            f"out: {run.out} holds a checkpoint of another model: {'; '.join(differ)}; "
            "use another out folder, or checkpoint.resume=never"
        )


def changed_options(run: RunSpec, about: Mapping[str, Any]) -> list[str]:
    """Options other than the model that this run sets otherwise than the run that was saved, in words."""
    ours, theirs = _flat(run.model_dump(mode="json")), _flat(dict(about["run"]))
    ignored = ("model.", "out", "checkpoint.", "device")
    return [
        f"{name}: {theirs.get(name)} → {value}"
        for name, value in ours.items()
        if theirs.get(name) != value and not name.startswith(ignored)
    ]


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _wanted(trainer: Trainer) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor that this trainer's checkpoint holds, by name."""
    wanted = {}
    for unit in trainer.sharded.units:
        for kind in ("model", *(MOMENTS if unit.trainable else ())):
            for member in unit.members:
                wanted[f"{kind}/{member.placement.name}"] = (member.placement.shape, unit.master.dtype)
    return wanted
