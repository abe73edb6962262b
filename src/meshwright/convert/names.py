"""Which tensors of a Hugging Face folder are which parameters of a model.

The names are the same: a plain model gives its parameters those of transformers. What differs between folders on the
hub is that some were saved from the model without its head, so that the names lack their first part, that some hold
what others compute (masks, rotary frequencies), and that some hold a tied weight at both its places.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.model.build import build
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec

Shape = tuple[int, ...]

_PREFIX = {"gpt2": "transformer.", "llama": "model."}
# Buffers of older versions of transformers, which follow from the configuration.
_COMPUTED = {
    "gpt2": re.compile(r"(.*\.)?h\.\d+\.attn\.(bias|masked_bias)"),
    "llama": re.compile(r"(.*\.)?rotary_emb\.inv_freq"),
}
_LISTED = 5


@dataclass(frozen=True)
class Matched:
    """sources: the tensor that each parameter is read from. copies: tensors that must equal another parameter, because
    they stand at a second place of a tied one. passed_over: tensors that follow from the configuration."""

    sources: dict[str, str]
    copies: dict[str, str]
    passed_over: tuple[str, ...]


def parameters(spec: ModelSpec) -> dict[str, Shape]:
    """Public name and shape of each parameter in the model's order, a tied one once."""
    model = build(spec, attention="explicit", device="meta")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def tied_places(spec: ModelSpec) -> dict[str, str]:
    """The further places of tied parameters, and the public name of what stands there."""
    model = build(spec, attention="explicit", device="meta")
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every if name != first[parameter]}


def match(spec: ModelSpec, found: Mapping[str, Shape], where: str) -> Matched:
    """Tell which of the tensors `found` is which parameter. Raises UserError that names `where` and all that is
    missing, unexpected or misshapen."""
    wanted, tied, prefix = parameters(spec), tied_places(spec), _PREFIX[spec.family]
    sources: dict[str, str] = {}
    copies: dict[str, str] = {}
    passed_over, unexpected, misshapen = [], [], []
    for name, shape in found.items():
        public = name if name in wanted or name in tied else prefix + name
        if public in wanted and public not in sources:
            sources[public] = name
        elif public in tied:
            copies[name] = tied[public]
        elif _COMPUTED[spec.family].fullmatch(name):
            passed_over.append(name)
            continue
        else:
            unexpected.append(name)
            continue
        needed = wanted[tied.get(public, public)]
        if shape != needed:
            misshapen.append(f"{name} is {list(shape)}, the model's is {list(needed)}")
    for name, public in list(copies.items()):
        if public not in sources:  # saved at its second place alone
            sources[public] = name
            del copies[name]
    missing = [name for name in wanted if name not in sources]
    _refuse(where, (("lacks", missing), ("has unexpected", unexpected), ("has misshapen", misshapen)))
    return Matched({name: sources[name] for name in wanted}, copies, tuple(passed_over))


def _refuse(where: str, wrong: Sequence[tuple[str, list[str]]]) -> None:
    told = [
        f"{what} {'; '.join(names[:_LISTED])}{f' and {len(names) - _LISTED} more' if len(names) > _LISTED else ''}"
        for what, names in wrong
        if names
    ]
    if told:
        raise UserError(
            f"{where}: not the tensors of the model in its config.json: it {', and '.join(told)}; "
            "config.json and weights must be of one model"
        )
