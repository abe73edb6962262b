"""From a run file and `key=value` overrides to a RunSpec, and back to YAML.

Every mistake is told with the place where it was written, what is wrong, and what would be right; all that can be
found at once are told together.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.spec.errors import UserError
from meshwright.spec.form import COMMAND_LINE, Form, told, told_together
from meshwright.spec.model import ModelSpec
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import RunSpec
from meshwright.spec.words import FieldRow, expected, paths, section_of, show
from meshwright.spec.written import Mistakes, Node, dump, parse, read

PRESET = "preset"
AUTO = "auto"
RUN = Form(RunSpec, "a run", {ModelSpec: (PRESET,)})


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
        with told_together():
            root = read(path) if path is not None else Node({}, COMMAND_LINE, Path())
            _override(root, overrides)
            mistakes = RUN.unknown(root)
            if mistakes:
                raise Mistakes(*mistakes)
            return cls(root)

    @property
    def plans(self) -> bool:
        """Whether the layout is to be planned: `layout: auto`."""
        layout = self._root.value.get("layout")
        return layout is not None and layout.value == AUTO

    def to_plan(self) -> RunSpec:
        """The run without its layout, which is to be planned; it has that of `RunSpec` instead. Raises UserError."""
        with told_together():
            rest = {name: node for name, node in self._root.value.items() if name != "layout"}
            return _validated(dataclasses.replace(self._root, value=rest))

    def run(self, **options: str) -> RunSpec:
        """The run, checked, with fields of its top level replaced by options of the command line. Raises UserError."""
        if self.plans:
            raise UserError(
                f"{told(self._root.value['layout'], 'layout')}: auto is planned by `meshwright train`, without "
                "--nnodes; write the layout that `meshwright plan` finds"
            )
        replaced = {
            name: Node(value, f"{COMMAND_LINE}: --{name} {value}", Path(), value) for name, value in options.items()
        }
        with told_together():
            return _validated(dataclasses.replace(self._root, value=self._root.value | replaced))


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


# -- the model ----------------------------------------------------------------------------------------------------


def _compose_model(node: Node) -> dict[str, Any]:
    """Fields of the model, those of its preset or config.json below what is written."""
    if not node.is_section:
        return _base(node)
    written = RUN.plain(
        Node({k: n for k, n in node.value.items() if k != PRESET}, node.where, node.folder), ModelSpec, ("model",)
    )
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
            f"{told(family, 'model.family')}: {over} is of family {base['family']}; "
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
            f"{told(node, 'model')}: a model with its family and without preset also needs {', '.join(needed)}; "
            "give them, or name a preset"
        )
    return written


def _base(node: Node) -> dict[str, Any]:
    name = node.value
    place = told(node, "model")
    if not isinstance(name, str) or not name:
        raise Mistakes(
            f"{place}: {show(node.plain())} is not a preset, a config.json or a section of fields; {_presets()}"
        )
    if name in PRESETS:
        return PRESETS[name].model_dump()
    file = node.folder / Path(name).expanduser()
    if not (file.exists() or name.endswith(".json") or "/" in name):
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise Mistakes(f"{place}: no preset or file {name}; {hint}{_presets()}")
    from meshwright.spec.huggingface import load

    try:
        return load(file).model_dump()
    except UserError as error:
        raise Mistakes(f"{place}: {error}") from None


def _presets() -> str:
    return f"presets are {', '.join(PRESETS)}"


# -- validation ---------------------------------------------------------------------------------------------------


def _validated(root: Node) -> RunSpec:
    plain = RUN.plain(root)
    try:
        if plain.get("model") is not None:
            plain["model"] = _compose_model(root.value["model"])
        return RunSpec.model_validate({k: v for k, v in plain.items() if v is not None or _nullable(k)}, strict=True)
    except ValidationError as error:
        raise Mistakes(*dict.fromkeys(RUN.explain(root, e) for e in error.errors(include_url=False))) from None


def _nullable(name: str) -> bool:
    """Whether an empty field is a value to judge; an empty section holds its defaults."""
    return section_of(RunSpec.model_fields[name].annotation) is None


# -- back to YAML -------------------------------------------------------------------------------------------------


def dump_run(run: RunSpec) -> str:
    """`run` as YAML with every field; `load_run` reads an equal run from it."""
    data = run.model_dump(mode="json")
    return dump(data)


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
