from __future__ import annotations

import numpy as np
import pytest
import torch

from meshwright.model.loss import IGNORE
from meshwright.spec.batch import micro_batches
from meshwright.spec.errors import UserError
from meshwright.train.data import Dataset


@pytest.fixture
def tokens(tmp_path):
    """41 different tokens: samples of 4 begin at 0, 4, … 36, and the last has one target that is missing."""
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(100, 143, dtype=np.uint8))
    return path


def test_targets_are_the_next_tokens_and_the_end_is_padded(tokens):
    data = Dataset(tokens, 4, seed=0)
    assert len(data) == 11
    got, targets = data.batch(torch.tensor([0, 10]))
    assert got.tolist() == [[100, 101, 102, 103], [140, 141, 142, 0]]
    assert targets.tolist() == [[101, 102, 103, 104], [141, 142, IGNORE, IGNORE]]
    assert got.dtype == targets.dtype == torch.int64


def test_every_token_but_the_first_is_a_target_once(tokens):
    _, targets = Dataset(tokens, 4, seed=0).batch(torch.arange(11))
    assert sorted(targets[targets != IGNORE].tolist()) == list(range(101, 143))


def test_an_exact_fit_has_no_empty_sample(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(9, dtype=np.uint16))
    data = Dataset(tmp_path / "t.npy", 4, seed=0)
    assert len(data) == 2
    assert (data.batch(torch.arange(2))[1] != IGNORE).all()


def test_epochs_cover_each_sample_once_in_changing_orders(tokens):
    """Steps of 3 over 11 samples for 2.5 epochs: steps lie across the epochs' borders."""
    data = Dataset(tokens, 4, seed=0)
    stream = torch.cat([data.ids(step, 3) for step in range(9)]).tolist()
    first, second, third = stream[:11], stream[11:22], stream[22:]
    assert sorted(first) == sorted(second) == list(range(11))
    assert len(set(third)) == 5
    assert first != second and first[:5] != third


def test_ids_depend_on_seed_and_step_alone(tokens):
    data = Dataset(tokens, 4, seed=7)
    late = data.ids(8, 3)
    data.ids(0, 3)  # going back in time, as a fresh process would never do
    assert torch.equal(data.ids(8, 3), late)
    assert torch.equal(Dataset(tokens, 4, seed=7).ids(8, 3), late)
    assert not torch.equal(torch.cat([Dataset(tokens, 4, seed=8).ids(s, 11) for s in range(2)]),
                           torch.cat([data.ids(s, 11) for s in range(2)]))  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_take_the_step_apart_and_lose_nothing(tokens, ranks):
    data = Dataset(tokens, 4, seed=0)
    ids = data.ids(1, 7)
    dealt = [ids[m.start : m.stop] for r in range(ranks) for m in micro_batches(7, ranks, r, 2)]
    assert torch.equal(torch.cat(dealt), ids)


def test_an_empty_part(tokens):
    got, targets = Dataset(tokens, 4, seed=0).batch(torch.empty(0, dtype=torch.int64))
    assert got.shape == targets.shape == (0, 4)


def test_spread(tokens):
    data = Dataset(tokens, 4, seed=0)
    assert data.spread(3).tolist() == [0, 3, 7]
    assert data.spread(100).tolist() == list(range(11))


def test_one_token_is_no_sample(tmp_path):
    np.save(tmp_path / "t.npy", np.zeros(1, dtype=np.uint8))
    with pytest.raises(UserError, match="holds 1 tokens"):
        Dataset(tmp_path / "t.npy", 4, seed=0)


@pytest.fixture
def packed(tokens):
    """Documents of 3, 1, 6, 4 and 29 tokens: one ends within a sample, one is one token, one ends where a sample
    does."""
    path = tokens.with_name("tokens-documents.npy")
    np.save(path, np.array([0, 3, 4, 10, 14], dtype=np.uint16))
    return Dataset(tokens, 4, seed=0, documents=path)


def test_the_last_token_of_a_document_has_no_target(packed):
    """Also where it is the last of a sample: the first sample's is the document of one token."""
    got, targets = packed.batch(torch.tensor([0, 1, 2, 3]))
    assert got[0].tolist() == [100, 101, 102, 103]
    assert targets.tolist() == [
        [101, 102, IGNORE, IGNORE], [105, 106, 107, 108], [109, IGNORE, 111, 112], [113, IGNORE, 115, 116]
    ]  # fmt: skip


def test_the_document_of_each_position(packed):
    """A document that goes on from the sample before is the first one; what pads the last sample is none of them."""
    assert packed.documents(torch.tensor([0, 1, 2, 3, 4, 10])).tolist() == [
        [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]
    ]  # fmt: skip
    assert packed.documents(torch.empty(0, dtype=torch.int64)).shape == (0, 4)
    assert [packed.lengths(sample).tolist() for sample in (0, 1, 10)] == [[3, 1], [4], [3, 1]]


def test_without_documents_there_are_none(tokens):
    data = Dataset(tokens, 4, seed=0)
    assert data.documents(torch.arange(3)) is None and data.lengths(10).tolist() == [4]
