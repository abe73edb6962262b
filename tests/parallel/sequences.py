"""Attention over parts of a sequence held against attention of the whole, written out in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.parallel import context
from meshwright.spec.sequence import Method, Order, spans


@dataclass(frozen=True)
class Case:
    method: Method
    order: Order = "zigzag"
    causal: bool = True
    window: int | None = None
    heads: int = 4
    kv_heads: int = 2
    length: int = 24
    batch: int = 2
    width: int = 8
    inner: int = 1
    dtype: torch.dtype = torch.float64
    documents: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None
    packed: tuple[int, ...] | None = None

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"method": self.method, "order": self.order, "inner": self.inner}
        options |= {"causal": self.causal, "window": self.window}
        if self.documents is not None:
            options["documents"] = torch.tensor(self.documents)
        if self.packed is not None:
            options["packed"] = self.packed
        return options

    @property
    def ids(self) -> tuple[int, ...] | tuple[tuple[int, ...], ...] | None:
        """The document of each position."""
        if self.packed is None:
            return self.documents
        return tuple(sum(start <= position for start in self.packed) for position in range(self.length))

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output, of the whole sequence, float64 numbers that the dtype has."""
        shapes = [(self.batch, self.length, heads, self.width) for heads in (self.heads, self.kv_heads, self.kv_heads)]
        random = torch.Generator().manual_seed(self.length)
        found = [torch.randn(*shape, dtype=torch.float64, generator=random) for shape in (*shapes, shapes[0])]
        q, k, v, grad = (each.to(self.dtype).double() for each in found)
        return q, k, v, grad


def whole(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    """Explicit attention, [B, T, H, d]."""
    group = case.heads // case.kv_heads
    k, v = (each.repeat_interleave(group, dim=2) for each in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * case.width**-0.5
    ours, theirs = torch.arange(case.length)[:, None], torch.arange(case.length)
    seen = torch.ones(case.length, case.length, dtype=torch.bool)
    if case.causal:
        seen &= theirs <= ours
    if case.window is not None:
        seen &= ours - theirs < case.window
    if (ids := case.ids) is not None:
        documents = torch.tensor(ids)
        same = documents[..., :, None] == documents[..., None, :]
        seen = seen & (same if same.dim() == 2 else same[:, None])
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def mine(whole: Tensor, mesh: Mesh, order: Order, packed: tuple[int, ...] | None = None) -> Tensor:
    """This rank's part [B, T/cp, ...] of a whole sequence's [B, T, ...]."""
    parts = spans(whole.size(1), mesh.sizes["cp"], mesh.coords["cp"], order, packed)
    return whole[:, [position for part in parts for position in part]].contiguous()


def differences(mesh: Mesh, case: Case) -> list[float]:
    """How far this rank's out, dq, dk and dv are from the whole attention's, each relative to the largest there."""
    right = computed(case, torch.float64, whole)
    *inputs, grad = (mine(each, mesh, case.order, case.packed).to(case.dtype) for each in case.inputs())
    parts = [each.requires_grad_() for each in inputs]
    out = context.attention(*parts, mesh, **case.options)
    assert out.dtype == case.dtype
    out.backward(grad)
    found = [out.detach(), *(each.grad for each in parts)]
    return [
        _distance(ours, mine(theirs, mesh, case.order, case.packed), theirs)
        for ours, theirs in zip(found, right, strict=True)
    ]


def _distance(found: Tensor, right: Tensor, of: Tensor) -> float:
    return float((found.double() - right).abs().max() / of.abs().max().clamp_min(0.1))


def computed(case: Case, dtype: torch.dtype, attention: Callable[..., Tensor]) -> list[Tensor]:
    """out, dq, dk and dv of one device's `attention(q, k, v, case)` in `dtype`."""
    *inputs, grad = (each.to(dtype) for each in case.inputs())
    leaves = [each.requires_grad_() for each in inputs]
    out = attention(*leaves, case)
    out.backward(grad)
    return [out.detach(), *(each.grad for each in leaves)]


def fused(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    """torch's own attention, [B, T, H, d]."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=True).transpose(1, 2)


def all_differences(mesh: Mesh, cases: list[Case]) -> list[list[float]]:
    return [differences(mesh, case) for case in cases]


def assert_whole(ranks: Any, cp: int, cases: list[Case], bound: float = 1e-10) -> None:
    """Run the cases on `cp` ranks and hold out, dq, dk and dv against the whole's."""
    for found in ranks.run(cp, all_differences, cases, axes={"cp": cp}):
        for case, values in zip(cases, found, strict=True):
            assert max(values) < bound, (case, values)


def assert_as_near_as_torch(ranks: Any, cp: int, cases: list[Case], times: float = 2.0) -> None:
    """In the cases' narrow dtype no result is more than `times` as far from the whole's as torch's own on one device.

    That has as many roundings, in other places: the largest of thousands comes out up to 1.6 times as large. Where the
    scores are written out torch's are too.
    """
    for found in ranks.run(cp, all_differences, cases, axes={"cp": cp}):
        for case, values in zip(cases, found, strict=True):
            right = computed(case, torch.float64, whole)
            own = computed(case, case.dtype, whole if case.method == "rsa" else fused)
            allowed = [times * _distance(theirs, each, each) for theirs, each in zip(own, right, strict=True)]
            assert all(ours <= most for ours, most in zip(values, allowed, strict=True)), (case, values, allowed)


def influence(mesh: Mesh, cases: list[Case], positions: list[int]) -> list[dict[int, list[int]]]:
    """For each case, and each position: where the output changes when key and value there do."""
    return [{position: _changed(mesh, case, position) for position in positions} for case in cases]


def _changed(mesh: Mesh, case: Case, position: int) -> list[int]:
    q, k, v, _ = case.inputs()
    outs = []
    for change in (0.0, 1.0):
        k, v = k.clone(), v.clone()
        k[:, position] += change
        v[:, position] -= change
        parts = [mine(each, mesh, case.order) for each in (q, k, v)]
        outs.append(context.attention(*parts, mesh, **case.options))
    changed = (outs[0] != outs[1]).flatten(2).any(-1).any(0).contiguous()
    whole = changed.new_empty((mesh.sizes["cp"], *changed.shape))
    mesh.group("cp").all_gather(whole, changed, reason="test", phase="step")
    held = [spans(case.length, mesh.sizes["cp"], rank, case.order) for rank in range(mesh.sizes["cp"])]
    where = [position for parts in held for part in parts for position in part]
    return sorted(p for p, differs in zip(where, whole.flatten().tolist(), strict=True) if differs)
