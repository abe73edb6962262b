"""From a Hugging Face folder to a checkpoint of step 0, from which a run goes on.

Weights become master weights (float32, or float64 where the run's precision is that), moments are zero. Nothing is
held but a run of one tensor at a time.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.convert import names
from meshwright.convert.hub import Weight, weights
from meshwright.spec.boxes import Box
from meshwright.spec.errors import RunError, UserError
from meshwright.spec.load import load_run
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import RunSpec
from meshwright.train import folders, manifest, tensorfile
from meshwright.train.lock import locked
from meshwright.train.lossscale import LossScale
from meshwright.train.manifest import Entry, Manifest, StoredBox
from meshwright.train.tensorfile import BLOCK, Stream

MOMENTS = ("exp_avg", "exp_avg_sq")
FILE = "rank-00000.safetensors"
RUN = BLOCK
"""Elements of a tensor that are in memory at once; of any dtype they are whole blocks."""
_PRECISIONS = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "float64",
}  # fmt: skip

Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class Imported:
    """where: the checkpoint. fields: what `meshwright train` needs to be told beside the text, as key=value."""

    where: Path
    run: RunSpec
    parameters: int
    fields: tuple[str, ...]
    passed_over: tuple[str, ...]


def import_folder(
    folder: Path, out: Path, fields: Sequence[str] = (), advance: Advance = lambda done, total: None
) -> Imported:
    """Make the weights in `folder` the checkpoint of step 0 of a run in `out`.

    fields: `model.NAME=…` and `precision=…`, which the run will have too; the precision is the weights' own by
    default. advance: told bytes written, and of all. Raises UserError where the folder is not what it should be or
    the run has checkpoints, RunError where reading or writing fails or a weight is not finite.
    """
    found = weights(folder)
    integer = next((name for name, weight in found.items() if not weight.dtype.is_floating_point), None)
    chosen = _fields(folder, found, fields)
    run = _run(chosen, folder, out)
    matched = names.match(run.model, {name: weight.shape for name, weight in found.items()}, str(folder))
    if integer is not None and integer not in matched.passed_over:
        raise UserError(f"{folder}: {integer} is of dtype {found[integer].dtype}; give float weights")
    for name, public in matched.copies.items():
        if not _equal(found[name], found[matched.sources[public]]):
            raise UserError(
                f"{folder}: {name} differs from {matched.sources[public]}, though config.json ties the two; "
                "set tie_word_embeddings to false there if they were trained apart"
            )
    sources = {public: found[name] for public, name in matched.sources.items()}
    with locked(out):
        where = _write(out / "checkpoints", run, sources, folder, advance)
    told = [*chosen, f"out={out}", *_needed(run)]
    number = sum(math.prod(weight.shape) for weight in sources.values())
    return Imported(where, run, number, tuple(told), matched.passed_over)


def _fields(folder: Path, found: Mapping[str, Weight], fields: Sequence[str]) -> list[str]:
    """What the run must say about its model, in order."""
    for field in fields:
        if not field.startswith(("model.", "precision=")):
            raise UserError(
                f"command line: {field}: an import takes model.NAME=… and precision=… only; "
                "give the others to `meshwright train`"
            )
    config = folder / "config.json"
    dtypes = [weight.dtype for weight in found.values() if weight.dtype.is_floating_point]
    dtype = dtypes[0] if dtypes else torch.float32
    for other in dtypes:
        dtype = torch.promote_types(dtype, other)
    own = [] if any(field.startswith("precision=") for field in fields) else [f"precision={_PRECISIONS[dtype]}"]
    return [f"model={config}", *fields, *own]


def _run(chosen: Sequence[str], folder: Path, out: Path) -> RunSpec:
    """The run that the checkpoint is of: the folder's tokenizer, all else at its default where the model allows."""
    model, *others = chosen
    # In quotes, so that no character of a path means anything; attention as any model can have it.
    quoted = f"model={json.dumps(model.removeprefix('model='))}"
    run = load_run(None, [quoted, *others, f"out={json.dumps(str(out))}", "attention=explicit", "data.seq_len=1"])
    own = folder / "tokenizer.json"
    data = {"seq_len": _seq_len(run.model)} | ({"tokenizer": str(own)} if own.is_file() else {})
    attention = "explicit" if run.model.attn_dropout else "sdpa"
    return run.model_copy(update={"attention": attention, "data": run.data.model_copy(update=data)})


def _seq_len(spec: ModelSpec) -> int:
    usual = int(RunSpec.model_fields["data"].default.seq_len)
    return min(usual, spec.max_seq) if spec.family == "gpt2" else usual


def _needed(run: RunSpec) -> Iterator[str]:
    """Fields without which the model cannot be trained, or not on its own tokens."""
    default = RunSpec()
    if run.data.tokenizer != default.data.tokenizer:
        yield f"data.tokenizer={run.data.tokenizer}"
    if run.data.seq_len != default.data.seq_len:
        yield f"data.seq_len={run.data.seq_len}"
    if run.attention != default.attention:
        yield f"attention={run.attention}"


def _equal(one: Weight, other: Weight) -> bool:
    return one.dtype == other.dtype and all(map(torch.equal, one.runs(RUN), other.runs(RUN)))


def _write(checkpoints: Path, run: RunSpec, sources: Mapping[str, Weight], folder: Path, advance: Advance) -> Path:
    if there := folders.steps(checkpoints):
        raise UserError(
            f"{checkpoints} has checkpoints, the newest of step {there[-1]}; name another folder for the run"
        )
    dtype = torch.float64 if run.precision == "float64" else torch.float32
    shapes = {f"{kind}/{name}": w.shape for kind in ("model", *MOMENTS) for name, w in sources.items()}
    total, done = sum(map(math.prod, shapes.values())) * dtype.itemsize, 0

    def stream(name: str) -> Stream:
        kind, _, public = name.partition("/")
        weight = sources[public]

        def runs() -> Iterator[Tensor]:
            nonlocal done
            for run in _master(weight, public, dtype) if kind == "model" else _zeros(weight, dtype):
                yield run
                done += run.nbytes
                advance(done, total)

        return Stream(name, dtype, weight.shape, runs)

    where = folders.place(checkpoints, 0)
    aside = folders.aside(where)
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        folders.clear_leftovers(checkpoints)
        aside.mkdir()
        boxes = {name: Box((0,) * len(shape), shape) for name, shape in shapes.items()}
        keys = {name: f"{name}@{','.join(map(str, box.offsets))}" for name, box in boxes.items()}
        streams = [stream(name) for name in shapes]
        size, stored = tensorfile.write_streams(aside / FILE, [_renamed(s, keys[s.name]) for s in streams])
        entries = {
            name: Entry(dtype, shapes[name], (StoredBox(boxes[name], FILE, keys[name], stored[keys[name]]),))
            for name in shapes
        }
        Manifest(_meta(run, folder), {FILE: size}, entries).write(aside / manifest.NAME)
        folders.put_in_place(aside, checkpoints, 0, aside / manifest.NAME)
    except folders.InPlaceError as error:
        raise RunError(str(error)) from error
    except OSError as error:
        raise RunError(f"{where} could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return where


def _renamed(stream: Stream, key: str) -> Stream:
    return Stream(key, stream.dtype, stream.shape, stream.runs)


def _meta(run: RunSpec, folder: Path) -> dict[str, object]:
    return {
        "step": 0,
        "updates": 0,
        "loss_scale": [LossScale.of(run.precision).value, 0],
        "imported": str(folder.absolute()),
        "run": run.model_dump(mode="json"),
    }


def _master(weight: Weight, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
    place = torch.empty(min(RUN, math.prod(weight.shape)), dtype=dtype)
    for run in weight.runs(RUN):
        wide = place[: run.numel()].copy_(run)
        # NaN spoils both; takes no memory.
        if not all(map(torch.isfinite, torch.aminmax(wide))):
            raise RunError(f"{weight.file}: {name} is not finite, and nobody could go on from that")
        yield wide


def _zeros(weight: Weight, dtype: torch.dtype) -> Iterator[Tensor]:
    left = math.prod(weight.shape)
    zeros = torch.zeros(min(RUN, left), dtype=dtype)
    while left:
        yield zeros[:left]
        left -= min(RUN, left)
