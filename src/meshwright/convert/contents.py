"""What is in a checkpoint, told from its manifest alone. Imports no torch."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.spec.errors import RunError, UserError
from meshwright.train import folders, manifestfile

KINDS = {"model": "parameters", "exp_avg": "first moments", "exp_avg_sq": "second moments"}


@dataclass(frozen=True)
class Stored:
    """One tensor: of how many boxes it is made, in how many files these lie."""

    dtype: str
    shape: tuple[int, ...]
    boxes: int
    files: int
    bytes: int


@dataclass(frozen=True)
class Contents:
    """A checkpoint. run: the whole resolved run that wrote it. tensors: by kind and public name. files: bytes of each.

    of_kind: bytes of parameters and each moment. parameters: how many numbers the model has.
    """

    path: Path
    meta: dict[str, Any]
    tensors: dict[str, Stored]
    files: dict[str, int]

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    @property
    def run(self) -> dict[str, Any]:
        return dict(self.meta["run"])

    @property
    def parameters(self) -> int:
        return sum(math.prod(t.shape) for name, t in self.tensors.items() if name.startswith("model/"))

    @property
    def of_kind(self) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for name, tensor in self.tensors.items():
            totals[name.partition("/")[0]] += tensor.bytes
        return dict(totals)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "path": str(self.path),
            **{key: value for key, value in self.meta.items() if key != "run"},
            "parameters": self.parameters,
            "bytes": self.of_kind | {"files": sum(self.files.values())},
            "files": self.files,
            "tensors": {name: asdict(tensor) for name, tensor in self.tensors.items()},
            "run": self.run,
        }


def inspect(path: Path) -> Contents:
    """What the checkpoint at `path` holds; see `find`. Raises UserError, and RunError for a damaged manifest."""
    where = find(path)
    with naming_an_older(path, where):
        plain = manifestfile.read(where)
        manifestfile.check_meta(plain["meta"])
    return Contents(
        where, plain["meta"], {name: _stored(about) for name, about in plain["tensors"].items()}, plain["files"]
    )


def _stored(about: dict[str, Any]) -> Stored:
    nbytes = math.prod(about["shape"]) * manifestfile.ITEMSIZES[about["dtype"]]
    files = len({box["file"] for box in about["boxes"]})
    return Stored(about["dtype"], tuple(about["shape"]), len(about["boxes"]), files, nbytes)


def find(path: Path) -> Path:
    """The checkpoint's own folder: `path` itself, or the newest in a run's folder or in its checkpoints folder.

    Whether it is whole is for others to find out. Raises UserError where there is none.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; name a run's out folder, or the folder of one checkpoint")
    if (path / manifestfile.NAME).exists() or folders.is_checkpoint(path):
        return path
    for folder in (path / "checkpoints", path):
        if there := folders.steps(folder):
            return folders.path(folder, there[-1])
    raise UserError(f"{path}: no checkpoint there; name a run's out folder, or the folder of one checkpoint")


@contextlib.contextmanager
def naming_an_older(path: Path, where: Path) -> Iterator[None]:
    """Where the checkpoint in `where`, which `find` took for `path`, turns out to be damaged, let the RunError say
    which older one looks whole and how to ask for it."""
    try:
        yield
    except RunError as error:
        newest = folders.step_of(where)
        if where == path or newest is None:
            raise
        older = [folders.path(where.parent, step) for step in folders.steps(where.parent) if step < newest]
        whole = next(filter(manifestfile.looks_whole, reversed(older)), None)
        hint = (
            "and no older one there looks whole"
            if whole is None
            else f"the newest before it that looks whole is {whole}; name that folder"
        )
        raise RunError(f"{error}; {hint}") from error
