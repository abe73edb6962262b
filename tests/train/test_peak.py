"""The peak that utilisation is measured against, where no maker has published one."""

from __future__ import annotations

import pytest
import torch

from meshwright.train import peak


@pytest.mark.parametrize(("rate", "size"), [(1e12, 1024), (5e8, 256), (1e6, 128)])
def test_a_slow_device_is_not_asked_for_a_large_product(monkeypatch, rate, size):
    """A CPU that emulates 16-bit numbers needs seconds for what others do in milliseconds."""
    asked = []

    def best(device, dtype, of):
        asked.append(of)
        return 2 * of**3 / rate

    monkeypatch.setattr(peak, "_best", best)
    found = peak.device_peak(torch.device("cpu"), "bf16")
    assert found == peak.Peak(pytest.approx(rate), f"a {size} × {size} matrix product measured at the start")
    assert asked[-1] == size and asked == sorted(set(asked))


def test_what_is_measured_is_a_product():
    found = peak.device_peak(torch.device("cpu"), "fp32")
    assert 1e8 < found.flops < 1e14
