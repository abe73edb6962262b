"""What a forward gets: each rank's part of tokens, targets, positions and documents."""

from __future__ import annotations

import pytest
import torch

from meshwright.model.documents import positions_inside
from meshwright.model.loss import IGNORE
from meshwright.predict.memory import memory
from meshwright.spec.layout import Layout
from meshwright.spec.run import Batch, Data, RunSpec
from meshwright.spec.sequence import positions
from meshwright.train.inputs import Inputs, Share

CPU = torch.device("cpu")
TOKENS = torch.arange(8)[None]
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])


def parts(documents: torch.Tensor | None = None, **layout: object) -> list[Inputs]:
    targets = torch.cat((TOKENS[:, 1:], torch.tensor([[IGNORE]])), dim=1)
    cut = Layout(dp=1, **layout)  # type: ignore[arg-type]
    return [Share(cut, place, 8, CPU).of(TOKENS, targets, documents) for place in range(cut.cp)]


def test_targets_are_those_of_the_whole_sequence() -> None:
    zigzag = parts(cp=2)
    assert [part.targets.tolist() for part in zigzag] == [[[1, 2, 7, IGNORE]], [[3, 4, 5, 6]]]
    assert [part.positions.tolist() for part in zigzag if part.positions is not None] == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_positions_are_those_in_the_document_and_masks_those_in_the_sequence() -> None:
    for order, places in (("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]]), ("striped", [[0, 2, 4, 6], [1, 3, 5, 7]])):
        for part, mine in zip(parts(DOCUMENTS, cp=2, cp_order=order), places, strict=True):
            assert part.tokens.tolist() == [mine] and part.places is not None and part.positions is not None
            assert part.positions.tolist() == [[place - 3 if place >= 3 else place for place in mine]]
            assert part.places.tolist() == mine
            assert part.key(0, 0, torch.zeros(1)).positions is part.places
            assert part.documents is DOCUMENTS


def test_one_device_leaves_positions_to_the_model() -> None:
    (alone,) = parts(DOCUMENTS)
    assert alone.positions is None and alone.places is None and torch.equal(alone.documents, DOCUMENTS)
    assert len(alone.tensors) == 3 and len(parts()[0].tensors) == 2


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["none", "documents"])
def test_their_bytes_are_predicted(cp: int, documents: torch.Tensor | None) -> None:
    """Of each tensor once; on an accelerator without the documents of whole sequences, which stay on the host."""
    run = RunSpec(
        data=Data(seq_len=8, packing="none" if documents is None else "documents"), batch=Batch(sequences=1, micro=1)
    )
    for part in parts(documents, cp=cp):
        held = {id(t): t.nbytes for t in part.tensors}
        on_host = documents.nbytes if documents is not None and cp > 1 else 0
        for device, bytes_ in (("cpu", sum(held.values())), ("cuda", sum(held.values()) - on_host)):
            assert memory(run, Layout(dp=1, cp=cp), 0, device).categories["inputs"] == bytes_  # type: ignore[arg-type]


def test_documents_that_are_cut_each_by_itself_begin_anew_too() -> None:
    """Documents [0, 4, 8] over two ranks in zigzag (transformer-engine's layout of packed sequences)."""
    mine = positions(8, 2, 0, "zigzag", documents=(0, 4, 8))
    assert mine == [0, 3, 4, 7]
    assert positions_inside(torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]]))[0, mine].tolist() == [0, 3, 0, 3]
