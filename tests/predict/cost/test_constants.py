"""Which constants hold on a cluster, and what is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from meshwright.predict.cost.constants import DEVICES, DIVIDE, STACKS, TOGETHER, Constants, constants_of
from meshwright.spec.devices import KINDS, cluster
from meshwright.spec.errors import UserError


def test_measured_ones_come_before_those_of_both_before_the_stacks_before_the_devices() -> None:
    h100 = cluster("8xh100").model_copy(update={"stack": "fsdp"})
    assert constants_of(h100).flash == TOGETHER["fsdp", "H100"]["flash"] != DEVICES["H100"]["flash"]
    assert constants_of(h100).product == DEVICES["H100"]["product"] != Constants().product
    assert constants_of(h100).error == STACKS["fsdp"]["error"] != Constants().error
    measured = h100.model_copy(update={"constants": {"flash": 0.123}})
    assert constants_of(measured).flash == 0.123


@pytest.mark.parametrize("kind", KINDS)
def test_every_device_that_has_a_name_has_constants(kind: str) -> None:
    assert constants_of(cluster(kind)).units == DEVICES[
        "CPU" if kind == "cpu" else KINDS[kind].device.name.split()[0]
    ].get("units")


@pytest.mark.parametrize("of", [*DEVICES.values(), *STACKS.values(), *TOGETHER.values()], ids=str)
def test_fractions_are_fractions(of: dict[str, Any]) -> None:
    assert set(of) <= {field.name for field in fields(Constants)}
    for name in DIVIDE:
        if name in of and name not in ("units", "sustained", "batched"):
            assert 0 < of[name] <= 1, name
    # Together they are a part of the peak, too.
    assert of.get("product", 1) * of.get("batched", 1) <= 1


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("device", DEVICES)
def test_no_product_goes_beyond_the_peak(device: str, stack: str) -> None:
    merged = DEVICES[device] | STACKS[stack] | TOGETHER.get((stack, device), {})
    assert merged.get("product", Constants.product) * merged.get("sustained", 1) * merged.get("batched", 1) <= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stack": "megatron2021"}, "no such stack; did you mean megatron-2021?"),
        ({"constants": {"flahs": 1}}, "constants.flahs: no such constant; did you mean flash?"),
        ({"constants": {"stream": 0}}, "stream=0: use a number above 0"),
        ({"constants": {"kernel": -1e-6}}, "kernel=-1e-06: use a number ≥ 0"),
        ({"constants": {"kernel": "fast"}}, "kernel=fast: use a number"),
        ({"constants": {"kernel": float("nan")}}, "kernel=nan: use a number"),
        ({"constants": {"fused": 1}}, "fused=1: use true or false"),
    ],
    ids=str,
)
def test_what_is_no_constant_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        constants_of(cluster("8xh100").model_copy(update=changes))
