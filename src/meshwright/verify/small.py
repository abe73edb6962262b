"""A small model and batch that exercise what the large ones would: same family and options, odd sizes."""

from __future__ import annotations

import math

from meshwright.predict.params import unit_counts, units
from meshwright.predict.stages import stages_of
from meshwright.spec.batch import micro_steps
from meshwright.spec.context import grain
from meshwright.spec.layout import SPLITS, Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, RunSpec

CLIP = 0.1
"""Gradient norm that a proof clips to at most: the small models' norms are near 1, so a run's own 1.0 hardly acts."""


def small_model(spec: ModelSpec, layout: Layout) -> ModelSpec:
    """The same family, options and head grouping with two layers, or one more than pipeline stages where the model has
    as many, short heads and a vocabulary that divides nothing.

    The ranks of `layout` can share its heads and its feed-forward where they can share those of `spec`.
    """
    tp, ranks = layout.tp, layout.tp * layout.head_ranks
    heads, groups = (4, 2) if 4 % ranks == 0 else (2 * ranks, math.gcd(spec.num_kv_heads, ranks))
    kv_heads = {spec.heads: None, 1: 1}.get(spec.num_kv_heads, groups)  # as many as heads, a single one, or groups
    layers = min(spec.layers, 2 if layout.pp == 1 else layout.stages + 1)
    size = {"layers": layers, "vocab": 101, "heads": heads, "hidden": 8 * heads, "head_dim": None}
    if spec.family == "llama":
        size |= {"kv_heads": kv_heads, "ffn": _up(56, tp)}
        if spec.head_dim is not None:
            size["head_dim"] = 12
        if spec.window is not None:
            size["window"] = min(spec.window, 8)
    else:
        size |= {"ffn": None if spec.ffn is None else _up(72, tp)}
    return ModelSpec.model_validate(spec.model_dump() | size)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def small_layout(layout: Layout, large: ModelSpec, small: ModelSpec) -> Layout:
    """The layout with `zero_join` as much smaller as a block is, so that a unit joins about as many blocks.

    The small model has two blocks only: where the large one has several units, its `zero_join` leaves two at least.
    """
    uneven = layout.pp_split
    if isinstance(uneven, str) and uneven not in SPLITS:  # a file, perhaps of each block of the large model
        uneven = tuple(len(stage.blocks) for stage in stages_of(large, layout, large.max_seq))
    if isinstance(uneven, tuple):
        # As uneven as it was, where there is a block to spare.
        longest, spare = uneven.index(max(uneven)), small.layers - layout.stages
        split = tuple(1 + spare * (stage == longest) for stage in range(layout.stages))
        layout = layout.model_copy(update={"pp_split": split})
    if not layout.join:
        return layout
    held = unit_counts(small, layout=layout)
    join = layout.join * held["blocks.0"] / unit_counts(large, layout=layout)["blocks.0"]
    if sum(not unit.tied for unit in units(large, layout.join, layout).values()) > 1:
        join = min(join, sum(held.values()) / 3)
    return layout.model_copy(update={"zero_join": max(round(join), 1)})


def small_run(run: RunSpec, seq_len: int = 24, micro: int = 2, accumulate: int = 3) -> RunSpec:
    """`run` over the small model, with uneven parts: one sequence short of `accumulate` full micro-batches a rank. A
    pipeline has one more of them than ranks at least, or as many as its schedule file.

    Sequences have `seq_len` tokens, or as many as the model has positions. Where the run clips, so does every step.
    """
    if run.layout.schedule_file:
        accumulate = micro_steps(run.batch.sequences, run.layout.data_ranks, run.batch.micro)
    elif run.layout.pp > 1:
        accumulate = max(accumulate, run.layout.pp + 1)
    sequences = max(run.layout.data_ranks * micro * accumulate - 1, 1)
    clip = run.optimizer.clip
    model, each = small_model(run.model, run.layout), grain(run.layout)
    length = max(min(seq_len, run.model.max_seq) // each, 1) * each
    return RunSpec.model_validate(
        run.model_dump()
        | {
            "model": model.model_dump(),
            "layout": small_layout(run.layout, run.model, model).model_dump(),
            "optimizer": run.optimizer.model_dump() | {"clip": None if clip is None else min(clip, CLIP)},
            "data": run.data.model_dump() | {"seq_len": length},
            "batch": Batch(sequences=sequences, micro=micro).model_dump(),
        }
    )
