"""What one rank, or the reference, computed: the material that a proof compares. Written and read without pickle."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.spec.traffic import TrafficKey, TrafficRow
from meshwright.verify.activations import Kept

KINDS = ("gradient", "exp_avg", "exp_avg_sq", "parameter")
"""In the order in which a step computes them."""


@dataclass
class Evidence:
    """Per step (index 0 is the first) loss, valid tokens and gradient norm before clipping; tensors by kind.

    `tensors` maps "kind/step/name" to a copy of the tensor after that step ("parameter/0/…" is before the first;
    gradients are before clipping, divided by the valid tokens). `traffic` holds the ledger's rows of each step,
    `states` bytes held by category after the last step, `undeclared` what is held in no category, `activations` what
    the forward of the largest micro-batch keeps for backward.
    """

    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    traffic: list[list[TrafficRow]] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)
    undeclared: list[str] = field(default_factory=list)
    activations: list[Kept] = field(default_factory=list)

    def keep(self, kind: str, step: int, name: str, tensor: Tensor) -> None:
        self.tensors[f"{kind}/{step}/{name}"] = tensor.detach().cpu().clone().contiguous()

    def save(self, folder: Path, rank: int) -> None:
        save_file(self.tensors, folder / f"rank-{rank}.safetensors")
        rest = {
            "losses": self.losses,
            "tokens": self.tokens,
            "norms": self.norms,
            "traffic": [[asdict(row) for row in rows] for rows in self.traffic],
            "states": self.states,
            "undeclared": self.undeclared,
            "activations": [asdict(kept) for kept in self.activations],
        }
        (folder / f"rank-{rank}.json").write_text(json.dumps(rest))

    @classmethod
    def load(cls, folder: Path, rank: int) -> Evidence:
        rest = json.loads((folder / f"rank-{rank}.json").read_text())
        traffic = [
            [TrafficRow(TrafficKey(**row["key"]), row["count"], row["payload"], row["wire"]) for row in rows]
            for rows in rest.pop("traffic")
        ]
        activations = [Kept(**kept) for kept in rest.pop("activations")]
        tensors = load_file(folder / f"rank-{rank}.safetensors")
        return cls(tensors=tensors, traffic=traffic, activations=activations, **rest)
