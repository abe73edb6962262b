"""Attention over parts of a sequence held against attention of the whole, written out in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.parallel import context
from meshwright.spec.sequence import Method, Order, positions


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
    return whole[:, positions(whole.size(1), mesh.sizes["cp"], mesh.coords["cp"], order, documents=packed)].contiguous()


def differences(mesh: Mesh, case: Case) -> list[float]:
    """How far this rank's out, dq, dk and dv are from the whole attention's, each relative to the largest there."""
    *inputs, grad = case.inputs()
    inputs = [each.requires_grad_() for each in inputs]
    expected = whole(*inputs, case)
    expected.backward(grad)
    parts = [mine(each.detach(), mesh, case.order, case.packed).to(case.dtype).requires_grad_() for each in inputs]
    out = context.attention(*parts, mesh, **case.options)
    assert out.dtype == case.dtype
    out.backward(mine(grad, mesh, case.order, case.packed).to(case.dtype))
    found = [out.detach(), *(each.grad for each in parts)]
    right = [expected.detach(), *(each.grad for each in inputs)]
    return [
        float(
            (ours.double() - mine(theirs, mesh, case.order, case.packed)).abs().max()
            / theirs.abs().max().clamp_min(0.1)
        )
        for ours, theirs in zip(found, right, strict=True)
    ]


def all_differences(mesh: Mesh, cases: list[Case]) -> list[list[float]]:
    return [differences(mesh, case) for case in cases]


def parts_of(mesh: Mesh, cases: list[Case]) -> list[list[Tensor]]:
    """This rank's out, dq, dk and dv."""
    found = []
    for case in cases:
        *inputs, grad = (mine(each, mesh, case.order).to(case.dtype) for each in case.inputs())
        found.append(
            results(lambda q, k, v, case: context.attention(q, k, v, mesh, **case.options), inputs, grad, case)
        )
    return found


def results(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, case: Case) -> list[Tensor]:
    """out, dq, dk and dv of `function(q, k, v, case)`."""
    inputs = [each.requires_grad_() for each in inputs]
    out = function(*inputs, case)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def fused(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    heads = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=case.causal, enable_gqa=True).transpose(1, 2)


def assert_as_right_as_torch(ranks: Any, cp: int, cases: list[Case]) -> None:
    """Errors (root of the mean square) at most half more than those of torch's attention over the whole in the same
    dtype: fused, and for rsa, which is not, written out."""
    for case, *parts in zip(cases, *ranks.run(cp, parts_of, cases, axes={"cp": cp}), strict=True):
        *inputs, grad = case.inputs()
        own = whole if case.method == "rsa" else fused
        torchs = results(own, [each.to(case.dtype) for each in inputs], grad.to(case.dtype), case)
        right = results(whole, inputs, grad, case)
        order = [position for rank in range(cp) for position in positions(case.length, cp, rank, case.order)]
        for ours, one, exact in zip(zip(*parts, strict=True), torchs, right, strict=True):
            error, bound = ((found.double() - exact[:, order]).norm() for found in (torch.cat(ours, 1), one[:, order]))
            assert ours[0].dtype == case.dtype and error < 1.5 * bound, (case, error / bound)


def assert_whole(ranks: Any, cp: int, cases: list[Case]) -> None:
    """Run the cases on `cp` ranks and hold out, dq, dk and dv against the whole's."""
    for found in ranks.run(cp, all_differences, cases, axes={"cp": cp}):
        for case, values in zip(cases, found, strict=True):
            assert max(values) < 1e-10, (case, values)


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
    cp = mesh.sizes["cp"]
    where = [position for rank in range(cp) for position in positions(case.length, cp, rank, case.order)]
    return sorted(p for p, differs in zip(where, whole.flatten().tolist(), strict=True) if differs)
