"""Fields in words: what a field takes, which fields there are, and which one a misspelt name may have meant."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from meshwright.spec.quantities import Unit

# Names that other trainers and Hugging Face use.
ALIASES = {
    "learning_rate": "optimizer.lr", "max_grad_norm": "optimizer.clip", "grad_clip": "optimizer.clip",
    "wd": "optimizer.weight_decay", "warmup_steps": "lr_schedule.warmup", "warmup_iters": "lr_schedule.warmup",
    "batch_size": "batch.sequences", "global_batch_size": "batch.sequences", "micro_batch_size": "batch.micro",
    "block_size": "data.seq_len", "seq_length": "data.seq_len", "sequence_length": "data.seq_len",
    "dataset": "data.path", "max_steps": "steps", "train_iters": "steps", "max_iters": "steps", "epochs": "steps",
    "output_dir": "out", "dtype": "precision", "save_every": "checkpoint.every", "eval_every": "validation.every",
    "vocab_size": "model.vocab", "hidden_size": "model.hidden", "n_embd": "model.hidden", "d_model": "model.hidden",
    "num_layers": "model.layers", "n_layer": "model.layers", "num_hidden_layers": "model.layers",
    "n_head": "model.heads", "num_heads": "model.heads", "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads", "intermediate_size": "model.ffn", "ffn_hidden_size": "model.ffn",
    "max_position_embeddings": "model.max_seq", "n_positions": "model.max_seq", "tie_word_embeddings": "model.tied",
    "data_parallel": "layout.dp", "tensor_parallel": "layout.tp", "pipeline_parallel": "layout.pp",
    "zero_stage": "layout.zero", "schedule": "layout.pp_schedule", "pipeline_schedule": "layout.pp_schedule",
    "virtual_stages": "layout.pp_chunks", "chunks": "layout.pp_chunks", "ranks": "layout.dp",
}  # fmt: skip

# Dtypes as torch and others write them.
DTYPE_ALIASES = {
    "fp64": "float64", "double": "float64", "f64": "float64",
    "float32": "fp32", "float": "fp32", "single": "fp32", "f32": "fp32",
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "f16": "fp16",
}  # fmt: skip

# What a run will one day take and does not yet: values of fields, and fields with what holds in their place.
LATER_VALUES: dict[str, tuple[object, ...]] = {}
LATER_FIELDS = {
    "model.experts": "leave it out: models are dense",
}


def not_yet(name: str, value: object, instead: str) -> str:
    """An option that is not available yet, and what is: "tp=2 is not available yet; use tp=1"."""
    written = value if isinstance(value, str) else show(value)
    return f"{name}={written} is not available yet; {instead}"


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field of this type is, `X` or `X | None`; None for plain fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = [section_of(option) for option in get_args(annotation)] if _is_union(annotation) else []
    return next((section for section in inner if section is not None), None)


def items_of(annotation: Any) -> type[BaseModel] | None:
    """The section that each item of a list is, `tuple[X, ...]`; None for all other fields."""
    if get_origin(annotation) is not tuple or get_args(annotation)[-1] is not Ellipsis:
        return None
    return section_of(get_args(annotation)[0])


def unit_of(info: FieldInfo) -> Unit | None:
    """The unit of a quantity, where the field takes text such as 80GB; it may stand on one of several alternatives."""
    inside = [limit for option in get_args(info.annotation) for limit in getattr(option, "__metadata__", ())]
    return next((limit for limit in [*info.metadata, *inside] if isinstance(limit, Unit)), None)


def paths(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field below `model` by its dotted name, sections before what is in them."""
    for name, info in model.model_fields.items():
        yield above + name, info
        section = section_of(info.annotation) or items_of(info.annotation)
        if section is not None:
            yield from paths(section, f"{above}{name}.")


def expected(info: FieldInfo) -> str:
    """What a field takes: "a whole number above 0", "auto, never, or a whole number of 0 or more"."""
    return _words(info.annotation, info.metadata)


def item_of(info: FieldInfo) -> FieldInfo:
    """What each item of a list takes."""
    return FieldInfo.from_annotation(get_args(info.annotation)[0])


def _words(annotation: Any, limits: Sequence[Any] = ()) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _words(inner, [limit for m in more for limit in (m.metadata if isinstance(m, FieldInfo) else [m])])
    if _is_union(annotation):
        # A null is the exception, so it comes last.
        options = sorted(get_args(annotation), key=lambda option: option is types.NoneType)
        return join([word for option in options for word in _choices(option) or [_words(option, limits)]])
    if origin is Literal:
        return join(_choices(annotation))
    if origin is tuple:
        items = get_args(annotation)
        size = "" if items[-1] is Ellipsis else f" of {len(items)}"
        return f"a list{size}, each {_words(items[0])}"
    if annotation is types.NoneType:
        return "null"
    section = section_of(annotation)
    if section is not None:
        return f"a section with {', '.join(section.model_fields)}"
    kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[annotation]
    if any(isinstance(limit, MinLen) for limit in limits):
        kind = f"{kind} that is not empty"
    bounds = _bounds(limits)
    unit = next((f" (such as {limit.examples[0].split(' ')[0]})" for limit in limits if isinstance(limit, Unit)), "")
    return f"{kind} {bounds}{unit}" if bounds else f"{kind}{unit}"


def _choices(annotation: Any) -> list[str]:
    return [str(value) for value in get_args(annotation)] if get_origin(annotation) is Literal else []


def _bounds(limits: Sequence[Any]) -> str:
    low = {type(limit): limit for limit in limits}
    words = []
    if Gt in low:
        words.append(f"above {_number(low[Gt].gt)}")
    if Ge in low:
        words.append(f"of at least {_number(low[Ge].ge)}")
    if Lt in low:
        words.append(f"below {_number(low[Lt].lt)}")
    if Le in low:
        words.append(f"at most {_number(low[Le].le)}")
    return " and ".join(words)


def _number(value: Any) -> str:
    power = value.bit_length() - 1 if isinstance(value, int) else 0
    return f"2^{power}" if power >= 24 and value == 2**power else str(value)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def show(value: Any, limit: int = 60) -> str:
    """A value as a user would write it, cut to `limit` characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def join(options: Sequence[str], word: str = "or") -> str:
    """ "a", "a or b", "a, b or c"."""
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} {word} {options[-1]}"


def near(value: str, choices: Sequence[str]) -> str:
    """ "; did you mean gpipe?", or nothing where none of the choices is spelt like `value`."""
    found = difflib.get_close_matches(value.lower(), choices, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def meant(model: type[BaseModel], section: str, key: str) -> list[str]:
    """The fields that a name nobody knows, `key` written in `section` ("" for the top), most likely stands for.

    First the same name in another section, then names of other trainers, then near spellings: in the same section,
    in any other.
    """
    known = [path for path, _ in paths(model)]
    leaf = key.rpartition(".")[2]
    if same := [path for path in known if path in (key, f"{section}.{key}") or path.rpartition(".")[2] == leaf]:
        return same[:3]
    if leaf in ALIASES:
        return [ALIASES[leaf]]
    siblings = {path.rpartition(".")[2]: path for path in known if path.rpartition(".")[0] == section}
    if near := difflib.get_close_matches(leaf, siblings, n=1):
        return [siblings[near[0]]]
    full = f"{section}.{key}" if section else key
    if near := difflib.get_close_matches(full, known, n=1, cutoff=0.75):
        return near
    leaves = {path.rpartition(".")[2]: path for path in known}
    near = difflib.get_close_matches(leaf, [*leaves, *ALIASES], n=1, cutoff=0.7)
    return [leaves.get(near[0]) or ALIASES[near[0]]] if near else []


def meant_value(info: FieldInfo, value: object) -> str | None:
    """The choice of a field that a wrong value most likely stands for: another name of a dtype, or a near spelling."""
    options = get_args(info.annotation) if _is_union(info.annotation) else (info.annotation,)
    choices = [word for option in options for word in _choices(option)]
    if not isinstance(value, str) or not choices:
        return None
    alias = DTYPE_ALIASES.get(value.lower().removeprefix("torch."))
    if alias in choices:
        return alias
    return next(iter(difflib.get_close_matches(value.lower(), choices, n=1, cutoff=0.75)), None)


@dataclass(frozen=True)
class FieldRow:
    """One field for people: its dotted name, what it takes, its default as YAML, and what it is."""

    name: str
    takes: str
    default: str
    description: str
