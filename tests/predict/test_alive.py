"""What is alive where backward is, counted by hand for a model of four small blocks."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.predict.activations import Parts, Storage
from meshwright.predict.alive import Alive
from meshwright.spec.layout import Layout

BEFORE, INPUT, LINEAR, CORE, INNER, HEAD, LOSS = 8, 100, 10, 20, 40, 1000, 7
SAVED = INPUT + CORE + INNER


def block(index: int) -> tuple[Storage, ...]:
    return (
        Storage(f"layers.{index}.norm", "input", INPUT),
        Storage(f"layers.{index}.attn", "projected", LINEAR, "linear", saved=False),
        Storage(f"layers.{index}.attn", "core", CORE, "attention"),
        Storage(f"layers.{index}.mlp", "inner", INNER),
        Storage(f"layers.{index}.mlp", "output", 5, "linear", saved=False),  # behind the last that is saved: never kept
    )


PARTS = Parts(
    (Storage("embed", "positions", BEFORE),),
    tuple(map(block, range(4))),
    (Storage("head", "states", HEAD),),
    (Storage("head", "log-softmax", LOSS),),
)


def alive(**layout: Any) -> Alive:
    return Alive(PARTS, Layout(dp=1, **layout))


@pytest.mark.parametrize(
    ("layout", "kept"),
    [
        ({}, SAVED),
        ({"recompute": "full"}, INPUT),
        ({"recompute": "selective"}, INPUT + LINEAR),
        ({"recompute": "selective", "recompute_keep": ("linear", "attention")}, INPUT + LINEAR + CORE),
    ],
)
def test_a_block_stands_on_what_the_blocks_before_it_keep(layout, kept):
    found = alive(**layout)
    assert found.block_begins == [BEFORE + index * kept for index in range(4)]
    assert found.block_ends == [begin + SAVED for begin in found.block_begins]
    assert found.before("head") == BEFORE + 4 * kept
    assert found.logits == found.before("head") + HEAD
    assert found.everything == found.before("nowhere") == found.logits + LOSS
    assert found.before("layers.2.mlp") == found.before("nowhere", "layers.2.mlp") == found.block_ends[2] - INNER


def test_the_blocks_of_a_region_are_all_there_once_it_is_computed_again():
    found = alive(recompute="full", recompute_every=3)
    first, last = BEFORE, BEFORE + INPUT
    assert found.block_begins == [first, first + SAVED, first + 2 * SAVED, last]
    assert found.block_ends == [first + SAVED, first + 2 * SAVED, first + 3 * SAVED, last + SAVED]


def test_while_a_block_is_computed_again_its_kept_outputs_wait_for_their_turn():
    found = alive(recompute="selective", recompute_keep=("linear", "attention"))
    for index, begin in enumerate(found.block_begins):
        assert found.recomputing(index, "input") == begin + LINEAR + CORE
        assert found.recomputing(index, "projected") == begin + INPUT + LINEAR + CORE
        assert found.recomputing(index, "core") == begin + INPUT + CORE  # nothing is left of what is not saved
        assert found.recomputing(index, "inner") == begin + INPUT + CORE
    assert alive(recompute="selective").recomputing(3, "core") == alive(recompute="selective").block_begins[3] + INPUT


def test_offloaded_the_device_has_what_is_saved_of_the_region_alone():
    found = alive(offload="activations", recompute="full", recompute_every=2)
    assert found.block_begins == [0, SAVED] * 2
    assert found.block_ends == [SAVED, 2 * SAVED] * 2
    assert found.everything == HEAD + LOSS


def test_without_a_sequence_nothing_is():
    found = Alive(Parts((), ((),) * 4, (), ()), Layout(dp=1, recompute="selective"))
    assert found.everything == found.recomputing(3, "core") == 0
    assert found.block_begins == found.block_ends == [0] * 4
