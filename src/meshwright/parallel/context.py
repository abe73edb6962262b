"""Context parallelism: attention over a sequence of which each rank holds a part.

All but attention treats positions one by one, so the ranks of `cp` only meet there: each has the queries of its own
positions and needs the keys and values of all that these see. Five ways to bring them together:

    ========  =============================================  ======================  =============================
    method    what moves                                     a rank holds, beside    in
                                                             its own parts
    ========  =============================================  ======================  =============================
    gather    all-gather of k and v, reduce-scatter of       k and v of all          gathered.py
              their gradients
    rsa       k around a ring, then v                        scores, T/cp × T        rsa.py
    ring      k and v together around a ring, under the      two parts of k and v    ring.py
              kernels
    ulysses   all-to-all from positions to heads and back    nothing                 ulysses.py
    usp       ulysses among neighbours, a ring of these      two parts of k and v    ulysses.py, ring.py
    ========  =============================================  ======================  =============================

Activations a rank: all of them by cp, but for what the table says. In which order positions are dealt out decides how
even the work is: see spec/sequence.py. Each method is here as a function on tensors, and `apply` puts it in the place
of a model's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn

from meshwright.comm.mesh import Mesh
from meshwright.model.attention import Explicit, Sdpa
from meshwright.model.dropout import DropoutKey
from meshwright.parallel import gathered, ring, rsa, ulysses
from meshwright.parallel.recompute import Recompute
from meshwright.parallel.sight import Context
from meshwright.spec.errors import UserError
from meshwright.spec.sequence import Method, Order, check_documents, check_method

_AS_THEY_ARE: dict[Method, Callable[[Context, Tensor, Tensor, bool, int | None], Tensor]] = {
    "gather": gathered.attend,
    "rsa": rsa.attend,
}
"""Of heads that nobody deals out; what is not here is a ring."""


def attend(context: Context, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """Attention of this rank's queries: q [B, T/cp, H, d], k and v [B, T/cp, K, d] -> [B, T/cp, H, d].

    Query heads j·H/K to (j+1)·H/K − 1 read key-value head j. Raises UserError for what the method cannot do.
    """
    _check(context, q, k, v)
    try:
        length = q.size(1) * context.ranks
        check_documents(context.packed or (0, length), length, context.ranks, context.order)
        check_method(
            context.method, ranks=context.ranks, heads=q.size(2), kv_heads=k.size(2), inner=context.inner,
            causal=causal, window=window,
        )  # fmt: skip
    except ValueError as exc:
        raise UserError(f"cp: {exc}") from exc
    if context.inner > 1:
        return ulysses.attend(context, q, k, v, causal, window)
    q = q.contiguous()  # backward would keep all of what it is a view of
    return _AS_THEY_ARE.get(context.method, ring.attend)(context, q, torch.stack((k, v)), causal, window)


def _check(context: Context, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise UserError for tensors that do not belong together, before anything is sent."""
    alike = k.shape == v.shape and q.dim() == k.dim() == 4
    if not alike or q.shape[:2] != k.shape[:2] or q.size(-1) != k.size(-1):
        shapes = ", ".join(str(list(t.shape)) for t in (q, k, v))
        raise UserError(f"cp: q, k and v are {shapes}, and not [B, T/cp, H, d] and twice [B, T/cp, K, d]")
    if not q.dtype == k.dtype == v.dtype:
        raise UserError(f"cp: q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, and not of one dtype")
    if context.order not in get_args(Order):
        raise UserError(f"cp: order={context.order}: use one of {', '.join(get_args(Order))}")
    length, documents = q.size(1) * context.ranks, context.documents
    if documents is not None and tuple(documents.shape) not in ((length,), (len(q), length)):
        raise UserError(
            f"cp: documents are {list(documents.shape)}, and not those of the whole sequences on every rank, "
            f"[{length}] or [{len(q)}, {length}]"
        )


# -- on tensors ------------------------------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Mesh,
    *,
    method: Method,
    order: Order = "zigzag",
    inner: int = 1,
    causal: bool = True,
    window: int | None = None,
    documents: Tensor | None = None,
    packed: Sequence[int] | None = None,
    micro: int | None = None,
) -> Tensor:
    """Attention over the mesh's `cp` ranks by one of the methods above.

    q [B, T/cp, H, d], k and v [B, T/cp, K, d]: this rank's part of the sequence, in the given order (spec/sequence.py
    says which positions those are); gives its part of the output, [B, T/cp, H, d]. Differentiable. inner: the
    neighbours among which usp deals heads out. window: a query sees itself and the window − 1 keys before it.
    documents: i64[T] or [B, T], ascending, of the whole sequence on every rank; queries see keys of their own document.
    packed: (0, 4, 8), where documents begin and the end, if each is cut by itself; then these are the documents.
    micro: the micro-batch, for the ledger.

    All ranks of `cp` must call it, in the same order, with parts of one shape. Raises UserError for lengths and heads
    that do not divide, and for tensors that do not belong together, before anything is sent.
    """
    context = Context(mesh, method=method, order=order, inner=inner)
    context.documents, context.packed, context.micro = documents, packed, micro
    return attend(context, q, k, v, causal=causal, window=window)


gathered_attention = partial(attention, method="gather")
rsa_attention = partial(attention, method="rsa")
ring_attention = partial(attention, method="ring")
ulysses_attention = partial(attention, method="ulysses", order="contiguous")  # whose work is even in any order
usp_attention = partial(attention, method="usp")


# -- in a model ------------------------------------------------------------------------------------------------------


class Core(nn.Module):
    """Attention over the ranks of `cp` in the place of the plain model's: see model/attention.py.

    q [B, T/cp, H, d], k and v [B, T/cp, K, d] -> [B, T/cp, H·d].
    """

    def __init__(self, context: Context, causal: bool, window: int | None) -> None:
        super().__init__()
        self.context, self.causal, self.window = context, causal, window

    def mask(self, length: int, dtype: torch.dtype, device: torch.device, documents: Tensor | None = None) -> None:
        """None: blocks that need a mask have one of their own."""
        assert documents is None, "those of whole sequences are for the context to know"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: DropoutKey | None) -> Tensor:
        assert mask is None, "who sees whom is for the ranks together to say"
        return attend(self.context, q, k, v, causal=self.causal, window=self.window).flatten(2)


def apply(
    module: nn.Module,
    mesh: Mesh,
    *,
    method: Method,
    order: Order = "zigzag",
    inner: int = 1,
    recompute: Recompute | None = None,
) -> Context:
    """Put attention over the mesh's `cp` ranks in the place of every Sdpa and Explicit of `module`, in place.

    Whoever calls the module gives it this rank's part of the sequence, with its positions, and sets the returned
    context's `micro`, and `documents` or `packed` where there are several. inner: usp's ranks that deal heads out.
    Raises UserError for attention that drops weights: which ones must not depend on who computes them, and kernels draw
    their own.
    """
    context = Context(mesh, method=method, order=order, inner=inner, recompute=recompute)
    cores = {name: core for name, core in module.named_modules() if isinstance(core, Sdpa | Explicit)}
    for name, core in cores.items():
        if _drops(core):
            raise UserError(f"cp: {name} drops attention weights, which no method over cp does; use attn_dropout=0")
    for name, core in cores.items():
        module.set_submodule(name, Core(context, core.causal, core.window).train(core.training))
    return context


def _drops(core: Sdpa | Explicit) -> bool:
    return bool(core.dropout if isinstance(core, Sdpa) else core.dropout.p)
