"""Ranks that share cores, and collectives by what was measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshwright.predict.cost.cpu import Measured, among, crowd, curve, shared, stretched
from meshwright.predict.cost.step import step_time
from meshwright.schedule import make
from meshwright.schedule.timeline import simulate
from meshwright.spec.cluster import Cluster
from meshwright.spec.devices import cluster
from meshwright.spec.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.run import Batch, Data, RunSpec

ROWS = [
    ["all_reduce", 2, 2, [[1000, 1e-4], [100_000, 1e-3]]],
    ["all_reduce", 4, 2, [[1000, 3e-4], [100_000, 3e-3]]],
    ["all_reduce", 4, 4, [[1000, 4e-4], [100_000, 8e-3]]],
]


def machine(**constants: Any) -> Cluster:
    """Four ranks on two cores."""
    return cluster("4xcpu").model_copy(update={"cores": 2, "constants": constants})


def test_an_accelerator_is_nobody_elses():
    assert shared(cluster("8xh100"), 8) == cluster("8xh100")
    assert crowd(cluster("8xh100"), 8) == 1


def test_a_rank_alone_has_all_cores():
    found = shared(machine(threads=[[2, 1.5]]), 1).device
    assert found.flops["fp32"] == pytest.approx(1.5 * machine().device.flops["fp32"])
    assert found.bandwidth == pytest.approx(1.5 * machine().device.bandwidth)


def test_ranks_that_are_busy_slow_each_other_down_beside_their_part_of_the_cores():
    found = [shared(machine(busy=[[1, 1.0], [2, 1.25], [4, 1.5]]), ranks).device for ranks in (2, 3, 4)]
    whole = machine().device.flops["fp32"]
    assert [each.flops["fp32"] for each in found] == pytest.approx([whole / 1.25, whole / 1.375, whole / 1.5])
    assert [crowd(machine(), ranks) for ranks in (1, 2, 3, 4)] == [1, 1, 1.5, 2]


def test_ranks_of_several_nodes_share_only_their_own():
    two = cluster("2x2xcpu")
    assert crowd(two, 4) == 1
    assert crowd(two.model_copy(update={"cores": 1}), 4) == 2


def test_collectives_are_those_among_as_many_ranks():
    assert [row[1:3] for row in among(ROWS, 2, 1.0)] == [(2, 2)]
    assert [row[1:3] for row in among(ROWS, 3, 1.0)] == [(4, 2), (4, 4)]  # the next more
    assert [row[1:3] for row in among(ROWS, 9, 1.0)] == [(4, 2), (4, 4)]  # the most there are
    # The whole step is multiplied by how crowded it is; what was measured has it in it.
    assert among(ROWS, 4, 2.0)[0][3] == ((1000, 1.5e-4), (100_000, 1.5e-3))


def test_between_sizes_time_goes_along_a_power_of_bytes_and_beyond_with_the_bytes():
    measured = Measured(among(ROWS, 2, 1.0))
    sizes = np.array([1.0, 1000, 10_000, 100_000, 1_000_000, 0])
    took = measured.seconds("all_reduce", sizes, np.full(6, 2.0))
    assert took == pytest.approx([1e-4, 1e-4, 1e-4 * 10**0.5, 1e-3, 1e-2, 0])
    assert "all_gather" not in measured


def test_groups_of_a_size_nobody_measured_take_as_long_as_the_nearest_by_a_rings_bytes():
    measured = Measured(among(ROWS, 4, 1.0))
    took = measured.seconds("all_reduce", np.full(4, 1000.0), np.array([1.0, 2, 4, 8]))
    assert took == pytest.approx([0, 3e-4, 4e-4, 4e-4 * (7 / 8) / (3 / 4)])


def test_a_curve_never_falls():
    assert curve({4000: 2e-4, 1000: 3e-4, 9000: 5e-4}) == ((1000, 3e-4), (4000, 3e-4), (9000, 5e-4))


@pytest.mark.parametrize(
    ("constants", "where"),
    [
        ({"collectives": 3}, "collectives: not as"),
        ({"collectives": [*ROWS, ["all_reduce", 2]]}, r"collectives\[3\]"),
        ({"collectives": [["all_reduce", 2, 2, []]]}, r"collectives\[0\]\[3\]"),
        ({"collectives": [["all_reduce", 2, 2, [[1000, -1e-4]]]]}, r"collectives\[0\]\[3\]\[0\]\[1\]"),
        ({"collectives": [["all_reduse", 2, 2, [[1000, 1e-4]]]]}, r"collectives\[0\]\[0\]"),
        ({"busy": [[2]]}, r"busy\[0\]"),
        ({"threads": 2}, "threads: not as `meshwright probe` writes it"),
    ],
)
@pytest.mark.parametrize("kind", ["cpu", "h100"])
def test_tables_that_are_none_are_refused_in_words(constants: dict[str, Any], where: str, kind: str):
    asked = cluster(f"2x{kind}").model_copy(update={"constants": constants})
    with pytest.raises(UserError, match=where):
        step_time(RunSpec(), Layout(dp=2), asked)


class TestStretched:
    def timeline(self, name: str):
        return simulate(make(name, 4, 4, 1), forward=1.0, backward=2.0)

    def test_one_after_another_needs_one_core(self):
        naive = simulate(make("naive", 4, 1, 1), forward=1.0, backward=2.0)
        assert stretched(naive, 1, crowded=4) == naive.length
        # Two copies are two at a time.
        assert stretched(naive, 2, crowded=4) == naive.length
        assert stretched(naive, 2, crowded=8) == pytest.approx(2 * naive.length)

    def test_no_moment_is_faster_than_the_cores_allow(self):
        timeline = self.timeline("gpipe")
        work = sum(timeline.busy)
        one_core = stretched(timeline, 1, crowded=4)
        assert one_core == pytest.approx(work)
        two_cores = stretched(timeline, 1, crowded=2)
        assert max(timeline.length, work / 2) < two_cores < one_core

    def test_enough_cores_change_nothing(self):
        timeline = self.timeline("1f1b")
        assert stretched(timeline, 1, crowded=1) == timeline.length

    def test_a_system_that_is_slow_to_deal_cores_out_is_between_both(self):
        timeline = self.timeline("1f1b")
        ideal, shared_always = stretched(timeline, 1, 2), 2 * timeline.length
        assert stretched(timeline, 1, 2, uneven=1.0) == pytest.approx(shared_always)
        assert stretched(timeline, 1, 2, uneven=0.25) == pytest.approx(0.75 * ideal + 0.25 * shared_always)


class TestSteps:
    """Of whole runs on a machine of two cores."""

    RUN = RunSpec(batch=Batch(sequences=8, micro=2), data=Data(seq_len=64))

    def seconds(self, layout: Layout, **constants: Any) -> float:
        return step_time(self.RUN, layout, machine(**constants)).seconds

    def test_lines_add_up_where_cores_are_shared(self):
        for layout in (Layout(dp=4), Layout(dp=1, pp=4), Layout(dp=2, pp=2), Layout(dp=2, tp=2)):
            told = step_time(self.RUN, layout, machine())
            assert sum(told.lines.values()) == pytest.approx(told.seconds)
            assert told.lines["cores"] > 0
            assert 0 < told.utilisation <= 1
        assert step_time(self.RUN, Layout(dp=2), machine()).lines.get("cores", 0) == 0

    def test_a_pipeline_leaves_cores_to_others_as_far_as_the_system_deals_them_out(self):
        times = [self.seconds(Layout(dp=1, pp=4), uneven=uneven) for uneven in (0.0, 0.5, 1.0)]
        assert times[0] < times[1] < times[2]
        assert self.seconds(Layout(dp=4), uneven=0.0) == self.seconds(Layout(dp=4), uneven=1.0)

    def test_the_interpreter_works_on_the_core_that_computes(self):
        host = 1e-4
        apart = self.seconds(Layout(dp=2), host=host, beside=True)
        together = self.seconds(Layout(dp=2), host=host, beside=False)
        free = self.seconds(Layout(dp=2), host=0.0, host_backward=0.0, beside=False)
        assert free < apart < together

    def test_a_recompute_that_looks_at_each_operator_takes_the_interpreter_longer(self):
        selective, full = Layout(dp=1, recompute="selective"), Layout(dp=1, recompute="full")
        assert self.seconds(selective, watched=1e-4) > self.seconds(selective)
        assert self.seconds(full, watched=1e-4) == self.seconds(full)

    def test_collectives_that_were_measured_are_what_computing_waits_for(self):
        layout = Layout(dp=1, tp=2)
        cheap = [["all_reduce", 2, 2, [[1, 1e-6], [10**8, 1e-6]]]]
        dear = [["all_reduce", 2, 2, [[1, 1e-2], [10**8, 1e-2]]]]
        # In each of four micro-batches two sums of a block in both passes, and one of each end; then norm and metrics.
        count = 4 * (4 * 4 + 2) + 2
        more = self.seconds(layout, collectives=dear) - self.seconds(layout, collectives=cheap)
        assert more == pytest.approx(count * (1e-2 - 1e-6))
