"""What an exported folder holds beside the weights: config.json, and the tokenizer's files where there are any."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.huggingface import to_config
from meshwright.spec.model import ModelSpec

TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "float64": "float64"}
_TOKENIZER = "tokenizer.json"
# What transformers keeps beside it.
_COMPANIONS = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def config(spec: ModelSpec, precision: str, tokenizer: Path | None) -> dict[str, Any]:
    """The contents of config.json for weights of `precision`. Raises UserError where transformers has no such model.

    Ids of special tokens are those of the config.json beside the tokenizer; without one they are null, because
    transformers would otherwise take its own, which mean nothing to another tokenizer.
    """
    made = to_config(spec) | {"torch_dtype": TORCH_NAMES[precision], "use_cache": True}
    if made.get("rope_parameters", {}).get("rope_type", "default") != "default":
        # transformers before 5 and what was written for it look here.
        made["rope_scaling"] = {k: v for k, v in made["rope_parameters"].items() if k != "rope_theta"}
    known = _beside(tokenizer, "config.json")
    return made | {name: known.get(name) for name in _IDS}


def _beside(tokenizer: Path | None, name: str) -> dict[str, Any]:
    try:
        plain = {} if tokenizer is None else json.loads((tokenizer.parent / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return plain if isinstance(plain, dict) else {}


def find_tokenizer(name: str) -> Path | None:
    """The tokenizer's file that a run's data.tokenizer names; None where it is no file. Raises UserError where that
    is gone."""
    if name in ("bytes", "ids"):
        return None
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(
            f"the run's tokenizer {path} is not there (any more, or from this folder); give --tokenizer PATH, "
            "or --tokenizer none to leave it out"
        )
    return path


def copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Copy the tokenizer, and what lies beside it for transformers, into `folder`. Raises OSError."""
    shutil.copyfile(tokenizer, folder / _TOKENIZER)
    for name in _COMPANIONS if tokenizer.name == _TOKENIZER else ():
        if (tokenizer.parent / name).is_file():
            shutil.copyfile(tokenizer.parent / name, folder / name)
    about = folder / "tokenizer_config.json"
    if not about.exists():
        # Else transformers goes by the model's type, and may split text otherwise than tokenizer.json says.
        write_json(about, {"tokenizer_class": "PreTrainedTokenizerFast"})


def write_json(path: Path, content: Any) -> None:
    """Write it as Hugging Face does and flush it to the disk. Raises OSError."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
