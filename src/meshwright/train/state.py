"""A trainer's whole state as parts of named tensors, and back: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from meshwright.model.build import DTYPES
from meshwright.parallel.flat import Unit
from meshwright.predict.params import tensors
from meshwright.spec.errors import RunError, UserError
from meshwright.spec.run import RunSpec
from meshwright.train import manifestfile
from meshwright.train.manifest import Manifest
from meshwright.train.optimizer import MOMENTS
from meshwright.train.parts import Part, clipped, parts_of
from meshwright.train.trainer import Trainer


def saved_parts(trainer: Trainer) -> list[Part]:
    """What this rank writes: of each of its shards the part that falls to it among the ranks that hold the same.

    Parameters are the master weights, as "model/NAME"; moments are "exp_avg/NAME" and "exp_avg_sq/NAME".
    """
    copies, which = trainer.sharded.copies
    found: list[Part] = []
    for unit, shards in _shards(trainer):
        length = unit.parameter_shard.numel()
        counted = (piece for piece in unit.pieces if piece.placement.counted)
        mine = clipped(counted, length * which // copies, length * (which + 1) // copies)
        found += [part for piece in mine for kind, shard in shards.items() for part in parts_of(kind, piece, shard)]
    return found


def held_parts(trainer: Trainer) -> list[Part]:
    """What this rank must read: all of its shards."""
    return [
        part
        for unit, shards in _shards(trainer)
        for piece in unit.pieces
        for kind, shard in shards.items()
        for part in parts_of(kind, piece, shard)
    ]


def _shards(trainer: Trainer) -> Iterator[tuple[Unit, dict[str, Tensor]]]:
    """Each unit, and by kind what is saved of its shard."""
    moments = trainer.optimizer.shards()
    for unit in trainer.sharded.units:
        yield unit, {"model": unit.master, **moments.get(unit, {})}


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


def check_fits(trainer: Trainer, saved: Manifest) -> None:
    """Raise UserError for a checkpoint of another model, RunError for missing, unexpected or misshapen tensors,
    and for one that no run has written."""
    manifestfile.check_meta(saved.meta)
    check_same_model(trainer.run, saved.meta)
    wanted = _wanted(trainer)
    missing, unexpected = sorted(wanted.keys() - saved.tensors.keys()), sorted(saved.tensors.keys() - wanted.keys())
    misshapen = [
        f"{name} is {entry.shape} {entry.dtype}, needed {wanted[name][0]} {wanted[name][1]}"
        for name, entry in saved.tensors.items()
        if name in wanted and (entry.shape, entry.dtype) != wanted[name]
    ]
    for what, names in (("lacks", missing), ("has unexpected", unexpected), ("has misshapen", misshapen)):
        if names:
            raise RunError(f"checkpoint {what} {'; '.join(names[:5])}{' …' if len(names) > 5 else ''}")


def restored(trainer: Trainer, about: Mapping[str, Any]) -> None:
    """Go on from what has been read into `held_parts`: let all ranks have the weights, and set what was counted."""
    trainer.sharded.fill(lambda piece, local: None)
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
    ignored = ("model.", "out", "checkpoint.", "device", "trace")
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
    """Shape and dtype of every tensor of the run's checkpoints, by name; of a pipeline this rank has some of them."""
    run = trainer.run
    master = torch.promote_types(DTYPES[run.precision], torch.float32)
    return {f"{kind}/{each.name}": (each.shape, master) for kind in ("model", *MOMENTS) for each in tensors(run.model)}
