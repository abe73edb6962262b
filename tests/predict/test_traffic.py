"""Traffic of a step, row by row."""

from typing import Any

import pytest

from meshwright.predict.params import count
from meshwright.predict.traffic import MOST_MICROS, total_wire, traffic
from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import Batch, RunSpec
from meshwright.spec.traffic import TrafficKey, wire_bytes


def test_one_data_rank_sends_nothing() -> None:
    assert traffic(RunSpec(), Layout(dp=1)) == ()


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("float64", 8)])
@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny"])
def test_rows_of_stage_0(name: str, precision: str, size: int) -> None:
    run = RunSpec.model_validate({"model": PRESETS[name], "precision": precision})
    rows = {row.key: row for row in traffic(run, Layout(dp=4, zero_join=0))}
    reduce = rows.pop(TrafficKey("all_reduce", "dp", "zero.reduce", "backward", None))
    metrics = rows.pop(TrafficKey("all_reduce", "dp", "step.metrics", "step", None))
    assert not rows
    assert reduce.count == 4 + 2 + (name == "gpt2-tiny")  # blocks, embedding, head; gpt2's tied table beside positions
    assert reduce.payload == count(run.model) * size
    assert reduce.wire == pytest.approx(2 * 3 / 4 * reduce.payload)
    assert (metrics.count, metrics.payload, metrics.wire) == (1, 24, 36.0)


def test_accumulation_reduces_once_a_step() -> None:
    layout = Layout(dp=2)
    few, many = (RunSpec(batch=Batch(sequences=32, micro=micro)) for micro in (16, 1))
    assert traffic(few, layout) == traffic(many, layout)


@pytest.mark.parametrize("fields", [{"tp": 2}, {"cp": 2}, {"dp": 2, "zero": 2}], ids=str)
def test_too_many_micro_batches_for_rows_of_their_own_are_refused(fields: dict[str, Any]) -> None:
    layout = Layout(**{"dp": 1, **fields})
    run = RunSpec(batch=Batch(sequences=layout.data_ranks * MOST_MICROS + 1, micro=1))
    name, value = list(fields.items())[-1]
    words = f"10,001 micro-batches a step, each with messages of its own at {name}={value}; at most 10,000"
    with pytest.raises(UserError, match=words):
        traffic(run, layout)


def test_ring_all_reduce_sends_its_published_bytes() -> None:
    # Patarasuk and Yuan 2009: an all-reduce of S bytes over p ranks sends 2 (p-1)/p S from each, the least possible.
    assert wire_bytes("all_reduce", 8, 1_000_000) == 1_750_000
    assert wire_bytes("all_reduce", 1, 1_000_000) == 0


def test_ddp_traffic_of_gpt2() -> None:
    # 124,439,808 float32 gradients over two ranks: each sends its size once (497,759,232 bytes), and 24 for metrics.
    run = RunSpec(model=PRESETS["gpt2"])
    assert total_wire(traffic(run, Layout(dp=2))) == 497_759_232 + 24
