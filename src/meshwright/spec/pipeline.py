"""What goes with pipeline ranks: as many blocks as stages. What a schedule cannot take is said by the schedule room."""

from __future__ import annotations

from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec, divisors
from meshwright.spec.words import join, show


def check(spec: ModelSpec, layout: Layout) -> None:
    """Raise ValueError, naming what would do, for a model that cannot be cut into the layout's stages."""
    if layout.pp == 1:
        return
    split = layout.pp_split
    if isinstance(split, tuple) and sum(split) != spec.layers:
        raise ValueError(
            f"layout.pp_split={show(list(split))} deals out {sum(split)} blocks, and the model has {spec.layers}"
        )
    if layout.stages <= spec.layers:
        return
    chunks = f" × pp_chunks={layout.pp_chunks}" if layout.pp_chunks > 1 else ""
    fewer = [f"pp={n}" for n in divisors(spec.layers) if n > 1 and n * layout.pp_chunks <= spec.layers][-2:]
    if layout.pp_chunks > 1 and layout.pp <= spec.layers:
        fewer.append("fewer chunks" if 2 * layout.pp <= spec.layers else "pp_schedule=1f1b without chunks")
    raise ValueError(
        f"layout.pp={layout.pp}{chunks} makes {layout.stages} stages, and the model has {spec.layers} blocks, one at "
        f"least for each; use {join(fewer or ['pp=1'])}"
    )
