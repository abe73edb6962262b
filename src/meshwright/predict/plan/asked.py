"""Fields of a layout as they are asked for on the command line: tp=8,pp=4,zero=1."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from meshwright.predict.plan.space import Space
from meshwright.spec.cluster import Cluster
from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec
from meshwright.spec.words import join, near

ALIASES = {"schedule": "pp_schedule", "chunks": "pp_chunks", "method": "cp_method", "keep": "recompute_keep"}
LISTS = {"recompute_keep": "+", "order": "+"}
FLAGS = {"true": True, "false": False}


def fields(text: str, option: str, run: RunSpec, cluster: Cluster) -> dict[str, Any]:
    """The fields of `text`, each of which some layout of `run` on `cluster` has. Raises UserError."""
    found = dict(_field(part.strip(), option) for part in text.split(",") if part.strip())
    if next(Space(run, cluster, found).grids(), None) is None:
        raise UserError(f"command line: {option} {text}: {_reason(found, run, cluster)}")
    return found


def _field(part: str, option: str) -> tuple[str, Any]:
    name, equals, value = part.partition("=")
    name = ALIASES.get(name, name)
    if not equals or name not in Space.FIELDS:
        hint = near(name, Space.FIELDS)
        raise UserError(
            f"command line: {option} {part}: no field of a layout; there are {join(Space.FIELDS, 'and')}{hint}"
        )
    if name in LISTS:
        return name, tuple(value.split(LISTS[name]))
    if value in FLAGS:
        return name, FLAGS[value]
    if value in ("null", "none") and name == "zero_shard":
        return name, None
    return name, int(value) if value.isdigit() else value


def _reason(found: dict[str, Any], run: RunSpec, cluster: Cluster) -> str:
    """Why no layout has these fields."""
    layout = {name: value for name, value in found.items() if name != "micro"}
    try:
        made = Layout.model_validate(layout).resolve(cluster.devices)
        RunSpec.model_validate(run.model_dump() | {"layout": made})
    except ValidationError as error:
        return error.errors()[0]["msg"].removeprefix("Value error, ")
    except UserError as error:
        return str(error).removeprefix("layout: ")
    return f"no layout on {cluster.devices} devices has these together"
