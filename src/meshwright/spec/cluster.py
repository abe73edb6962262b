"""The devices a model may run on: what each computes and holds, and by which links they reach each other.

Ranks are devices, numbered node after node. Links stand from inner to outer: each joins runs of so many neighbouring
devices (NVLink those of a node, the network all), and what goes between two devices takes the innermost link that joins
both. All figures are those of data sheets: what software makes of them is in `predict.cost.constants`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshwright.spec.errors import UserError
from meshwright.spec.quantities import BYTES, FLOPS, RATE, SECONDS

Precision = Literal["fp32", "bf16", "fp16", "float64"]
Rate = Annotated[float, Field(gt=0, lt=1e24), RATE]
Peak = Annotated[float, Field(gt=0, lt=1e24), FLOPS]
Count = Annotated[int, Field(gt=0, lt=2**31)]
Bytes = Annotated[int, Field(gt=0, lt=2**63), BYTES]
Seconds = Annotated[float, Field(ge=0, lt=1), SECONDS]
Text = Annotated[str, Field(min_length=1)]
MOST_DEVICES = 1_000_000  # as many as a layout may have ranks


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Flops(Part):
    """Peak of dense matrix products, FLOP/s, a multiply-add counted as two; without structured sparsity."""

    fp32: Peak = Field(description="float32, as torch computes it by default: without TF32")
    bf16: Peak | None = Field(None, description="bfloat16; null: no faster than fp32")
    fp16: Peak | None = Field(None, description="float16; null: no faster than fp32")
    float64: Peak | None = Field(None, description="float64; null: half of fp32")

    def __getitem__(self, precision: Precision) -> float:
        """The peak in one precision."""
        found: float | None = getattr(self, precision)
        if found is not None:
            return found
        return self.fp32 / 2 if precision == "float64" else self.fp32


class Device(Part):
    """One device, of which a rank has one. On CPUs that is one core, which ranks share where they are more."""

    name: Text = Field(description="what it is called")
    kind: Literal["gpu", "cpu"] = Field("gpu", description="gpu, or cpu: a core")
    flops: Flops = Field(description="peak FLOP/s of dense matrix products, by precision")
    memory: Bytes = Field(description="bytes it holds; on CPUs its part of the node's memory")
    bandwidth: Rate = Field(description="bytes/s between it and its memory")


class Link(Part):
    """What joins neighbouring devices."""

    name: Text = Field(description="what it is called")
    devices: Count = Field(description="devices that one such link joins: 8 for NVLink in a node, all for the network")
    bandwidth: Rate = Field(description="bytes/s that one device sends, one way, while no other does")
    latency: Seconds = Field(0.0, description="seconds until the first byte arrives")
    shared: Count = Field(1, description="devices that share this bandwidth; 1: each has its own")


class Cluster(Part):
    """Nodes of alike devices and the links between them."""

    device: Device = Field(description="what each device is")
    nodes: Count = Field(1, description="number of nodes")
    per_node: Count = Field(1, description="devices of a node")
    links: tuple[Link, ...] = Field((), description="what joins devices, from inner to outer; the last joins all")
    stack: Text = Field("default", description="software whose constants hold: a name in predict/cost/constants.py")
    constants: dict[str, Any] = Field({}, description="constants that were measured here, in place of the stack's")
    host_memory: Bytes | None = Field(None, description="bytes of a node's own memory")
    cores: Count | None = Field(None, description="CPU cores of a node")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.devices > MOST_DEVICES:
            raise ValueError(
                f"nodes={self.nodes} × per_node={self.per_node} = {self.devices} devices are more than any machine "
                f"has; use at most {MOST_DEVICES}"
            )
        joined = 1
        for link in self.links:
            if link.devices <= joined:
                raise ValueError(
                    f"links stand from inner to outer, each joining more devices: {link.name} with "
                    f"devices={link.devices} cannot follow one with {joined}"
                    if joined > 1
                    else f"link {link.name} with devices={link.devices} joins nothing; leave it out, or use 2 or more"
                )
            if link.devices % joined:
                raise ValueError(
                    f"link {link.name} with devices={link.devices} cuts through those that an inner one joins; "
                    f"use a multiple of {joined}"
                )
            joined = link.devices
        if joined < self.devices:
            last = f"{self.links[-1].name} has devices={joined}" if self.links else "there is none"
            raise ValueError(
                f"links: the last must join all nodes × per_node = {self.devices} devices, and {last}; "
                f"give a link with devices={self.devices}"
            )
        return self

    def __hash__(self) -> int:
        return hash((self.device, self.nodes, self.per_node, self.links, self.stack))

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.nodes * self.per_node

    def part(self, devices: int) -> Cluster:
        """The first so many devices: of one node, or whole nodes. Raises UserError where they are neither."""
        if devices <= self.per_node:
            return self.model_copy(update={"nodes": 1, "per_node": devices})
        if devices <= self.devices and devices % self.per_node == 0:
            return self.model_copy(update={"nodes": devices // self.per_node})
        whole = self.per_node * min(devices // self.per_node, self.nodes)
        raise UserError(
            f"cluster: {devices} devices are not whole nodes of {self.per_node}, of which there are {self.nodes}; "
            f"use {whole}"
        )

    def level(self, ranks: int, stride: int = 1) -> int:
        """The place in `links` of the outermost one that groups of `ranks` devices, `stride` apart, need.

        Groups lie one behind the other as mesh axes do, so each spans `ranks` × `stride` neighbouring devices. Where
        that does not divide what a link joins, some group reaches over its edge, and as all wait for the slowest, all
        are charged for the next; so are messages between neighbours of such a group. The last link answers for all
        that no inner one joins.
        """
        assert ranks > 1, "a rank alone crosses no link"
        span = ranks * stride
        for place, link in enumerate(self.links):
            if link.devices % span == 0:
                return place
        return len(self.links) - 1
