"""One pipeline stage of a plain model: the blocks [start, stop), with the embedding if it is the first and the head if
it is the last.

The model stays as it is written: `cut` takes away what other stages have, under unchanged names, and lets forward begin
with hidden states where there is no embedding, and end with them where there is no head. Both ends keep a tied table
whole, each as embedding and as head: so both have the same unit of it, cut in the same way, and know it under the same
names, though each uses it in one place.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from meshwright.model.base import LanguageModel
from meshwright.model.dropout import DropoutKey
from meshwright.spec.stages import Stage


def cut(model: LanguageModel, stage: Stage) -> None:
    """Leave of `model`, which is changed in place, what `stage` has. Forward then takes `hidden` beside the tokens."""
    if stage.whole:
        return
    for index in range(len(model.blocks)):
        if index not in stage.blocks:
            del model.blocks._modules[str(index)]
    before, behind = model.ends
    table = {before[0], behind[-1]} if model.spec.is_tied and (stage.first or stage.last) else set()
    for names, here in ((before, stage.first), (behind, stage.last)):
        for name in names:
            if not here and name not in table:
                parent, _, leaf = name.rpartition(".")
                delattr(model.get_submodule(parent), leaf)
    model.forward = partial(_forward, model, stage)  # type: ignore[method-assign]


def _forward(
    model: LanguageModel,
    stage: Stage,
    tokens: Tensor,
    targets: Tensor | None = None,
    *,
    hidden: Tensor | None = None,
    positions: Tensor | None = None,
    length: int | None = None,
    documents: Tensor | None = None,
    dropout: DropoutKey | None = None,
) -> Tensor:
    """As LanguageModel.forward, but from hidden states [B, T, D] where the stage is not the first, and to such where it
    is not the last."""
    assert (hidden is None) == stage.first, stage
    positions, length = model.placed(tokens, positions, length, documents)
    x = model.embed(tokens, positions, dropout) if hidden is None else hidden
    x = model.chain(x, tokens, positions, length, documents, dropout)
    return model.head(x, targets) if stage.last else x
