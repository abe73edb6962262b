"""What was written, held against the fields of a file: names that nobody knows and values that do not fit, in words.

A run file and a cluster file are each a `Form`: the pydantic model whose fields it has.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from meshwright.spec.errors import UserError
from meshwright.spec.words import (
    LATER_FIELDS,
    LATER_VALUES,
    expected,
    item_of,
    items_of,
    join,
    meant,
    meant_value,
    not_yet,
    paths,
    section_of,
    show,
    unit_of,
)
from meshwright.spec.written import Mistakes, Node

COMMAND_LINE = "command line"
Path = tuple[str | int, ...]
"""Names of sections and fields from the top, and places in lists between them."""


@contextlib.contextmanager
def told_together() -> Iterator[None]:
    """Turn Mistakes into one UserError."""
    try:
        yield
    except Mistakes as found:
        if len(found.lines) == 1:
            raise UserError(found.lines[0]) from None
        raise UserError("\n  ".join([f"{len(found.lines)} mistakes:", *found.lines])) from None


def told(node: Node, name: str) -> str:
    """Where and what: "run.yaml line 7: optimizer.lr", or the override as it was typed."""
    return node.where if node.where.startswith(COMMAND_LINE) else f"{node.where}: {name}"


def dotted(path: Path) -> str:
    """ "links[1].latency"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


@dataclass(frozen=True)
class Form:
    """The fields that a file may have.

    model: the whole; what: it in words, "a run". extra: names that a section takes beside its fields.
    """

    model: type[BaseModel]
    what: str
    extra: Mapping[type[BaseModel], tuple[str, ...]] = field(default_factory=dict)

    # -- unknown fields -----------------------------------------------------------------------------------------------

    def unknown(self, root: Node) -> list[str]:
        """What to tell of names in `root` that are no field's."""
        return self._unknown(root, self.model, ())

    def _unknown(self, node: Node, model: type[BaseModel], above: Path) -> list[str]:
        if not node.is_section:
            return []
        mistakes = []
        for name, below in node.value.items():
            info = model.model_fields.get(name)
            path = (*above, name)
            if info is None:
                mistakes += [] if name in self.extra.get(model, ()) else [self._no_field(below, model, path)]
            elif section := section_of(info.annotation):
                mistakes += self._unknown(below, section, path)
            elif (item := items_of(info.annotation)) and isinstance(below.value, list):
                for place, each in enumerate(below.value):
                    mistakes += self._unknown(each, item, (*path, place))
        return mistakes

    def _no_field(self, node: Node, model: type[BaseModel], path: Path) -> str:
        name = dotted(path)
        if name in LATER_FIELDS:
            return f"{told(node, name)}: {name} is not available yet; {LATER_FIELDS[name]}"
        return f"{told(node, name)}: no such field; {self._hint(node, model, path)}"

    def _hint(self, node: Node, model: type[BaseModel], path: Path) -> str:
        known = dict(paths(self.model))
        above, name = dotted(path[:-1]), str(path[-1])
        right = meant(self.model, re.sub(r"\[\d+\]", "", above), name)
        if node.is_section and len(node.value) == 1:  # a misspelt section of one field: name that field
            (leaf,) = node.value
            right = [f"{path}.{leaf}" if f"{path}.{leaf}" in known else path for path in right]
        if right == [dotted(path)]:  # only a file can hold a dotted name
            *sections, leaf = right[0].split(".")
            return f"write it as {'{'.join(f'{section}: ' for section in sections)}{{{leaf}: …{'}' * len(sections)}"
        if right:
            return f"did you mean {join(right)}?"
        there = [*model.model_fields, *self.extra.get(model, ())]
        return f"{above or self.what} has {', '.join(there)}"

    # -- values -------------------------------------------------------------------------------------------------------

    def plain(self, node: Node, model: type[BaseModel] | None = None, above: Path = ()) -> dict[str, Any]:
        """Plain values of a section: the whole, or one of `model` at `above`.

        Text fields take an unquoted word as it was typed, even if it reads as a number; fields with a Unit take text
        such as 80GB. Raises Mistakes for text that is no such quantity.
        """
        model = model or self.model
        plain: dict[str, Any] = {}
        for name, below in node.value.items():
            info = model.model_fields.get(name)
            path = (*above, name)
            section = section_of(info.annotation) if info is not None else None
            item = items_of(info.annotation) if info is not None else None
            if section is not None and below.is_section:
                plain[name] = self.plain(below, section, path)
            elif item is not None and isinstance(below.value, list):
                plain[name] = tuple(
                    self.plain(each, item, (*path, place)) if each.is_section else each.plain()
                    for place, each in enumerate(below.value)
                )
            elif info is not None and info.annotation is str and below.text is not None and below.value is not None:
                plain[name] = below.text
            else:
                plain[name] = _value(below, info, path)
        return plain

    def explain(self, root: Node, error: Any) -> str:
        """One of pydantic's errors in our words, with its place."""
        path, info = self._field(error["loc"])
        name = dotted(path)
        if error["type"] == "value_error":
            message = str(error["ctx"]["error"])
            return f"{places(root, path, message)}{message}"
        node = nearest(root, path)
        if error["type"] == "missing" and len(path) == len(error["loc"]):
            section = told(node, dotted(path[:-1])) if path[:-1] else node.where
            return f"{section}: {name} is missing; give {_takes(info)}"
        if error["type"] != "missing" and isinstance(node.value, list) and len(error["loc"]) > len(path):
            return _wrong_item(node, name, info, error["loc"][len(path)])
        where = told(node, name)
        if node.plain() in LATER_VALUES.get(name, ()):
            return f"{where}: {not_yet(str(path[-1]), node.plain(), f'use {_takes(info)}')}"
        if node.value is None:
            return f"{where}: empty; give {_takes(info)}"
        right = meant_value(info, node.plain()) if info is not None else None
        hint = f"; did you mean {right}?" if right else ""
        return f"{where}: {show(node.plain())} is not {_takes(info)}{hint}"

    def _field(self, loc: Sequence[int | str]) -> tuple[Path, FieldInfo | None]:
        """The part of pydantic's location that names fields, and the last; behind it are items and alternatives."""
        found: list[str | int] = []
        last: FieldInfo | None = None
        model: type[BaseModel] | None = self.model
        item: type[BaseModel] | None = None
        for part in loc:
            if item is not None and isinstance(part, int):
                last = FieldInfo.from_annotation(item)
                model, item = item, None
            elif model is not None and part in model.model_fields:
                last = model.model_fields[str(part)]
                model, item = section_of(last.annotation), items_of(last.annotation)
            else:
                break
            found.append(part)
        return tuple(found), last


def _value(node: Node, info: FieldInfo | None, path: Path) -> Any:
    unit = unit_of(info) if info is not None else None
    if unit is None or not isinstance(node.value, str):
        return node.plain()
    try:
        return unit(node.value)
    except UserError as error:
        raise Mistakes(f"{told(node, dotted(path))}: {error}") from None


def _takes(info: FieldInfo | None) -> str:
    assert info is not None, "an error without a field is one of the whole, and those are told in words"
    return expected(info)


def _wrong_item(node: Node, name: str, info: FieldInfo | None, index: int) -> str:
    """One item of a list is wrong; the list is none the less one."""
    assert info is not None
    item, takes = node.value[index], item_of(info)
    right = meant_value(takes, item.plain())
    return (
        f"{told(item, name)}: {show(item.plain())} in {show(node.plain())} is not {expected(takes)}"
        f"{f'; did you mean {right}?' if right else ''}"
    )


# -- places ---------------------------------------------------------------------------------------------------------


def nearest(root: Node, path: Path) -> Node:
    """The node of a field, or of the nearest section above it that was written."""
    node = root
    for part in path:
        inside = part < len(node.value) if isinstance(part, int) else node.is_section and part in node.value
        if not inside:
            break
        node = node.value[part]
    return node


def places(root: Node, path: Path, message: str) -> str:
    """Where the fields were written that a message about the section at `path` names, else where the section was."""
    written = _written(root)
    section = dotted(path)
    words, named = [], []
    for word, equals in re.findall(r"([a-z_][a-z0-9_.]*[a-z0-9_])(=?)", message):
        words.append(word)
        node = written.get(f"{section}.{word}") if section else None
        # Fields of a run have names that are plain words too, as in "leave it out": these count as "out=…" only.
        node = node or (written.get(word) if equals or not word.isalpha() else None)
        # A model that was named as a whole is where its fields were written.
        above = written.get(word.rpartition(".")[0]) if node is None else None
        named.append(above if above is not None and not above.is_section else node)
    nodes = [node for node in named if node is not None] or [written[section]] if section in written else named
    if all(node is None for node in nodes):
        # What is wrong came with a preset or config.json: that was written, above the field.
        nodes = [written.get(word.rpartition(".")[0]) for word in words]
    found = list(dict.fromkeys(node.where for node in nodes if node is not None))[:3]
    prefix = f"{COMMAND_LINE}: "
    typed = [place.removeprefix(prefix) for place in found if place.startswith(prefix)]
    there = [place for place in found if not place.startswith(prefix)] + ([prefix + " ".join(typed)] if typed else [])
    return "".join(f"{part}: " for part in (", ".join(there), section) if part)


def _written(node: Node, above: Path = ()) -> dict[str, Node]:
    found: dict[str, Node] = {}
    if node.is_section:
        below = list(node.value.items())
    elif isinstance(node.value, list) and any(each.is_section for each in node.value):
        below = list(enumerate(node.value))
    else:
        return found
    for name, each in below:
        found |= {dotted((*above, name)): each} | _written(each, (*above, name))
    return found
