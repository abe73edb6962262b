"""Clusters as they are written: a name such as 8x8xh100, or a YAML file; and back to YAML.

A file has the fields of `Cluster`. Its device may be a known one's name, or fields over a `preset`; links and software
are then those of such nodes, where the file does not say otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.spec.cluster import Cluster, Device
from meshwright.spec.devices import Kind, cluster, kind, of
from meshwright.spec.errors import UserError
from meshwright.spec.form import Form, told, told_together
from meshwright.spec.words import show
from meshwright.spec.written import Mistakes, Node, dump, read

PRESET = "preset"
CLUSTER = Form(Cluster, "a cluster", {Device: (PRESET,)})


def load_cluster(text: str, folder: Path | None = None) -> Cluster:
    """The cluster that `text` names: nodes × devices × kind, or a YAML file, relative to `folder`. Raises UserError."""
    file = (folder or Path()) / Path(text).expanduser()
    if not (text.endswith((".yaml", ".yml")) or "/" in text or file.is_file()):
        return cluster(text)
    with told_together():
        root = read(file, "cluster file")
        mistakes = CLUSTER.unknown(root)
        if mistakes:
            raise Mistakes(*mistakes)
        return _validated(root, file)


def _validated(root: Node, file: Path) -> Cluster:
    plain = CLUSTER.plain(root)
    try:
        if "device" in plain:
            plain = _composed(root.value["device"], plain)
        return Cluster.model_validate(plain, strict=True)
    except ValidationError as error:
        lines = dict.fromkeys(CLUSTER.explain(root, each) for each in error.errors(include_url=False))
        raise Mistakes(*(line if line.startswith(str(file)) else f"{file}: {line}" for line in lines)) from None


def _composed(node: Node, plain: dict[str, Any]) -> dict[str, Any]:
    """`plain`, with what its device's preset says below what is written."""
    named = node.value.get(PRESET) if node.is_section else node
    if named is None:
        return plain
    found = _kind(named)
    device = found.device.model_dump(exclude_none=True)
    if node.is_section:
        written = {name: value for name, value in plain["device"].items() if name != PRESET}
        if isinstance(written.get("flops"), dict):
            written["flops"] = device["flops"] | written["flops"]
        device |= written
    plain = {"stack": found.stack} | plain | {"device": device}
    nodes, per_node = plain.get("nodes", 1), plain.get("per_node", 1)
    if "links" not in plain and all(isinstance(count, int) and count > 0 for count in (nodes, per_node)):
        plain["links"] = of(found, nodes, per_node).links
    return plain


def _kind(node: Node) -> Kind:
    if not isinstance(node.value, str):
        raise Mistakes(f"{told(node, 'device')}: {show(node.plain())} is not a device's name or a section of fields")
    try:
        return kind(node.value)
    except UserError as error:
        raise Mistakes(f"{told(node, 'device')}: {error}") from None


def dump_cluster(cluster: Cluster) -> str:
    """`cluster` as YAML; `load_cluster` reads an equal one from it."""
    return dump(cluster.model_dump(mode="json", exclude_none=True))
