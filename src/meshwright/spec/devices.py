"""Devices by name, each figure with its source, and what a node of them looks like: `cluster("8x8xh100")`.

FLOP/s are dense: data sheets that print twice as much count structured sparsity. Bandwidths of links are one way, where
data sheets print the sum of both. GB is 10⁹ bytes; memory of GPUs is what data sheets call GB and is GiB.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.spec.cluster import MOST_DEVICES, Cluster, Device, Flops, Link
from meshwright.spec.errors import UserError
from meshwright.spec.words import near

GiB = 2**30
GB = 10**9
T = 10**12


@dataclass(frozen=True)
class Inner:
    """What joins devices within a node, or a rack: its name, most devices, bytes/s one way, seconds.

    beyond: whether it also joins devices of different nodes.
    """

    name: str
    most: int
    bandwidth: float
    latency: float
    beyond: bool = False


@dataclass(frozen=True)
class Outer:
    """What joins nodes: its name, bytes/s of one adapter, seconds, and devices that share an adapter."""

    name: str
    bandwidth: float
    latency: float
    shared: int = 1


@dataclass(frozen=True)
class Kind:
    """A device, and how nodes of it are usually built."""

    device: Device
    inner: Inner
    outer: Outer
    stack: str
    per_node: int = 8


def _gpu(
    name: str, fp32: float, half: float, float64: float, memory: int, bandwidth: float, bf16: float | None = None
) -> Device:
    """FLOP/s in TFLOP/s, memory in GiB, bandwidth in GB/s. bf16 is as fast as fp16 where nothing is said."""
    flops = Flops(fp32=fp32 * T, bf16=(half if bf16 is None else bf16) * T, fp16=half * T, float64=float64 * T)
    return Device(name=name, kind="gpu", flops=flops, memory=memory * GiB, bandwidth=bandwidth * GB)


# Until the first byte arrives: about what one hop costs in nccl-tests with small messages, less the launch.
_NVLINK, _PCIE, _NETWORK = 1e-6, 2e-6, 5e-6


def _nvlink(generation: int, bandwidth: float, most: int = 8, beyond: bool = False) -> Inner:
    return Inner(f"NVLink {generation}", most, bandwidth * GB, _NVLINK, beyond)


def _pcie(generation: int, bandwidth: float) -> Inner:
    return Inner(f"PCIe {generation}", 16, bandwidth * GB, _PCIE)


def _infiniband(name: str, gigabits: float, shared: int = 1) -> Outer:
    return Outer(f"InfiniBand {name}", gigabits / 8 * GB, _NETWORK, shared)


_HDR, _NDR, _EDR = _infiniband("HDR", 200), _infiniband("NDR", 400), _infiniband("EDR", 100, shared=2)

KINDS: dict[str, Kind] = {
    # images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf: SXM2, 32 GB;
    # 300 GB/s NVLink both ways. No bfloat16: it goes through fp32. A DGX-1 has 8, and 4 EDR adapters:
    # images.nvidia.com/content/technologies/deep-learning/pdf/dgx-1-ai-supercomputer-datasheet-v4.pdf
    "v100": Kind(_gpu("V100 SXM2 32GB", 15.7, 125, 7.8, 32, 900, bf16=15.7), _nvlink(2, 150), _EDR, "nccl"),
    # nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf:
    # float64 through tensor cores; 600 GB/s NVLink both ways, PCIe 64 GB/s both ways. A DGX A100 has an HDR adapter a
    # device: images.nvidia.com/aem-dam/Solutions/Data-Center/nvidia-dgx-a100-datasheet.pdf
    "a100-40": Kind(_gpu("A100 SXM4 40GB", 19.5, 312, 19.5, 40, 1555), _nvlink(3, 300), _HDR, "nccl"),
    "a100-80": Kind(_gpu("A100 SXM4 80GB", 19.5, 312, 19.5, 80, 2039), _nvlink(3, 300), _HDR, "nccl"),
    "a100-40-pcie": Kind(
        _gpu("A100 PCIe 40GB", 19.5, 312, 19.5, 40, 1555), _pcie(4, 32), _infiniband("HDR", 200, shared=4), "nccl"
    ),
    "a100-80-pcie": Kind(
        _gpu("A100 PCIe 80GB", 19.5, 312, 19.5, 80, 1935), _pcie(4, 32), _infiniband("HDR", 200, shared=4), "nccl"
    ),
    # resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306: SXM 1,979 TFLOP/s of bf16 with sparsity, 900 GB/s
    # NVLink both ways; PCIe 1,513 with sparsity, PCIe 5 128 GB/s both ways. DGX H100: 8 NDR adapters,
    # resources.nvidia.com/en-us-dgx-systems/ai-enterprise-dgx
    "h100": Kind(_gpu("H100 SXM5 80GB", 67, 989.4, 67, 80, 3350), _nvlink(4, 450), _NDR, "nccl"),
    "h100-pcie": Kind(
        _gpu("H100 PCIe 80GB", 51, 756, 51, 80, 2000), _pcie(5, 64), _infiniband("NDR", 400, shared=4), "nccl"
    ),
    # resources.nvidia.com/en-us-data-center-overview-mc/en-us-data-center-overview/hpc-datasheet-sc23-h200
    "h200": Kind(_gpu("H200 SXM5 141GB", 67, 989.4, 67, 141, 4800), _nvlink(4, 450), _NDR, "nccl"),
    # resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet (8 devices: 72 PFLOP/s of FP8 with sparsity, 1,440 GB,
    # 64 TB/s, NVLink 14.4 TB/s both ways; 400 Gb/s an adapter): an eighth of it, and half of FP8 for bf16
    "b200": Kind(_gpu("B200 SXM 180GB", 75, 2250, 37, 180, 8000), _nvlink(5, 900), _NDR, "nccl"),
    # nvidia.com/en-us/data-center/gb200-nvl72 (72 devices: 360 PFLOP/s of bf16 with sparsity, 13.4 TB at 576 TB/s,
    # NVLink 130 TB/s both ways): 18 trays of 4 devices in one NVLink domain, an NDR adapter a device
    "gb200": Kind(
        _gpu("GB200 NVL72 186GB", 80, 2500, 40, 186, 8000), _nvlink(5, 900, most=72, beyond=True), _NDR, "nccl", 4
    ),
    # amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf: 8 devices
    # joined each with each by 64 GB/s one way, 7 × 64 in all; matrix fp32 and fp64 163.4
    "mi300x": Kind(
        _gpu("MI300X 192GB", 163.4, 1307.4, 163.4, 192, 5300), Inner("Infinity Fabric", 8, 448 * GB, 1e-6), _NDR, "nccl"
    ),
    # images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf, table 2: fp16 and bf16 with fp32
    # accumulation 165.2; no NVLink, PCIe 4 through the host: no peer to peer
    "rtx4090": Kind(
        _gpu("RTX 4090 24GB", 82.6, 165.2, 1.3, 24, 1008), _pcie(4, 32), Outer("Ethernet 100", 12.5 * GB, 1e-5, 8),
        "nccl",
    ),
    # One core with AVX2 at 3 GHz: two fused multiply-adds of eight floats a cycle; its part of two channels of
    # DDR4-3200. bfloat16 is emulated. `meshwright probe` measures the true ones.
    "cpu": Kind(
        Device(
            name="CPU core", kind="cpu", flops=Flops(fp32=96e9, bf16=48e9, fp16=48e9, float64=48e9),
            memory=4 * GiB, bandwidth=12.8 * GB,
        ),
        Inner("loopback", MOST_DEVICES, 2.5 * GB, 3e-5),
        Outer("Ethernet 10", 1.25 * GB, 5e-5, MOST_DEVICES),
        "gloo",
    ),
}  # fmt: skip
ALIASES = {
    "v100-32": "v100", "a100": "a100-80", "a100-sxm": "a100-80", "a100-pcie": "a100-80-pcie", "h100-80": "h100",
    "h100-sxm": "h100", "h200-141": "h200", "gb200-nvl72": "gb200", "rtx-4090": "rtx4090",
}  # fmt: skip


def cluster(text: str) -> Cluster:
    """The cluster that `text` names: nodes × devices × kind, "8x8xh100"; "8xh100" is one node, "h100" one device.

    Raises UserError.
    """
    parts = re.fullmatch(r"(?:(?:(\d+) *[x×] *)?(\d+) *[x×] *)?([a-z][a-z0-9-]*)", text.strip().lower())
    if parts is None:
        raise UserError(f"cluster {text!r}: not nodes × devices × kind; write, for example, 8x8xh100, or a file's name")
    nodes, per_node = (int(parts[place] or 1) for place in (1, 2))
    try:
        found = kind(parts[3])
    except UserError as error:
        raise UserError(f"cluster {text!r}: {error}") from None
    for count, what in ((nodes, "nodes"), (per_node, "devices in a node")):
        if count == 0:
            raise UserError(f"cluster {text!r}: 0 {what}; use 1 or more")
    if nodes * per_node > MOST_DEVICES:
        raise UserError(
            f"cluster {text!r}: {nodes * per_node} devices are more than any machine has; use at most {MOST_DEVICES}"
        )
    return of(found, nodes, per_node)


def kind(name: str) -> Kind:
    """The device that `name` names. Raises UserError."""
    found = KINDS.get(ALIASES.get(name.lower(), name.lower()))
    if found is None:
        raise UserError(f"no device {name}{near(name, [*KINDS, *ALIASES])}; there are {', '.join(KINDS)}")
    return found


def of(kind: Kind, nodes: int, per_node: int) -> Cluster:
    """`nodes` nodes of `per_node` devices each, joined as such nodes usually are."""
    devices = nodes * per_node
    inner, outer = kind.inner, kind.outer
    links = []
    domain = min(devices if inner.beyond else per_node, inner.most)
    if inner.beyond and domain < devices:
        domain -= domain % per_node  # whole nodes
    if domain > 1:
        links.append(Link(name=inner.name, devices=domain, bandwidth=inner.bandwidth, latency=inner.latency))
    if devices > domain:
        joined = -(-devices // domain) * domain
        shared = min(outer.shared, per_node)
        links.append(
            Link(name=outer.name, devices=joined, bandwidth=outer.bandwidth, latency=outer.latency, shared=shared)
        )
    cores = per_node if kind.device.kind == "cpu" else None
    return Cluster(
        device=kind.device, nodes=nodes, per_node=per_node, links=tuple(links), stack=kind.stack, cores=cores
    )
