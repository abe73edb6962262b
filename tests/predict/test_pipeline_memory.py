"""Micro-batches in flight: what pipeline ranks keep at once, and where in the step they hold most."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from meshwright.predict.activations import saved, total
from meshwright.predict.flight import Flight, kept_at_once, micros_at_once
from meshwright.predict.memory import memory
from meshwright.predict.modes import fit, largest, largest_micro, modes
from meshwright.predict.peak import moments_on
from meshwright.predict.report import predict
from meshwright.predict.stages import schedule_of, stages_of, stages_on
from meshwright.predict.states import padded
from meshwright.schedule import check
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import Batch, Checkpoint, Data, RunSpec
from meshwright.spec.traffic import SENT_TOGETHER

LLAMA = ModelSpec(family="llama", vocab=33, hidden=16, layers=8, heads=4, kv_heads=2, ffn=24, max_seq=32)
HIDDEN = 16 * 16 * 4  # bytes of a micro-batch of one sequence


def run_of(sequences: int, micro: int = 1, model: ModelSpec = LLAMA, **fields: Any) -> RunSpec:
    fields.setdefault("checkpoint", Checkpoint(every=0))
    batch = Batch(sequences=sequences, micro=micro)
    return RunSpec(model=model, batch=batch, data=Data(seq_len=16), device="cpu", **fields)


def pipeline(**fields: Any) -> Layout:
    return Layout(**{"dp": 1, "pp": 4, "zero_join": 0, **fields})


def kept(run: RunSpec, layout: Layout, rank: int = 0) -> int:
    return total(kept_at_once(run, layout, rank))


def of_stage(run: RunSpec, layout: Layout, stage: int, batch: int = 1) -> int:
    """What one micro-batch keeps."""
    every = stages_of(run.model, layout, run.data.seq_len)
    return total(saved(run.model, layout, batch=batch, seq=run.data.seq_len, stage=every[stage], loss=run.loss))


def test_1f1b_keeps_no_more_of_many_micro_batches_than_of_few_and_gpipe_keeps_all() -> None:
    few, many = run_of(4), run_of(16)
    for rank in range(4):
        assert (
            kept(many, pipeline(), rank) == kept(few, pipeline(), rank) == (4 - rank) * of_stage(many, pipeline(), rank)
        )
        gpipe, naive = pipeline(pp_schedule="gpipe"), pipeline(pp_schedule="naive")
        assert kept(many, gpipe, rank) == 4 * kept(few, gpipe, rank) == 16 * of_stage(many, gpipe, rank)
        assert kept(many, naive, rank) == of_stage(many, naive, rank)
    assert kept(run_of(2), pipeline()) == 2 * of_stage(many, pipeline(), 0)  # there are no more


@pytest.mark.parametrize("micros", [3, 8, 16])
def test_interleaved_ranks_keep_what_the_checked_schedule_says(micros: int) -> None:
    """The most that any of its combinations of counts comes to."""
    run, layout = run_of(micros), pipeline(pp=2, pp_schedule="interleaved", pp_chunks=4)
    checked = check(schedule_of(run, layout))
    for rank in range(2):
        stages = [stage.index for stage in stages_on(run, layout, rank)]
        assert stages == list(range(rank, 8, 2))
        sizes = [of_stage(run, layout, stage) for stage in stages]
        combinations = (
            sum(n * size for n, size in zip(counts, sizes, strict=True)) for counts in checked.together[rank]
        )
        assert kept(run, layout, rank) == max(combinations)


def test_micro_batches_count_by_their_own_sizes() -> None:
    """Seven sequences by three: two micro-batches of three and one of one."""
    run = run_of(7, micro=3)
    layout = pipeline()
    assert kept(run, layout) == 2 * of_stage(run, layout, 0, 3) + of_stage(run, layout, 0, 1)
    assert micros_at_once(run, layout, 0) == [(3, 16), (3, 16), (1, 16)]
    # Of two data ranks one has four sequences and the other three, and nothing in its second micro-batch.
    two = pipeline(dp=2)
    assert kept(run, two, 0) == of_stage(run, two, 0, 3) + of_stage(run, two, 0, 1)
    assert kept(run, two, 1) == of_stage(run, two, 0, 3)
    # At ZeRO 3 it computes one token there, for the other's gathers.
    three = pipeline(dp=2, zero=3)
    first = stages_of(LLAMA, three, 16)[0]
    assert kept(run, three, 1) == of_stage(run, three, 0, 3) + total(saved(LLAMA, batch=1, seq=1, stage=first))


def test_of_moments_that_keep_as_much_the_first_is_told() -> None:
    """1f1b goes on keeping as much; what a measurement finds first is what is compared with it, tensor by tensor."""
    assert Flight(run_of(8), pipeline(), 1, cpu=True).fullest == ((1, 0), (1, 1), (1, 2))


def test_what_is_empty_is_never_in_flight() -> None:
    """Of three data ranks the last has two sequences, and nothing in the second micro-batch of two."""
    run, layout = run_of(8, micro=2), pipeline(dp=3)  # three, three and two sequences
    assert [micro for _, micro in Flight(run, layout, 2, cpu=True).fullest] == [0]
    assert micros_at_once(run, layout, 2) == [(2, 16)]
    assert {load.micro for load in Flight(run, layout, 2, cpu=True).heaviest()} == {(2, 16)}


def test_recompute_keeps_the_inputs_of_a_stages_regions() -> None:
    """GPipe as in its paper: of each micro-batch its input alone, where a stage is one region."""
    run = run_of(16)
    whole = pipeline(pp_schedule="gpipe", recompute="full", recompute_every=2)
    assert [kept(run, whole, rank) for rank in range(1, 3)] == [16 * HIDDEN] * 2
    each = pipeline(pp_schedule="gpipe", recompute="full")
    assert kept(run, each, 1) == 16 * 2 * HIDDEN
    rows = Counter(row.where for row in kept_at_once(run, whole, 1))
    assert rows == {"model.layers.3": 16}  # put by with the region's last block


def test_only_the_last_stage_keeps_logits() -> None:
    run = run_of(16)
    words = [any(row.where == "lm_head" for row in kept_at_once(run, pipeline(), rank)) for rank in range(4)]
    assert words == [False, False, False, True]


def test_the_load_beside_a_backward() -> None:
    """Stage 1 of 1f1b: of micro-batch 0's backward two others are in flight, and the next two inputs are asked for."""
    run, layout = run_of(8), pipeline()
    (load,) = Flight(run, layout, 1, cpu=True).heaviest()
    assert (load.stage.index, load.micro, load.others) == (1, (1, 16), 2)
    assert load.activations == 2 * of_stage(run, layout, 1)
    assert load.received == 2 * HIDDEN and load.gathered == 0
    (naive,) = Flight(run, pipeline(pp_schedule="naive"), 1, cpu=True).heaviest()
    assert (naive.others, naive.activations) == (0, 0)


def test_messages_that_have_left_are_counted_until_they_are_let_go() -> None:
    """At a late backward of the last stage six gradients have been sent, and a last input is asked for. On the CPU
    small ones stay until they are as many bytes as one that goes at once; an accelerator has the last two."""
    small, layout = run_of(8), pipeline()
    (here,), (there,) = (Flight(small, layout, 3, cpu=cpu).heaviest() for cpu in (True, False))
    assert (here.sent, here.received) == (6 * HIDDEN, HIDDEN) and there.sent == 2 * HIDDEN
    large = run_of(8 * 256, micro=256)
    assert 256 * HIDDEN == SENT_TOGETHER
    (here,), (there,) = (Flight(large, layout, 3, cpu=cpu).heaviest() for cpu in (True, False))
    assert (here.sent, there.sent) == (0, 2 * SENT_TOGETHER)
    middling = run_of(8 * 100, micro=100)  # the third of them makes them many enough
    assert {load.sent for load in Flight(middling, layout, 3, cpu=True).heaviest()} <= {0, 100 * HIDDEN, 200 * HIDDEN}


def test_with_zero_gather_step_the_other_stages_units_are_there() -> None:
    run = run_of(8)
    fields: dict[str, Any] = {"pp": 2, "dp": 2, "zero": 3, "pp_schedule": "interleaved", "pp_chunks": 2}
    layout = pipeline(**fields, zero_gather="step")
    first, third = stages_on(run, layout, 0)
    held = {stage: 4 * sum(padded(run, layout, stage).values()) for stage in (first, third)}
    loads = Flight(run, layout, 0, cpu=True).heaviest()
    assert {load.stage: load.gathered for load in loads} == {first: held[third], third: held[first]}
    assert all(load.gathered == 0 for load in Flight(run, pipeline(**fields), 0, cpu=True).heaviest())


def test_the_moments_are_those_of_the_ranks_blocks_and_ends() -> None:
    run, layout = run_of(8), pipeline()
    for rank, ends in enumerate(({"embedding"}, set(), set(), {"loss", "head", "final norm"})):
        blocks = stages_on(run, layout, rank)[0].blocks
        expected = {f"{part} of block {index}" for part in ("MLP", "attention") for index in blocks} | ends
        found = [moment.what for moment in moments_on(run, layout, rank, cpu=True)]
        number = 4 - rank
        flying = f", {number} micro-batch{'es' * (number != 1)} in flight"
        assert {what.removesuffix(flying) for what in found} == expected | {"update"}
        assert all(what.endswith(flying) for what in found if what != "update")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("zero", range(4))
def test_a_moment_of_a_stage_has_what_the_same_blocks_have_alone(zero: int, device: str) -> None:
    """A rank in the middle, with one micro-batch in flight, beside one that has a whole model of as many blocks: what
    its own blocks hold at the MLP is the same."""
    run = run_of(1)
    layout = pipeline(zero=zero, dp=2)
    short = run.model_copy(update={"model": LLAMA.model_copy(update={"layers": 2})})
    alone = [m for m in moments_on(short, Layout(dp=2, zero=zero, zero_join=0), 0, cpu=device == "cpu")]
    there = [m for m in moments_on(run, layout, layout.rank_at({"pp": 1}), cpu=device == "cpu")]
    block = stages_on(run, layout, layout.rank_at({"pp": 1}))[0].start
    mine = [m for m in there if m.what == f"MLP of block {block}, 1 micro-batch in flight"]
    theirs = [m for m in alone if m.what == "MLP of block 0"]
    for lines in ("activations", "fresh gradients", "temporaries"):
        assert [m.lines[lines] for m in mine] == [m.lines[lines] for m in theirs] != [], lines


def test_a_tied_tables_gradient_waits_for_no_embedding() -> None:
    run = run_of(8, model=LLAMA.model_copy(update={"tied": True}))
    for moment in moments_on(run, pipeline(), 3, cpu=False):
        table = 4 * 33 * 16 if moment.what.startswith("head") else 0
        largest_weight = 4 * 16 * 24 if moment.what.startswith("MLP") else 0
        assert moment.lines["fresh gradients"] in (table, largest_weight, 0)


@pytest.mark.parametrize("schedule", [{}, {"pp_schedule": "gpipe"}, {"pp_schedule": "interleaved", "pp_chunks": 2}])
def test_offloaded_micro_batches_wait_on_the_host(schedule: dict[str, Any]) -> None:
    run = run_of(16).model_copy(update={"device": "cuda"})
    layout = pipeline(**schedule, offload="activations")
    for rank in range(4):
        here, away = memory(run, pipeline(**schedule), rank), memory(run, layout, rank)
        assert away.host["offloaded activations"] == total(kept_at_once(run, layout, rank, cpu=False))
        one = max(of_stage(run, layout, stage.index) for stage in stages_on(run, layout, rank))
        assert away.categories["activations"] <= one < here.categories["activations"] + 1


def test_a_rank_holds_its_stages_and_no_more() -> None:
    """Of the whole model each rank's states are about a quarter; the first keeps most activations."""
    run = RunSpec(
        model=PRESETS["llama3-8b"], precision="bf16", data=Data(seq_len=4096), batch=Batch(sequences=32, micro=1)
    )
    whole = memory(run, Layout(dp=1), 0)
    held = [memory(run, pipeline(pp_split="layers"), rank) for rank in range(4)]
    assert all(whole.states / 5 < rank.states < whole.states / 3.3 for rank in held)
    first, second, third, _ = (rank.categories["activations"] for rank in held)
    assert first > second > third and whole.categories["activations"] < 1.2 * first
    assert memory(run, pipeline(pp_schedule="gpipe"), 0).total > held[0].total


def test_the_report_is_of_the_rank_that_holds_most() -> None:
    run = run_of(32, micro=2)
    for layout in (pipeline(), pipeline(pp_schedule="gpipe", pp_split=(1, 5, 1, 1)), pipeline(dp=3, zero=3)):
        every = [memory(run, layout, rank) for rank in range(layout.world)]
        found = predict(run.model_copy(update={"layout": layout}))
        assert found.memory == max(every, key=lambda held: held.total)
        assert found.pipeline is not None
        by_place: dict[int, list[int]] = {}
        for held in every:
            by_place.setdefault(layout.coordinates(held.rank)["pp"], []).append(held.total)
        assert [line.total for line in found.pipeline.ranks] == [max(by_place[place]) for place in range(4)]
        assert largest(run, layout).total == max(held.total for held in every)


def test_lines_of_the_pipeline() -> None:
    run = run_of(8)
    found = predict(run.model_copy(update={"layout": pipeline(pp=2, pp_schedule="interleaved", pp_chunks=2)}))
    assert found.pipeline is not None
    first, last = found.pipeline.ranks
    assert [[stage.index for stage in line.stages] for line in (first, last)] == [[0, 2], [1, 3]]
    assert first.parameters + last.parameters == found.parameters.total == sum(found.parameters.units.values())
    assert first.flops + last.flops == found.flops.executed_per_step.total
    assert sum(first.in_flight) > sum(last.in_flight) > 0
    assert first.activations == kept(run, found.layout, 0)
    assert first.wire == found.wire_per_step
    assert found.pipeline.even_bubble == pytest.approx(1 / (2 * 8 + 1))
    assert predict(run).pipeline is None


def test_even_stages_wait_as_long_as_the_closed_form_says() -> None:
    """Of blocks that cost far more than the head."""
    wide = LLAMA.model_copy(update={"hidden": 256, "ffn": 2048, "vocab": 2})
    run = run_of(8, model=wide)
    for schedule in (
        {},
        {"pp_schedule": "gpipe"},
        {"pp_schedule": "naive"},
        {"pp_schedule": "interleaved", "pp_chunks": 2},
    ):
        found = predict(run.model_copy(update={"layout": pipeline(**schedule)})).pipeline
        assert found is not None and found.even_bubble is not None
        assert found.bubble == pytest.approx(found.even_bubble, abs=0.002)
    uneven = predict(run.model_copy(update={"layout": pipeline(pp_split=(5, 1, 1, 1))})).pipeline
    assert uneven is not None and uneven.even_bubble == pytest.approx(3 / 11)
    assert uneven.bubble > 0.5


def test_modes_are_of_the_fullest_rank() -> None:
    run = run_of(16)
    layout = pipeline(pp_split=(2, 2, 3, 1))
    none, full, every, *_ = modes(run, layout)
    assert none.peak == max(memory(run, layout, rank).total for rank in range(4))
    assert none.kept == kept(run, layout, largest(run, layout).rank)
    assert full.peak < none.peak and full.kept < none.kept
    assert every.every == 2  # the root of three blocks


def test_the_largest_micro_batch_is_for_as_many_of_them() -> None:
    run, layout = run_of(7), pipeline(pp=2, pp_schedule="interleaved", pp_chunks=2)

    def held(micro: int) -> int:
        batch = Batch(sequences=7 * micro, micro=micro)
        changed = run.model_copy(update={"batch": batch})
        return max(memory(changed, layout, rank).total for rank in range(2))

    for micro in (1, 2, 5, 6):
        assert largest_micro(run, layout, held(micro)) == micro
        assert largest_micro(run, layout, held(micro) - 1) == micro - 1
    assert fit(run, layout, held(1)).fits and not fit(run, layout, held(1) - 1).fits
