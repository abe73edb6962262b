"""Cluster files: what they hold, and what is told of mistakes in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.spec.cluster import Cluster
from meshwright.spec.clusterfile import dump_cluster, load_cluster
from meshwright.spec.devices import KINDS, cluster
from meshwright.spec.errors import UserError

WHOLE = """
device:
  name: mine
  flops: {fp32: 19.5T, bf16: 312 TFLOP/s}
  memory: 48GiB
  bandwidth: 1.5TB/s
nodes: 2
per_node: 4
links:
  - {name: bridge, devices: 4, bandwidth: 25GB/s, latency: 2us}
  - name: net
    devices: 8
    bandwidth: 200Gb/s
    latency: 5us
    shared: 4
constants: {launch: 4.5e-6}
cores: 64
"""


def load(folder: Path, text: str) -> Cluster:
    file = folder / "c.yaml"
    file.write_text(text)
    return load_cluster(str(file))


def test_every_figure_with_its_unit(tmp_path: Path):
    mine = load(tmp_path, WHOLE)
    assert (mine.device.flops["fp32"], mine.device.flops["bf16"]) == (19.5e12, 312e12)
    assert (mine.device.memory, mine.device.bandwidth) == (48 * 2**30, 1.5e12)
    assert [(link.bandwidth, link.latency, link.shared) for link in mine.links] == [(25e9, 2e-6, 1), (25e9, 5e-6, 4)]
    assert (mine.devices, mine.cores, mine.constants) == (8, 64, {"launch": 4.5e-6})


@pytest.mark.parametrize("text", [*(f"2x4x{name}" for name in KINDS), "h100"])
def test_what_is_written_is_read_back(tmp_path: Path, text: str):
    assert load(tmp_path, dump_cluster(cluster(text))) == cluster(text)


def test_whole_file_is_read_back(tmp_path: Path):
    mine = load(tmp_path, WHOLE)
    assert load(tmp_path, dump_cluster(mine)) == mine


def test_a_known_device_brings_its_links_and_software(tmp_path: Path):
    assert load(tmp_path, "device: h100\nnodes: 2\nper_node: 8\n") == cluster("2x8xh100")


def test_fields_over_a_preset(tmp_path: Path):
    found = load(tmp_path, "device: {preset: h100, memory: 94GiB, flops: {bf16: 835T}}\nper_node: 4\n")
    assert (found.device.memory, found.device.flops["bf16"]) == (94 * 2**30, 835e12)
    assert found.device.flops["fp32"] == cluster("h100").device.flops["fp32"]
    assert found.links == cluster("4xh100").links


def test_links_that_are_written_replace_those_of_the_preset(tmp_path: Path):
    found = load(tmp_path, "device: h100\nper_node: 2\nlinks: [{name: l, devices: 2, bandwidth: 1GB/s}]\n")
    assert [link.bandwidth for link in found.links] == [1e9]


def test_a_name_needs_no_file():
    assert load_cluster("2x8xa100") == cluster("2x8xa100")


def test_files_are_found_beside_the_run(tmp_path: Path):
    (tmp_path / "c.yaml").write_text("device: h100")
    assert load_cluster("c.yaml", tmp_path) == cluster("h100")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (WHOLE.replace("nodes: 2", "nodes: 0"), "line 7: nodes: 0 is not a whole number above 0"),
        (WHOLE.replace("nodes: 2", "node: 2"), "line 7: node: no such field; did you mean nodes?"),
        (WHOLE.replace("25GB/s", "-25GB/s"), r'line 10: links\[0\].bandwidth: "-25GB/s" is not a number above 0'),
        (WHOLE.replace("25GB/s", "25 Gx"), r"line 10: links\[0\].bandwidth: '25 Gx' is no rate: Gx is none of B/s"),
        (WHOLE.replace("    bandwidth:", "    bandwith:"), r"line 13: links\[1\].bandwith: no such .* links.bandwidth"),
        (WHOLE.replace("48GiB", "48 gib"), "line 5: device.memory: '48 gib' is no size: .*; write 48GiB"),
        (WHOLE.replace("shared: 4", "shared: 0"), r"line 15: links\[1\].shared: 0 is not a whole number above 0"),
        (WHOLE.replace("devices: 8", "devices: 6"), "c.yaml.*use a multiple of 4"),
        (WHOLE.replace("nodes: 2", "nodes: 3"), "line 8: links: .*must join all nodes × per_node = 12 devices"),
        (WHOLE.replace("  bandwidth: 1.5TB/s\n", ""), "line 2: device: device.bandwidth is missing; give a number"),
        ("device: h10\n", "line 1: device: no device h10; did you mean h100?"),
        ("device: 3\n", "line 1: device: 3 is not a device's name or a section"),
        ("device: {preset: 3}\n", "line 1: device: 3 is not a device's name"),
        ("device: h100\nlinks: fast\n", 'line 2: links: "fast" is not a list'),
        ("device: h100\nlinks: [3]\n", r"line 2: links\[0\]: 3 is not a section with name, devices"),
        ("device: h100\nnodes: 1.5\n", "line 2: nodes: 1.5 is not a whole number"),
        ("nodes: 2\n", "c.yaml line 1: device is missing; give a section with name, kind"),
        ("- h100\n", "holds no fields; write lines such as `nodes: 2`"),
        ("device: [h100\n", "line 2: not valid YAML"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_line_and_field(tmp_path: Path, text: str, why: str):
    with pytest.raises(UserError, match=why) as told:
        load(tmp_path, text)
    assert str(told.value).startswith(str(tmp_path))


def test_all_mistakes_are_told_together(tmp_path: Path):
    with pytest.raises(UserError, match=r"(?s)2 mistakes:.*line 7: nodes: 0.*line 8: per_node: -1"):
        load(tmp_path, WHOLE.replace("nodes: 2", "nodes: 0").replace("per_node: 4", "per_node: -1"))


def test_no_file(tmp_path: Path):
    with pytest.raises(UserError, match=r"nowhere.yaml: cannot be read"):
        load_cluster("nowhere.yaml", tmp_path)
    with pytest.raises(UserError, match="not a cluster file"):
        load_cluster(f"{tmp_path}/")
