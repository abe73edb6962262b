"""The weights of a Hugging Face folder: safetensors files, one or several with an index, read a run at a time.

Files are read and not mapped, so that memory stays small and a damaged disk is an error and no signal. The format is
that of https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.spec.errors import RunError, UserError
from meshwright.train.tensorfile import TORCH_DTYPES

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit


@dataclass(frozen=True)
class Weight:
    """One tensor: its dtype and shape, and where its bytes begin in its file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def runs(self, elements: int) -> Iterator[Tensor]:
        """Its elements in C order, `elements` at a time, each run where the one before was: new ones would leave the
        allocator with holes that the next does not fit. Raises RunError naming the file if it cannot be read."""
        left = math.prod(self.shape)
        place = torch.empty(min(elements, left), dtype=self.dtype)
        try:
            with open(self.file, "rb", buffering=0) as file:
                file.seek(self.start)
                while left:
                    run = place[: min(elements, left)]
                    buffer = memoryview(run.view(torch.uint8).numpy())
                    while buffer:
                        got = file.readinto(buffer)
                        if not got:
                            raise RunError(f"{self.file} is damaged: it ends before its tensors do")
                        buffer = buffer[got:]
                    left -= run.numel()
                    yield run
        except OSError as error:
            raise RunError(f"{self.file} cannot be read: {(error.strerror or str(error)).lower()}") from error


def weights(folder: Path) -> dict[str, Weight]:
    """The tensors in `folder` by name. Raises UserError for pickles, for files that are missing or damaged, and for
    an index that does not fit them."""
    if (folder / SINGLE).exists():
        return _header(folder / SINGLE)
    if not (folder / INDEX).exists():
        raise UserError(f"{folder}: {_nothing_to_read(folder)}")
    places = _index(folder / INDEX)
    found: dict[str, Weight] = {}
    for file in sorted(set(places.values())):
        for name, weight in _header(folder / file).items():
            if name in found:
                raise UserError(f"{folder}: {name} is in {found[name].file.name} and in {file}; keep one")
            found[name] = weight
    lost = [name for name, file in places.items() if name not in found or found[name].file.name != file]
    if lost:
        raise UserError(f"{folder / INDEX}: says that {lost[0]} is in {places[lost[0]]}, and it is not")
    return found


def _nothing_to_read(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"only pickled weights ({pickles[0]}), which may run any code when they are read, and are not read here; "
            "let someone who trusts them save them as safetensors: "
            "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        return f"neither {SINGLE} nor {INDEX}, only {others[0]}; rename a single file to {SINGLE}"
    return f"neither {SINGLE} nor {INDEX}; name the folder of a Hugging Face model"


def _index(path: Path) -> dict[str, str]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        sound = all(isinstance(file, str) and Path(file).name == file for file in places.values())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise UserError(f"{path}: is no index of safetensors files; it needs weight_map, from names to files beside it")
    return dict(places)


def _header(path: Path) -> dict[str, Weight]:
    try:
        length = path.stat().st_size
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > min(length - 8, _LONGEST_HEADER):
                raise UserError(f"{path}: is damaged, or no safetensors file: its header does not fit")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        return {name: _weight(path, name, about, 8 + size, length) for name, about in header.items()}
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: is damaged, or no safetensors file: its header makes no sense") from None


def _weight(path: Path, name: str, about: dict[str, Any], data: int, length: int) -> Weight:
    kind, shape, (start, stop) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)):
        raise ValueError
    dtype = TORCH_DTYPES.get(kind)
    if dtype is None:
        raise UserError(f"{path}: {name} is of dtype {kind}, which is not read here; give float weights")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError
    if data + stop > length:
        raise UserError(f"{path}: is damaged: it ends before {name} does")
    return Weight(path, dtype, shape, data + start)
