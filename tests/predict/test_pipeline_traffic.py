"""What pipeline ranks send, counted by hand: messages between stages, and what ZeRO moves of each stage."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.predict.traffic import MOST_MICROS, traffic
from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import Batch, Data, RunSpec

# A table of 10 · 8; positions of 16 · 8; blocks of 12 · 8² + 13 · 8; a head of 16: GPT-2, tied.
GPT2 = ModelSpec(family="gpt2", vocab=10, hidden=8, layers=4, heads=2, max_seq=16)
TABLE, POSITIONS, BLOCK, NORM = 80, 128, 872, 16
HIDDEN = 2 * 16 * 8 * 4  # of a micro-batch of two sequences


def run_of(sequences: int, model: ModelSpec = GPT2, **fields: Any) -> RunSpec:
    return RunSpec(model=model, batch=Batch(sequences=sequences, micro=2), data=Data(seq_len=16), **fields)


def rows(run: RunSpec, rank: int = 0, /, **layout: Any) -> dict[tuple[str, str, str, str, int | None], tuple[int, int]]:
    """Count and payload by operation, axis, reason, phase and micro-batch."""
    found = traffic(run, Layout(**{"dp": 1, "zero_join": 0, **layout}), rank)
    keys = [row.key for row in found]
    assert len(set(keys)) == len(keys)
    return {
        (k.operation, k.axis, k.reason, k.phase, k.micro): (r.count, r.payload)
        for k, r in zip(keys, found, strict=True)
    }


def of(found: dict[tuple[str, str, str, str, int | None], tuple[int, int]], reason: str) -> dict[Any, tuple[int, int]]:
    """Those of one reason, by operation, phase and micro-batch."""
    return {(key[0], key[3], key[4]): value for key, value in found.items() if key[2] == reason}


def test_messages_of_a_first_a_middle_and_a_last_rank() -> None:
    run = run_of(3)  # micro-batches of two sequences and of one
    sizes = {0: (1, HIDDEN), 1: (1, HIDDEN // 2)}
    sent = {("send", "forward", micro): size for micro, size in sizes.items()}
    received = {("recv", "forward", micro): size for micro, size in sizes.items()}
    sent_back = {("send", "backward", micro): size for micro, size in sizes.items()}
    received_back = {("recv", "backward", micro): size for micro, size in sizes.items()}
    for schedule in ("1f1b", "gpipe", "naive"):
        first, middle, last = (rows(run, rank, pp=3, pp_schedule=schedule) for rank in range(3))
        assert of(first, "pp.activations") == sent and of(first, "pp.gradients") == received_back
        assert of(middle, "pp.activations") == sent | received
        assert of(middle, "pp.gradients") == sent_back | received_back
        assert of(last, "pp.activations") == received and of(last, "pp.gradients") == sent_back


def test_a_send_goes_out_whole_and_a_receive_sends_nothing() -> None:
    wires = {row.key.operation: row.wire for row in traffic(run_of(2), Layout(dp=1, pp=3), 1) if row.key.axis == "pp"}
    assert (wires["send"], wires["recv"]) == (HIDDEN, 0)


def test_with_chunks_a_rank_has_a_message_for_each_of_its_stages() -> None:
    """Two ranks, stages 0 and 2, 1 and 3: the first sends on from both and receives for one, backward likewise."""
    run = run_of(4)
    first, last = (rows(run, rank, pp=2, pp_schedule="interleaved", pp_chunks=2) for rank in range(2))
    for micro in range(2):
        assert of(first, "pp.activations")["send", "forward", micro] == (2, 2 * HIDDEN)
        assert of(first, "pp.activations")["recv", "forward", micro] == (1, HIDDEN)
        assert of(last, "pp.activations")["send", "forward", micro] == (1, HIDDEN)
        assert of(last, "pp.activations")["recv", "forward", micro] == (2, 2 * HIDDEN)
        assert of(first, "pp.gradients")["send", "backward", micro] == (1, HIDDEN)
        assert of(last, "pp.gradients")["send", "backward", micro] == (2, 2 * HIDDEN)


def test_a_message_is_this_ranks_part_of_the_hidden_states() -> None:
    run = run_of(2, precision="bf16")
    for layout, part in (
        ({"tp": 2}, 1),  # all tensor ranks send the whole sequence
        ({"tp": 2, "sp": True}, 2),
        ({"cp": 2}, 2),
        ({"tp": 2, "sp": True, "cp": 2}, 4),
    ):
        assert of(rows(run, pp=2, **layout), "pp.activations")["send", "forward", 0] == (1, HIDDEN // 2 // part)


def test_an_empty_micro_batch_has_no_message_unless_nothing_is_computed_for_others() -> None:
    run = run_of(5)  # over two data ranks three and two: the second has nothing in micro-batch 1
    for zero in range(3):
        second = rows(run, 1, dp=2, pp=2, zero=zero)
        assert {key[2] for key in of(second, "pp.activations")} == {0}
    assert {key[2] for key in of(rows(run, 0, dp=2, pp=2), "pp.activations")} == {0, 1}
    second = of(rows(run, 1, dp=2, pp=2, zero=3), "pp.activations")
    assert second["send", "forward", 1] == (1, 8 * 4)  # one token
    sizes = of(rows(run, 2, dp=2, pp=2, tp=2, sp=True, zero=3), "pp.activations")
    assert sizes["send", "forward", 1] == (1, 8 * 4)  # two tokens, over two ranks
    assert ("send", "forward", 1) not in of(rows(run, 1, dp=2, pp=2, zero=3, zero_shard=1), "pp.activations")


FIRST, LAST = [TABLE, POSITIONS, BLOCK, BLOCK], [TABLE, BLOCK, BLOCK, NORM]


@pytest.mark.parametrize("place", [0, 1])
def test_zero_moves_the_units_of_a_ranks_stages(place: int) -> None:
    run = run_of(8)  # two micro-batches on each of two data ranks
    units = (FIRST, LAST)[place]
    every = (len(units), 4 * sum(units))

    def at(zero: int, **fields: Any) -> dict[tuple[str, str, str, str, int | None], tuple[int, int]]:
        layout = {"dp": 2, "pp": 2, "zero": zero, "pp_split": "layers", **fields}
        return rows(run, Layout(**layout).rank_at({"pp": place}), **layout)

    assert of(at(0), "zero.reduce") == {("all_reduce", "backward", None): every}
    assert of(at(1), "zero.reduce") == {("reduce_scatter", "backward", None): every}
    assert of(at(1), "zero.gather") == of(at(2), "zero.gather") == {("all_gather", "step", None): every}
    reduced = {("reduce_scatter", "backward", micro): every for micro in range(2)}
    assert of(at(2), "zero.reduce") == of(at(3), "zero.reduce") == reduced
    # At stage 3 backward gathers again what it reads: no table that is looked up, but every other unit.
    again = [BLOCK, BLOCK] if place == 0 else LAST
    assert of(at(3), "zero.gather") == {
        **{("all_gather", "forward", micro): every for micro in range(2)},
        **{("all_gather", "backward", micro): (len(again), 4 * sum(again)) for micro in range(2)},
    }
    assert of(at(3, zero_gather="step"), "zero.gather") == {("all_gather", "forward", 0): every}


def test_zero_of_several_stages_is_that_of_each() -> None:
    """Of ranks with stages 0 and 2, 1 and 3, of a block each."""
    run = run_of(8)
    layout: dict[str, Any] = {"dp": 2, "pp": 2, "zero": 3, "pp_schedule": "interleaved", "pp_chunks": 2}
    first, last = rows(run, 0, **layout), rows(run, 2, **layout)
    assert of(first, "zero.gather")["all_gather", "forward", 0] == (4, 4 * (TABLE + POSITIONS + 2 * BLOCK))
    assert of(first, "zero.gather")["all_gather", "backward", 0] == (2, 4 * 2 * BLOCK)
    assert of(last, "zero.gather")["all_gather", "backward", 1] == (4, 4 * (2 * BLOCK + TABLE + NORM))


def test_both_ends_sum_up_a_tied_tables_gradients() -> None:
    """Each data rank those of its shard, without what fills it up."""
    run = run_of(8, GPT2.model_copy(update={"vocab": 9}))
    key = ("all_reduce", "pp.ends", "pp.tied", "step", None)
    for zero, sizes in ((0, [72] * 5), (1, [15, 15, 15, 15, 12]), (3, [15, 15, 15, 15, 12])):
        found = [rows(run, rank, dp=5, pp=3, zero=zero).get(key) for rank in range(15)]
        assert found[:5] == found[10:] == [(1, 4 * size) for size in sizes]
        assert found[5:10] == [None] * 5
    cut = rows(run, 0, pp=3, tp=2)[key]
    assert cut == (1, 4 * 5 * 8)  # five of ten rows, one of them behind the vocabulary's end
    narrow = run_of(8, precision="bf16", grad_dtype="bf16")
    assert rows(narrow, 0, pp=2)[key] == (1, 2 * TABLE)
    untied = GPT2.model_copy(update={"tied": False})
    assert key not in rows(run_of(8, untied), 0, pp=2)
    assert key not in rows(run, 0)


def test_a_tied_table_waits_for_no_one_where_a_shard_has_none_of_it() -> None:
    """More data ranks than elements: those behind hold what fills up."""
    run = run_of(8, GPT2.model_copy(update={"vocab": 1}))
    key = ("all_reduce", "pp.ends", "pp.tied", "step", None)
    found = [rows(run, rank, dp=10, pp=2, zero=1).get(key) for rank in range(20)]
    assert found == [*[(1, 4)] * 8, None, None] * 2


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ({"pp": 2}, "pp"),
        ({"pp": 2, "dp": 2}, "dp+pp"),
        ({"pp": 2, "tp": 2}, "tp+pp"),
        ({"pp": 2, "tp": 2, "cp": 2, "dp": 2, "order": ("pp", "tp", "cp", "dp")}, "dp+cp+tp+pp"),
    ],
    ids=str,
)
def test_everyone_agrees_on_the_step(layout: dict[str, Any], axes: str) -> None:
    found = rows(run_of(8), **layout)
    assert found["all_reduce", axes, "step.norm", "step", None] == (1, 8)
    assert found["all_reduce", axes, "step.metrics", "step", None] == (1, 24)
    assert len([key for key in found if key[2].startswith("step.")]) == 2


def test_tensor_ranks_sum_up_once_a_stage() -> None:
    """With sequence parallelism: positions and two blocks' norms and row biases; of the others these, and the norm."""
    run = run_of(8)
    block = 6 * 8
    layout: dict[str, Any] = {"pp": 2, "tp": 2, "sp": True}
    key = ("all_reduce", "tp", "tp.partial", "step", None)
    assert rows(run, 0, **layout, pp_split="layers")[key] == (1, 4 * (POSITIONS + 2 * block))
    assert rows(run, 2, **layout, pp_split="layers")[key] == (1, 4 * (2 * block + NORM))
    chunks = {"pp_schedule": "interleaved", "pp_chunks": 2}
    assert rows(run, 0, **layout, **chunks)[key] == (2, 4 * (POSITIONS + 2 * block))


def test_recompute_sends_again_by_the_regions_of_stages() -> None:
    """Four blocks, three of which make a region where all are one rank's: there two of its sums come again and none of
    the fourth; of two stages of two blocks, one each."""
    run = run_of(8)
    fields: dict[str, Any] = {"tp": 2, "recompute": "full", "recompute_every": 3}
    key = ("all_reduce", "tp", "tp.mlp", "recompute", 0)
    assert rows(run, 0, **fields)[key][0] == 2
    assert [rows(run, rank, **fields, pp=2, pp_split="layers")[key][0] for rank in (0, 2)] == [1, 1]
    assert rows(run, 0, **fields, pp=2, pp_split=(3, 1))[key][0] == 2
    assert key not in rows(run, 2, **fields, pp=2, pp_split=(3, 1))
    # Two stages of a block each are two regions, though a rank has both.
    assert key not in rows(run, 0, **fields, pp=2, pp_schedule="interleaved", pp_chunks=2)


def test_too_many_micro_batches_for_rows_are_refused() -> None:
    with pytest.raises(UserError, match="each with messages of its own at pp=2"):
        traffic(run_of(2 * MOST_MICROS + 2), Layout(dp=1, pp=2))
