"""Which parameters move together: one unit for each transformer block, the embedding, the head, and tied weights.

A unit is what ZeRO reduces, gathers and frees at once (Zhao et al. 2023 call it an FSDP unit).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from meshwright.parallel.placement import Placement
from meshwright.spec.errors import UserError


@dataclass(frozen=True)
class UnitPlan:
    """The parameters of one unit in the order they lie in its flat buffer: decayed ones first."""

    name: str
    placements: tuple[Placement, ...]
    trainable: bool


def default_units(module: nn.Module, placements: Mapping[str, Placement]) -> dict[str, list[str]]:
    """Public parameter names by unit, units in the order in which forward meets them.

    The repeated blocks are the `nn.ModuleList` or `nn.Sequential` that holds most parameters. What stands before
    them in the module tree is "embedding", what stands after "head"; a weight that is used in two places is a unit
    of its own, "tied".
    """
    blocks = repeated_blocks(module)
    tied: list[str] = []
    before: list[str] = []
    inside: dict[str, list[str]] = {f"blocks.{i}": [] for i in range(len(blocks))}
    after: list[str] = []
    seen_blocks = False
    for placement in placements.values():
        block = next((i for i, prefix in enumerate(blocks) if placement.name.startswith(prefix)), None)
        if len(placement.names) > 1:
            tied.append(placement.name)
        elif block is not None:
            inside[f"blocks.{block}"].append(placement.name)
            seen_blocks = True
        else:
            (after if seen_blocks else before).append(placement.name)
    units = {"tied": tied, "embedding": before, **inside, "head": after}
    return {name: members for name, members in units.items() if members}


def repeated_blocks(module: nn.Module) -> list[str]:
    """Name prefixes ("model.layers.0.") of the repeated blocks; empty where the module has none."""
    best: tuple[int, list[str]] = (0, [])
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child):
            size = sum(p.numel() for p in child.parameters())
            # Strictly more: of a list and a list around it, the outer one is met first and holds as much.
            if size > best[0]:
                prefix = f"{name}." if name else ""
                best = (size, [f"{prefix}{i}." for i, _ in child.named_children()])
    return best[1]


def plan_units(
    module: nn.Module, placements: Mapping[str, Placement], units: Mapping[str, Sequence[str]] | None = None
) -> list[UnitPlan]:
    """Cut the parameters into units; `units` names them by public name where the default does not suit.

    Frozen parameters and parameters of another dtype cannot share a buffer with the rest: they get a unit of their
    own, named after the one they were in. Raises UserError where `units` misses a parameter or names one twice.
    """
    if units is None:
        units = default_units(module, placements)
    _check_cover(placements, units)
    parameters = dict(module.named_parameters())
    plans = []
    for name, members in units.items():
        kinds: dict[tuple[object, bool], list[Placement]] = {}
        for member in members:
            parameter = parameters[member]
            kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append(placements[member])
        for i, ((dtype, trainable), group) in enumerate(kinds.items()):
            suffix = "" if i == 0 else f".{str(dtype).removeprefix('torch.')}{'' if trainable else '.frozen'}"
            ordered = [p for p in group if p.decay] + [p for p in group if not p.decay]
            plans.append(UnitPlan(name + suffix, tuple(ordered), trainable))
    return plans


def _check_cover(placements: Mapping[str, Placement], units: Mapping[str, Sequence[str]]) -> None:
    named = [member for members in units.values() for member in members]
    unknown = sorted(set(named) - set(placements))
    missing = sorted(set(placements) - set(named))
    twice = sorted({n for n in named if named.count(n) > 1})
    for what, names in (("unknown parameters", unknown), ("no unit for", missing), ("in two units", twice)):
        if names:
            raise UserError(f"units: {what} {', '.join(names)}; each parameter of the module must be in one unit")
