"""What a user wrote, with the place of every part: YAML and `key=value` turned into nodes.

YAML as in version 1.2 where the two differ in ways that surprise: `1e-3` is a number, `yes`, `on`, `2026-01-01` and
`1:30` are text, and a key may stand only once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshwright.spec.errors import UserError

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_WORDS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULL = ("", "~", "null", "Null", "NULL")
_LARGEST = 2**63


@dataclass
class Node:
    """A value and where it was written. `value` is a scalar, a list of nodes, or nodes by key.

    `where`: "run.yaml line 7" or "command line". `text`: a plain scalar as it was typed. `folder`: what relative
    paths written here are relative to.
    """

    value: Any
    where: str
    folder: Path
    text: str | None = None

    @property
    def is_section(self) -> bool:
        return isinstance(self.value, dict)

    def plain(self) -> Any:
        """The value without places; lists become tuples."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return tuple(node.plain() for node in self.value)
        return self.value


class Mistakes(Exception):
    """Mistakes found in what was written, one line each."""

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)
        self.lines = lines


class _Loader(yaml.SafeLoader):
    """Composes nodes; every plain scalar keeps the tag of plain text, so that `_scalar` alone decides."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - the base class's


def read(path: Path, what: str = "run file") -> Node:
    """The nodes of a file, which is `what` in words; an empty file is an empty section. Raises UserError, Mistakes."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x}); "
            "name a YAML file, saved as UTF-8"
        ) from None
    except IsADirectoryError:
        inside = path / f"{what.split()[0]}.yaml"
        right = f"use {inside}" if inside.is_file() else "name a YAML file"
        raise UserError(f"{path}: is a folder, not a {what}; {right}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name a YAML file") from None
    node = parse(text, str(path), path.parent, numbered=True)
    if node.value is None:
        node.value = {}
    if not node.is_section:
        example = "steps: 200" if what == "run file" else "nodes: 2"
        raise UserError(f"{path}: holds no fields; write lines such as `{example}`")
    return node


def parse(text: str, where: str, folder: Path, *, numbered: bool = False) -> Node:
    """The nodes of one YAML text. `numbered`: places are "`where` line N", else just `where`. Raises UserError."""
    try:
        tree = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if numbered and mark else ""
        hint = "; indent with spaces, not tabs" if "\\t" in (error.problem or "") else ""
        context = f" {error.context}:" if error.context else ""
        raise UserError(f"{where}{line}: not valid YAML:{context} {error.problem}{hint}") from None
    except yaml.reader.ReaderError as error:
        line = f" line {text[: error.position].count(chr(10)) + 1}" if numbered else ""
        raise UserError(f"{where}{line}: not text: character {error.character!r} is not allowed") from None
    except RecursionError:
        raise UserError(f"{where}: brackets are nested too deeply") from None
    if tree is None:
        return Node(None, where, folder, "")
    lines: list[str] = []
    node = _Build(where, folder, numbered, lines).node(tree)
    if lines:
        raise Mistakes(*lines)
    return node


@dataclass
class _Build:
    where: str
    folder: Path
    numbered: bool
    mistakes: list[str]

    def node(self, tree: yaml.Node, above: tuple[int, ...] = ()) -> Node:
        place = self.place(tree)
        if id(tree) in above:
            self.mistakes.append(f"{place}: an alias (*) stands inside its own anchor (&); leave it out")
            return Node(None, place, self.folder)
        above = (*above, id(tree))
        if isinstance(tree, yaml.MappingNode):
            return Node(dict(self.fields(tree, above)), place, self.folder)
        if isinstance(tree, yaml.SequenceNode):
            return Node([self.node(item, above) for item in tree.value], place, self.folder)
        assert isinstance(tree, yaml.ScalarNode)  # the only kind left
        return Node(self.scalar(tree), place, self.folder, tree.value if tree.style is None else None)

    def fields(self, tree: yaml.MappingNode, above: tuple[int, ...]) -> Iterator[tuple[str, Node]]:
        first: dict[str, str] = {}
        for key, value in tree.value:
            place = self.place(key)
            if not isinstance(key, yaml.ScalarNode):
                self.mistakes.append(f"{place}: a list or section stands where a field's name belongs")
            elif key.value in first:
                self.mistakes.append(f"{place}: {key.value} stands twice ({first[key.value]} has it too); keep one")
            else:
                first[key.value] = place
                node = self.node(value, above)
                node.where = place  # of the field's name: the value may begin lines below
                yield key.value, node

    def place(self, tree: yaml.Node) -> str:
        return f"{self.where} line {tree.start_mark.line + 1}" if self.numbered else self.where

    def scalar(self, tree: yaml.ScalarNode) -> Any:
        text: str = tree.value
        if tree.tag != f"{_TAG}str":  # what _Loader gives every scalar without a tag
            self.mistakes.append(
                f"{self.place(tree)}: the tag {tree.tag.replace(_TAG, '!!')} means nothing here; leave it out"
            )
            return None
        if "\0" in text:
            self.mistakes.append(f"{self.place(tree)}: text with a zero character; leave it out")
            return None
        if tree.style is not None:  # quoted, so text
            return text
        try:
            value = scalar(text)
        except ValueError:
            self.mistakes.append(f"{self.place(tree)}: {text[:20]}… is too long for a number")
            return None
        if isinstance(value, float) and not math.isfinite(value):
            self.mistakes.append(f"{self.place(tree)}: {text} is not a finite number")
            return None
        return value


def scalar(text: str) -> Any:
    """What an unquoted word means: null, true or false, a number (`1e3` is the whole number 1000), or text."""
    if text in _NULL:
        return None
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text.replace("_", ""), 16 if text.startswith("0x") else 10)
    if _FLOAT.fullmatch(text):
        number = float(re.sub(r"^([-+]?)\.(?=[a-zA-Z])", r"\1", text.replace("_", "")))
        whole = "." not in text and number.is_integer() and abs(number) < _LARGEST
        return int(number) if whole else number
    return text


# -- back to YAML ---------------------------------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Quotes text that this package's reader, or another YAML reader, would take for something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = None if isinstance(scalar(text), str) else "'"
        if not text.isprintable():  # PyYAML writes some line separators as they are, except in double quotes
            style = '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, _Dumper.represent_text)


def dump(data: Any) -> str:
    """Plain values as YAML, in their order, that `parse` reads as the same."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)
