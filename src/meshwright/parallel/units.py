"""Which parameters move together: one unit for each transformer block, the embedding, the head, and tied weights.

A unit is what ZeRO reduces, gathers and frees at once (Zhao et al. 2023 call it an FSDP unit). At stages 0 and 1,
where nothing is freed, small neighbours are joined, as DistributedDataParallel's buckets are filled (Li et al. 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from meshwright.parallel.placement import Placement
from meshwright.spec.errors import UserError
from meshwright.spec.joining import joined


@dataclass(frozen=True)
class UnitPlan:
    """The parameters of one unit in the order they lie in its flat buffer: decayed ones first.

    parts: the same parameters by the unit that each was in before units were joined.
    """

    name: str
    placements: tuple[Placement, ...]
    trainable: bool
    parts: tuple[tuple[Placement, ...], ...]


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
    module: nn.Module,
    placements: Mapping[str, Placement],
    units: Mapping[str, Sequence[str]] | None = None,
    join: int = 0,
) -> list[UnitPlan]:
    """Cut the parameters into units; `units` names them by public name where the default does not suit.

    Default units are joined until they hold `join` parameters that train (see spec/joining.py), except a tied weight;
    units that are named are left as they are. Frozen parameters and parameters of another dtype cannot share a buffer
    with the rest: they get a unit of their own, named after the one they were in. Raises UserError where `units` misses
    a parameter or names one twice.
    """
    groups: dict[str, tuple[str, ...]]
    if units is None:
        units = default_units(module, placements)
        groups = _join(module, placements, units, join)
    else:
        groups = {name: (name,) for name in units}
    _check_cover(placements, units)
    parameters = dict(module.named_parameters())
    plans = []
    for name, parts in groups.items():
        kinds: dict[tuple[object, bool], dict[str, list[Placement]]] = {}
        for part in parts:
            for member in units[part]:
                kind = parameters[member].dtype, parameters[member].requires_grad
                kinds.setdefault(kind, {}).setdefault(part, []).append(placements[member])
        for i, ((dtype, trainable), split) in enumerate(kinds.items()):
            suffix = "" if i == 0 else f".{str(dtype).removeprefix('torch.')}{'' if trainable else '.frozen'}"
            ordered = sorted((p for part in split.values() for p in part), key=lambda p: not p.decay)
            plans.append(UnitPlan(name + suffix, tuple(ordered), trainable, tuple(map(tuple, split.values()))))
    return plans


def _join(
    module: nn.Module, placements: Mapping[str, Placement], units: Mapping[str, Sequence[str]], join: int
) -> dict[str, tuple[str, ...]]:
    """The units by the name of the one they are joined to; a frozen parameter is sent nowhere and counts nothing."""
    trained = {name: placements[name].local_numel for name, p in module.named_parameters() if p.requires_grad}
    sizes = [(name, sum(trained.get(member, 0) for member in members)) for name, members in units.items()]
    tied = {name for name, members in units.items() if any(len(placements[member].names) > 1 for member in members)}
    return joined(sizes, join, alone=tied)


def _check_cover(placements: Mapping[str, Placement], units: Mapping[str, Sequence[str]]) -> None:
    named = [member for members in units.values() for member in members]
    unknown = sorted(set(named) - set(placements))
    missing = sorted(set(placements) - set(named))
    twice = sorted({n for n in named if named.count(n) > 1})
    for what, names in (("unknown parameters", unknown), ("no unit for", missing), ("in two units", twice)):
        if names:
            raise UserError(f"units: {what} {', '.join(names)}; each parameter of the module must be in one unit")
