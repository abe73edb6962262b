"""Peak FLOPs a second of devices, dense (no structured sparsity), as their makers publish them.

float32 is the rate without TF32, which torch does not use for matrix products unless asked; float64 is the tensor
cores' rate where they have one. A CPU has no published figure: measure a matrix product and pass that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["bf16", "fp16", "fp32", "float64"]


@dataclass(frozen=True, slots=True)
class Peak:
    """Rates of one device. `names` are the words, all of which occur in the device name torch reports."""

    names: tuple[str, ...]
    rates: dict[Dtype, float]
    source: str


# Sources, as the makers name them:
# V100  NVIDIA V100 data sheet: fp16 (tensor) 125, fp32 15.7, fp64 7.8.
# A100  NVIDIA A100 data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4): bf16 312, fp32 19.5, fp64 9.7, on tensor
#       cores 19.5; the same for SXM and PCIe. 108 SMs × 64 fused multiply-adds × 1.41 GHz.
# H100  NVIDIA H100 data sheet: SXM fp32 67, fp64 34, on tensor cores 67; PCIe fp32 51, fp64 26, on tensor cores 51. The
#       white paper's table has a digit more, which is SMs × 128 fused multiply-adds × clock: 132 and 1.98 GHz, 114 and
#       1.755 GHz (the latter also in the H100 PCIe product brief, PB-11133-001).
_V100: dict[Dtype, float] = {"fp16": 125e12, "fp32": 15.7e12, "float64": 7.8e12}
_A100: dict[Dtype, float] = {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12, "float64": 19.5e12}
_H100_SXM: dict[Dtype, float] = {"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 66.9e12, "float64": 66.9e12}
_H100_PCIE: dict[Dtype, float] = {"bf16": 756e12, "fp16": 756e12, "fp32": 51.2e12, "float64": 51.2e12}
_L4: dict[Dtype, float] = {"bf16": 121e12, "fp16": 121e12, "fp32": 30.3e12}
_B200: dict[Dtype, float] = {"bf16": 2250e12, "fp16": 2250e12}

# More specific names first: the first entry that fits is taken.
PEAKS: tuple[Peak, ...] = (
    Peak(("H100", "PCIe"), _H100_PCIE, "NVIDIA H100 Tensor Core GPU Architecture white paper, table 2"),
    Peak(("H100", "HBM3"), _H100_SXM, "NVIDIA H100 Tensor Core GPU Architecture white paper, table 2"),
    Peak(("H200",), _H100_SXM, "NVIDIA H200 data sheet; the H100 SXM's compute"),
    Peak(("A100",), _A100, "NVIDIA A100 data sheet"),
    Peak(("V100", "SXM2"), _V100, "NVIDIA V100 data sheet"),
    Peak(("L4",), _L4, "NVIDIA L4 data sheet, halved where it is given with sparsity"),
    Peak(("B200",), _B200, "NVIDIA DGX B200 data sheet, an eighth; halved where it is given with sparsity"),
)


def peak(device_name: str, dtype: Dtype) -> tuple[float, str] | None:
    """Published FLOPs a second of a device by the name torch reports, and its source; None if not in the table."""
    words = device_name.replace("-", " ").split()
    for entry in PEAKS:
        if all(name in words for name in entry.names):
            rate = entry.rates.get(dtype)
            return None if rate is None else (rate, entry.source)
    return None
