"""A machine as it is known by name, and as it is measured on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.predict.cost.constants import constants_of
from meshwright.predict.cost.step import step_time
from meshwright.spec.clusterfile import dump_cluster, load_cluster
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec
from meshwright.train import probe
from meshwright.train.probing import Effort

EFFORT = Effort(seconds=0.001, rounds=1, small=True)


def test_a_machine_without_accelerators_is_its_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "cores", lambda: 6)
    found = probe.machine("cpu")
    assert (found.device.kind, found.devices, found.cores, found.stack) == ("cpu", 6, 6, "gloo")
    assert found.host_memory == pytest.approx(6 * found.device.memory, rel=1e-6)
    # More ranks than cores share them.
    assert (probe.machine("cpu", 12).devices, probe.machine("cpu", 12).cores) == (12, 6)


def measured(ranks: int, busy: list[tuple[int, float]]) -> dict[str, Any]:
    rows = [["all_reduce", ranks, group, [[1000, 1e-4 * group], [10**6, 1e-3 * group]]] for group, _ in busy[1:]]
    return {"collectives": rows, "busy": busy, "contention": 0.25 * ranks}


def test_what_ranks_cost_each_other_is_told_beside_their_part_of_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "cores", lambda: 2)
    found = probe._together(
        probe.machine("cpu", 4),
        [measured(2, [(1, 1.0), (2, 1.1)]), measured(4, [(1, 2.0), (2, 2.2), (4, 4.8)])],
    )
    assert dict(found.constants["busy"]) == pytest.approx({1: 1.0, 2: 1.1, 4: 1.2})
    assert [row[:3] for row in found.constants["collectives"]] == [
        ("all_reduce", 2, 2), ("all_reduce", 4, 2), ("all_reduce", 4, 4)
    ]  # fmt: skip
    assert found.constants["contention"] == 0.5  # of the fewest ranks, which have cores of their own
    (link,) = found.links
    assert (link.latency, link.bandwidth) == pytest.approx((2e-4, 10**6 / 2e-3))


def test_a_probe_measures_this_machine_into_a_file_that_predicts(tmp_path: Path):
    said: list[str] = []
    found = probe.probe(2, device="cpu", effort=EFFORT, say=said.append)
    file = tmp_path / "cluster.yaml"
    file.write_text(dump_cluster(found))
    again = load_cluster(str(file))
    assert again == found
    constants = constants_of(again)
    measured = {(operation, ranks, group) for operation, ranks, group, _ in constants.collectives}
    assert measured == {
        (operation, 2, 2) for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift", "send")
    }
    assert [ranks for ranks, _ in constants.busy] == [1, 2]
    assert 0 <= constants.contention <= 1
    run = RunSpec()
    for layout in (Layout(dp=1), Layout(dp=2), Layout(dp=1, tp=2), Layout(dp=1, pp=2)):
        assert step_time(run, layout, again).seconds > 0
    assert "measuring 2 ranks" in said
