"""From a run file and `key=value` overrides to a RunSpec, and back to YAML.

Every mistake is told with the place where it was written, what is wrong, and what would be right; all that can be
found at once are told together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import RunSpec
from meshwright.spec.words import (
    LATER_FIELDS,
    LATER_VALUES,
    FieldRow,
    expected,
    item_of,
    join,
    meant,
    meant_value,
    not_yet,
    paths,
    section_of,
    show,
)
from meshwright.spec.written import Mistakes, Node, parse, read, scalar

COMMAND_LINE = "command line"
PRESET = "preset"


def load_run(path: Path | None, overrides: Sequence[str] = ()) -> RunSpec:
    """The run that the YAML file at `path` describes, with `key=value` overrides applied in order.

    Without a file all defaults hold. Keys are dotted (`layout.dp=4`), values are YAML. `model` is a preset's name, the
    path of a Hugging Face config.json (relative to the run file, or to the working folder on the command line), a
    section of fields over `preset` (over the default model where neither `preset` nor `family` is given), or a whole
    model with its `family`. Raises UserError.
    """
    return Written.read(path, overrides).run()


class Written:
    """What `load_run` loads, read but not yet checked as a whole: it may be loaded with other values for fields."""

    def __init__(self, root: Node) -> None:
        self._root = root

    @classmethod
    def read(cls, path: Path | None, overrides: Sequence[str] = ()) -> Written:
        """Read a run file, once, since it may be a pipe. Raises UserError for what is wrong with single fields."""
        with _told_together():
            root = read(path) if path is not None else Node({}, COMMAND_LINE, Path())
            _override(root, overrides)
            mistakes = list(_unknown(root, RunSpec, ""))
            if mistakes:
                raise Mistakes(*mistakes)
            return cls(root)

    def run(self, **options: str) -> RunSpec:
        """The run, checked, with fields of its top level replaced by options of the command line. Raises UserError."""
        replaced = {
            name: Node(value, f"{COMMAND_LINE}: --{name} {value}", Path(), value) for name, value in options.items()
        }
        with _told_together():
            return _validated(dataclasses.replace(self._root, value=self._root.value | replaced))


@contextlib.contextmanager
def _told_together() -> Iterator[None]:
    try:
        yield
    except Mistakes as found:
        if len(found.lines) == 1:
            raise UserError(found.lines[0]) from None
        raise UserError("\n  ".join([f"{len(found.lines)} mistakes:", *found.lines])) from None


# -- overrides ----------------------------------------------------------------------------------------------------


def _override(root: Node, overrides: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    mistakes: list[str] = []
    sections = {name for name in RunSpec.model_fields if not _nullable(name)}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            mistakes.append(f"{COMMAND_LINE}: {text}: not key=value; write, for example, optimizer.lr=3e-4")
            continue
        for earlier, said in seen.items():
            if earlier.startswith(f"{key}."):
                mistakes.append(f"{COMMAND_LINE}: {said}: has no effect, {text} after it replaces it; put it last")
        seen[key] = text
        where = f"{COMMAND_LINE}: {text}"
        try:
            value.encode()
            node = parse(value, where, Path())
            if node.value is None and key in sections:
                # In a file that is a section whose fields are commented out; typed, most likely a variable not set.
                raise UserError(f"{where}: empty; give a value, or leave {key} out for its default")
            _set(root, key.split("."), node)
        except UnicodeEncodeError:
            mistakes.append(f"{COMMAND_LINE}: {key}: not UTF-8 text")
        except UserError as error:
            mistakes.append(str(error))
        except Mistakes as found:
            mistakes += found.lines
    if mistakes:
        raise Mistakes(*mistakes)


def _set(root: Node, key: Sequence[str], node: Node) -> None:
    """Put `node` under `key`; what stands above it becomes a section where it may be one."""
    here = root
    for depth, name in enumerate(key[:-1]):
        below = here.value.get(name)
        if below is None or below.value is None:
            below = here.value[name] = Node({}, node.where, node.folder)
        elif depth == 0 and name == "model" and isinstance(below.value, str):
            below = here.value[name] = Node({PRESET: below}, below.where, below.folder)
        elif not below.is_section:
            raise UserError(
                f"{node.where}: {'.'.join(key[: depth + 1])} is {show(below.plain())} ({below.where}), not a section"
            )
        here = below
    here.value[key[-1]] = node


# -- unknown fields -----------------------------------------------------------------------------------------------


def _unknown(node: Node, model: type[BaseModel], above: str) -> list[str]:
    if not node.is_section:
        return []
    mistakes = []
    for name, below in node.value.items():
        info = model.model_fields.get(name)
        if info is not None:
            section = section_of(info.annotation)
            mistakes += _unknown(below, section, f"{above}{name}.") if section else []
        elif not (model is ModelSpec and name == PRESET):
            later = LATER_FIELDS.get(above + name)
            if later is not None:
                mistakes.append(f"{_told(below, above + name)}: {above}{name} is not available yet; {later}")
            else:
                mistakes.append(f"{_told(below, above + name)}: no such field; {_hint(below, model, above, name)}")
    return mistakes


def _told(node: Node, name: str) -> str:
    """Where and what: "run.yaml line 7: optimizer.lr", or the override as it was typed."""
    return node.where if node.where.startswith(COMMAND_LINE) else f"{node.where}: {name}"


def _hint(node: Node, model: type[BaseModel], above: str, name: str) -> str:
    known = dict(paths(RunSpec))
    right = meant(RunSpec, above.rstrip("."), name)
    if node.is_section and len(node.value) == 1:  # a misspelt section of one field: name that field
        (leaf,) = node.value
        right = [f"{path}.{leaf}" if f"{path}.{leaf}" in known else path for path in right]
    if right == [above + name]:  # only a run file can hold a dotted name
        *sections, leaf = right[0].split(".")
        return f"write it as {'{'.join(f'{section}: ' for section in sections)}{{{leaf}: …{'}' * len(sections)}"
    if right:
        return f"did you mean {join(right)}?"
    there = [*model.model_fields, *([PRESET] if model is ModelSpec else [])]
    return f"{above.rstrip('.') or 'a run'} has {', '.join(there)}"


# -- the model ----------------------------------------------------------------------------------------------------


def _compose_model(node: Node) -> dict[str, Any]:
    """Fields of the model, those of its preset or config.json below what is written."""
    if not node.is_section:
        return _base(node)
    written = _plain(Node({k: n for k, n in node.value.items() if k != PRESET}, node.where, node.folder), ModelSpec)
    preset = node.value.get(PRESET)
    if preset is None:
        if "family" in written:
            return _whole(node, written)
        base = RunSpec.model_fields["model"].default.model_dump()
    else:
        base = _base(preset)
    if written.get("family", base["family"]) != base["family"]:
        family = node.value["family"]
        over = "the default model" if preset is None else show(preset.value)
        raise Mistakes(
            f"{_told(family, 'model.family')}: {over} is of family {base['family']}; "
            "use a preset of that family, or leave preset out and give all of the model's fields"
        )
    scaling = written.get("rope_scaling")
    if isinstance(scaling, dict) and "kind" not in scaling and isinstance(base["rope_scaling"], dict):
        written["rope_scaling"] = base["rope_scaling"] | scaling
    composed: dict[str, Any] = base | written
    return composed


def _whole(node: Node, written: dict[str, Any]) -> dict[str, Any]:
    needed = [name for name, info in ModelSpec.model_fields.items() if info.is_required() and name not in written]
    if needed:
        raise Mistakes(
            f"{_told(node, 'model')}: a model with its family and without preset also needs {', '.join(needed)}; "
            "give them, or name a preset"
        )
    return written


def _base(node: Node) -> dict[str, Any]:
    name = node.value
    told = _told(node, "model")
    if not isinstance(name, str) or not name:
        raise Mistakes(
            f"{told}: {show(node.plain())} is not a preset, a config.json or a section of fields; {_presets()}"
        )
    if name in PRESETS:
        return PRESETS[name].model_dump()
    file = node.folder / Path(name).expanduser()
    if not (file.exists() or name.endswith(".json") or "/" in name):
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise Mistakes(f"{told}: no preset or file {name}; {hint}{_presets()}")
    from meshwright.spec.huggingface import load

    try:
        return load(file).model_dump()
    except UserError as error:
        raise Mistakes(f"{told}: {error}") from None


def _presets() -> str:
    return f"presets are {', '.join(PRESETS)}"


# -- validation ---------------------------------------------------------------------------------------------------


def _validated(root: Node) -> RunSpec:
    plain = _plain(root, RunSpec)
    try:
        if plain.get("model") is not None:
            plain["model"] = _compose_model(root.value["model"])
        return RunSpec.model_validate({k: v for k, v in plain.items() if v is not None or _nullable(k)}, strict=True)
    except ValidationError as error:
        raise Mistakes(*dict.fromkeys(_explain(root, e) for e in error.errors(include_url=False))) from None


def _nullable(name: str) -> bool:
    """Whether an empty field is a value to judge; an empty section holds its defaults."""
    return section_of(RunSpec.model_fields[name].annotation) is None


def _plain(node: Node, model: type[BaseModel]) -> dict[str, Any]:
    """Plain values of a section. Text fields take an unquoted word as it was typed, even if it reads as a number."""
    plain: dict[str, Any] = {}
    for name, below in node.value.items():
        info = model.model_fields.get(name)
        section = section_of(info.annotation) if info is not None else None
        if section is not None and below.is_section:
            plain[name] = _plain(below, section)
        elif info is not None and info.annotation is str and below.text is not None and below.value is not None:
            plain[name] = below.text
        else:
            plain[name] = below.plain()
    return plain


def _explain(root: Node, error: Any) -> str:
    """One of pydantic's errors in our words, with its place."""
    fields = _field_path(error["loc"])
    name = ".".join(fields)
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])
        return f"{_places(root, name, message)}{message}"
    node = _nearest(root, name)
    if error["type"] == "missing" and len(fields) == len(error["loc"]):
        section = name.rpartition(".")[0]
        return f"{_told(node, section)}: {name} is missing; give {_takes(name)}"
    if error["type"] != "missing" and isinstance(node.value, list) and len(error["loc"]) > len(fields):
        return _wrong_item(node, name, error["loc"][len(fields)])
    wrong = "empty" if node.value is None else show(node.plain())
    told = _told(node, name)
    if node.plain() in LATER_VALUES.get(name, ()):
        return f"{told}: {not_yet(name.rpartition('.')[2], node.plain(), f'use {_takes(name)}')}"
    if node.value is None:
        return f"{told}: empty; give {_takes(name)}"
    right = meant_value(dict(paths(RunSpec))[name], node.plain())
    return f"{told}: {wrong} is not {_takes(name)}{f'; did you mean {right}?' if right else ''}"


def _wrong_item(node: Node, name: str, index: int) -> str:
    """One item of a list is wrong; the list is none the less one."""
    item, takes = node.value[index], item_of(dict(paths(RunSpec))[name])
    right = meant_value(takes, item.plain())
    return (
        f"{_told(item, name)}: {show(item.plain())} in {show(node.plain())} is not {expected(takes)}"
        f"{f'; did you mean {right}?' if right else ''}"
    )


def _takes(name: str) -> str:
    return expected(dict(paths(RunSpec))[name])


def _field_path(loc: Sequence[int | str]) -> list[str]:
    """The part of pydantic's location that names fields; behind it come list items and alternatives of unions."""
    found: list[str] = []
    model: type[BaseModel] | None = RunSpec
    for part in loc:
        if model is None or part not in model.model_fields:
            break
        found.append(str(part))
        model = section_of(model.model_fields[str(part)].annotation)
    return found


def _nearest(root: Node, name: str) -> Node:
    """The node of a field, or of the nearest section above it that was written."""
    node = root
    for part in name.split(".") if name else []:
        if not node.is_section or part not in node.value:
            break
        node = node.value[part]
    return node


def _places(root: Node, section: str, message: str) -> str:
    """Where the fields were written that a message about `section` names, else where the section was."""
    written = _written(root)
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
    if all(
        node is None for node in nodes
    ):  # what is wrong came with a preset or config.json: that was written, above the field
        nodes = [written.get(word.rpartition(".")[0]) for word in words]
    places = list(dict.fromkeys(node.where for node in nodes if node is not None))[:3]
    prefix = f"{COMMAND_LINE}: "
    typed = [place.removeprefix(prefix) for place in places if place.startswith(prefix)]
    there = [place for place in places if not place.startswith(prefix)] + ([prefix + " ".join(typed)] if typed else [])
    return "".join(f"{part}: " for part in (", ".join(there), section) if part)


def _written(node: Node, above: str = "") -> dict[str, Node]:
    found: dict[str, Node] = {}
    if node.is_section:
        for name, below in node.value.items():
            found |= {above + name: below} | _written(below, f"{above}{name}.")
    return found


# -- back to YAML -------------------------------------------------------------------------------------------------


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


def dump_run(run: RunSpec) -> str:
    """`run` as YAML with every field; `load_run` reads an equal run from it."""
    data = run.model_dump(mode="json")
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)


def describe() -> list[FieldRow]:
    """Every field of a run file, sections before what is in them."""
    rows = []
    for name, info in paths(RunSpec):
        value: Any = RunSpec()
        for part in name.split("."):
            value = getattr(value, part, None)
        is_section = section_of(info.annotation) is not None
        default = "" if is_section and value is not None else show(value).replace('"', "")
        takes = "a section" if is_section else expected(info)
        rows.append(FieldRow(name, takes, default, info.description or ""))
    return rows
