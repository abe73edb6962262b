"""Recompute: keep little of a forward and run it again in backward (Chen et al. 2016; Korthikanti et al. 2022).

A region is a run of blocks. Its forward keeps the region's input and the outputs of chosen operators; of every tensor
that autograd would save, only a number. When backward first asks for one of these, the region's forward runs again,
with the kept outputs in place of their operators, up to the last tensor that autograd would have saved. The same
kernels run on the same numbers, so gradients have the same bits. "Saved" is here what autograd saves of a forward,
"kept" what a region has in its place until it is computed again.

    ==========================  =======================================  =================================
    mode                        kept of a region                         computed again
    ==========================  =======================================  =================================
    full                        a block's input                          the block, but its last product
    full, every k               the input of k blocks                    k blocks, but the last product
    selective, keep: linear     a block's input, and what its linear     attention, norms, activations,
                                layers but the last put out              dropout masks
    ==========================  =======================================  =================================

Of L blocks with A bytes of activations and I of input each, full holds L·I + A where L·A were, and every k = √L
about √L·(I + A) (Chen et al. 2016, section 4.2). Sends nothing itself; a collective inside a region is issued again
where the recompute comes by. ZeRO 3 needs a unit's parameters in backward either way, and gathers none twice for this.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from meshwright.comm.trace import Tracing
from meshwright.spec.errors import UserError
from meshwright.spec.traffic import Phase

T = TypeVar("T")

OPERATORS: dict[str, tuple[str, ...]] = {
    "linear": ("mm", "addmm"),
    "attention": (
        "bmm",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
    "softmax": ("_softmax", "_safe_softmax"),
    "activation": ("silu", "gelu"),
}
"""torch's operators by the words of `layout.recompute_keep`; bmm and _safe_softmax are also what the fused attention
comes to on the CPU where it drops weights."""

_DIFFERS = (
    "recompute: a block did something else when it was computed again (it depends on state that changes, or on random "
    "numbers of its own); use recompute=none for it"
)
_WITHIN = "recompute: a block runs backward within its own forward, which is not supported; use recompute=none for it"


class Recompute:
    """Cuts `blocks` into regions of `every` and has each computed again in backward. Attach it before ZeRO.

    With `every` above 1 each block must be called with the output of the one before it, and otherwise with the same
    arguments. keep: words of OPERATORS whose outputs are kept. rng: set torch's random generators back for the
    recompute, for blocks that draw from them. tracing: where the recompute is to be seen.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        every: int = 1,
        keep: Sequence[str] = (),
        rng: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        assert every >= 1, every
        self.operators = frozenset(getattr(torch.ops.aten, name) for word in keep for name in OPERATORS[word])
        self.words = frozenset(keep)
        self.rng = rng
        self.tracing = tracing or Tracing()
        self.running = False  # whether a region is being computed again at the moment
        self.mode: _Record | _Replay | None = None  # what looks after kept operators in the region that runs
        self.regions = [list(blocks[start : start + every]) for start in range(0, len(blocks), every)]
        for region in self.regions:
            _Region(self, region)

    @property
    def phase(self) -> Phase:
        """What a collective within a block is issued in: "forward", or "recompute" the second time."""
        return "recompute" if self.running else "forward"

    def call(self, word: str, function: Callable[[], T]) -> T:
        """`function()`, whose tensors count as what an operator of `word` puts out: where such are kept, they are,
        and nothing in it is done a second time."""
        return function() if self.mode is None or word not in self.words else self.mode.call(function)

    def hollow(self, word: str, function: Callable[[], T]) -> T:
        """`function()`, where operators of `word` are only a step towards what `call` keeps: what they put out is not
        kept, and the second time they put out nothing of worth, in the right shape."""
        return function() if self.mode is None or word not in self.words else self.mode.hollow(function)


class _Region:
    """A run of blocks; opens a frame when forward enters the first and closes it when forward leaves the last."""

    def __init__(self, owner: Recompute, blocks: Sequence[nn.Module]) -> None:
        self.owner, self.blocks = owner, blocks
        self.frame: _Frame | None = None
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True)
            block.register_forward_hook(partial(self._leave, index), always_call=True)

    def _enter(self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.owner.running:
            return
        if index > 0:
            if self.frame is not None:
                self.frame.check_next(args, kwargs)
            return
        self._give_up()  # a forward that failed between two blocks
        if torch.is_grad_enabled():
            self.frame = _Frame(self.owner, self.blocks, args, kwargs)

    def _leave(self, index: int, _: nn.Module, args: Any, output: Any) -> None:
        if self.owner.running or self.frame is None:
            return
        if output is None:  # it failed
            self._give_up()
        elif index < len(self.blocks) - 1:
            self.frame.output = output
            self.frame.output_version = _version(output)
        else:
            self.frame.close()
            self.frame = None

    def _give_up(self) -> None:
        if self.frame is not None:
            self.frame.leave()
            self.frame = None


@dataclass
class _Call:
    """One call of a kept operator: its outputs, and how many tensors autograd had saved in the region when it ran."""

    operator: Any
    outputs: list[Any]
    spec: TreeSpec
    saved_before: int


class _Handle:
    """What autograd holds in a saved tensor's place; `tensor` is there from the recompute on."""

    __slots__ = ("__weakref__", "frame", "tensor")

    def __init__(self, frame: _Frame) -> None:
        self.frame = frame
        self.tensor: Tensor | None = None

    def get(self) -> Tensor:
        if self.tensor is None:
            with self.frame.owner.tracing.span("recompute", "recompute"):
                self.frame.recompute()
        assert self.tensor is not None
        return self.tensor


class _Frame:
    """One forward of a region: what it keeps, and the handles that it will give tensors to."""

    def __init__(
        self, owner: Recompute, blocks: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.owner, self.blocks = owner, blocks
        self.output: Any = None  # of the latest block
        self.output_version = 0
        self._first = (args, kwargs)
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self._versions = [leaf._version for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._handles: list[tuple[weakref.ref[_Handle], torch.Size, torch.dtype]] = []
        self._calls: list[_Call] = []
        self._closed = False
        self._keeper: Any = None  # the node that holds what is kept
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._rng: _Rng | None = _Rng(tensors)
        self._autocast = {kind: _autocast(kind) for kind in {tensor.device.type for tensor in tensors}}
        self._contexts = contextlib.ExitStack()
        self._contexts.enter_context(saved_tensors_hooks(self._pack, _Handle.get))
        if owner.operators:
            owner.mode = _Record(owner.operators, self._calls, self._handles)
            self._contexts.enter_context(owner.mode)

    def leave(self) -> None:
        """The region's forward is over, or has failed."""
        self._contexts.close()
        self.owner.mode = None

    def check_next(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise UserError where the block that is entered does not continue the chain."""
        first, last = self._first
        chained = len(args) == len(first) > 0 and args[0] is self.output and kwargs.keys() == last.keys()
        chained = chained and _version(args[0]) == self.output_version  # nothing has been written to it in between
        if not (chained and all(map(_same, args[1:], first[1:])) and all(_same(kwargs[k], last[k]) for k in kwargs)):
            self.leave()
            raise UserError(
                "recompute: recompute_every above 1 needs blocks that are called one after the other, each with the "
                "output of the one before it and otherwise the same arguments; use recompute_every=1"
            )

    def close(self) -> None:
        """Forward has come to the region's end: keep what the recompute starts from."""
        self.leave()
        self._closed = True
        inputs = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        if [tensor._version for tensor in inputs] != self._versions:
            raise UserError(
                "recompute: a block writes to its input in place, so it cannot be computed again from it; "
                "use recompute=none for it"
            )
        if not self.owner.rng:
            if self._rng is not None and self._rng.moved:
                raise UserError(
                    "recompute: a block draws random numbers from torch's generators, and would draw others the second "
                    "time; use Recompute(..., rng=True), or recompute=none for it"
                )
            self._rng = None
        # What comes behind the last saved tensor is not computed again.
        self._calls = [call for call in self._calls if call.saved_before < len(self._handles)]
        outputs = [leaf for call in self._calls for leaf in call.outputs if isinstance(leaf, Tensor)]
        self._leaves = [_Input(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        for call in self._calls:
            call.outputs = [_KEPT if isinstance(leaf, Tensor) else leaf for leaf in call.outputs]
        self._first, self.output = ((), {}), None
        if self._handles:
            # A node saves what is kept, so that whoever watches or moves saved tensors around this forward gets it too.
            self._keeper = _Keep.apply(torch.empty(0, requires_grad=True), *inputs, *outputs).grad_fn

    def _pack(self, tensor: Tensor) -> _Handle:
        handle = _Handle(self)
        self._handles.append((weakref.ref(handle), tensor.shape, tensor.dtype))
        return handle

    def recompute(self) -> None:
        """Run the region's forward again and give its tensors to the handles that are still held."""
        if not self._closed:
            raise UserError(_WITHIN)
        if self._keeper is None:
            raise UserError(
                "recompute: a region is to be computed again a second time, as when it was used twice in one forward "
                "with recompute_every above 1; use recompute_every=1, or recompute=none for it"
            )
        args, kwargs = self._restore()
        again = _Again(self._handles)
        self.owner.running = True
        try:
            with contextlib.ExitStack() as contexts:
                contexts.enter_context(contextlib.suppress(_Enough))
                contexts.enter_context(torch.enable_grad())
                for kind, (enabled, dtype) in self._autocast.items():
                    contexts.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                contexts.enter_context(saved_tensors_hooks(again.pack, _Again.unpack))
                if self._rng is not None:
                    contexts.enter_context(self._rng.again())
                if self._calls:
                    self.owner.mode = _Replay(self.owner.operators, self._calls)
                    contexts.enter_context(self.owner.mode)
                for block in self.blocks:
                    args = (block(*args, **kwargs), *args[1:])
        finally:
            self.owner.running, self.owner.mode = False, None
            self._calls = []
        if again.packed < len(self._handles):
            raise UserError(_DIFFERS)
        self._handles = []

    def _restore(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The first block's arguments, and the kept outputs back in their calls; nothing is kept afterwards."""
        tensors = iter(self._keeper.saved_tensors)
        self._keeper = None
        leaves = [
            next(tensors).detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, _Input) else leaf
            for leaf in self._leaves
        ]
        for call in self._calls:
            call.outputs = [next(tensors) if leaf is _KEPT else leaf for leaf in call.outputs]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs


@dataclass(frozen=True)
class _Input:
    """Stands in the arguments for a tensor that a node keeps."""

    requires_grad: bool


_KEPT = object()
"""Stands in a call's outputs for a tensor that a node keeps."""
_CALLED = object()
"""The operator of what `Recompute.call` was given."""


@dataclass(frozen=True)
class _Hollow:
    """Stands in a call's outputs for a tensor that nothing asks for."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class _Enough(Exception):
    """All that backward needs has been computed."""


class _Again:
    """Hands the tensors that the second forward saves to the handles of the first, and then ends it."""

    def __init__(self, handles: Sequence[tuple[weakref.ref[_Handle], torch.Size, torch.dtype]]) -> None:
        self._handles = handles
        self.packed = 0

    def pack(self, tensor: Tensor) -> None:
        handle, shape, dtype = self._handles[self.packed]
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise UserError(_DIFFERS)
        waiting = handle()
        if waiting is not None:
            waiting.tensor = tensor.detach()
        self.packed += 1
        if self.packed == len(self._handles):
            raise _Enough

    @staticmethod
    def unpack(_: object) -> Tensor:
        raise UserError(_WITHIN)


class _Keep(torch.autograd.Function):
    """A node that is in nobody's backward and saves tensors."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("nothing depends on this node")


class _Record(TorchDispatchMode):
    """Writes down the outputs of kept operators. Raises UserError where somebody writes to one afterwards: it would be
    written to once more when it stands in for its operator."""

    def __init__(self, operators: frozenset[Any], calls: list[_Call], handles: Sequence[Any]) -> None:
        super().__init__()
        self._operators, self._calls, self._handles = operators, calls, handles
        self._outputs: set[int] = set()  # storages of what is kept
        self._aside = self._hollow = False

    def call(self, function: Callable[[], T]) -> T:
        self._aside = True  # what happens within is part of one call
        try:
            out = function()
        finally:
            self._aside = False
        self._keep(_CALLED, out)
        return out

    def hollow(self, function: Callable[[], T]) -> T:
        self._hollow = True
        try:
            return function()
        finally:
            self._hollow = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and any(t.untyped_storage()._cdata in self._outputs for t in _written(func, args)):
            raise UserError(
                "recompute: a block writes in place to the output of an operator that is kept, which is then not what "
                "the operator put out; keep others, use recompute=full, or a block that does not"
            )
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in self._operators and not self._aside:
            self._keep(func, out)
        return out

    def _keep(self, operator: Any, out: Any) -> None:
        leaves, spec = tree_flatten(out)
        if self._hollow:
            aliases = [_Hollow(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        else:
            aliases = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self._outputs |= {alias.untyped_storage()._cdata for alias in aliases if isinstance(alias, Tensor)}
        self._calls.append(_Call(operator, aliases, spec, len(self._handles)))


class _Replay(TorchDispatchMode):
    """Gives kept outputs in place of calling their operators."""

    def __init__(self, operators: frozenset[Any], calls: Sequence[_Call]) -> None:
        super().__init__()
        self._operators, self._calls = operators, iter(calls)

    def call(self, _: Callable[[], T]) -> T:
        return self._next(_CALLED)

    def hollow(self, function: Callable[[], T]) -> T:
        return function()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket not in self._operators:
            return func(*args, **(kwargs or {}))
        return self._next(func)

    def _next(self, operator: Any) -> Any:
        call = next(self._calls, None)
        if call is None or call.operator is not operator:
            raise UserError(_DIFFERS)
        out = tree_unflatten([_given(leaf) for leaf in call.outputs], call.spec)
        call.outputs = []  # from here on it lives as long as what is computed from it
        return out


def _given(leaf: Any) -> Any:
    """What stands in for one output of a kept operator."""
    if isinstance(leaf, _Hollow):
        return torch.empty((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


class _Rng:
    """torch's random generators as they are now: the CPU's, and those of the devices of `tensors`."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._cpu = torch.get_rng_state()
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    @property
    def moved(self) -> bool:
        """Whether any of them has been drawn from since."""
        if not torch.equal(self._cpu, torch.get_rng_state()):
            return True
        return any(not torch.equal(state, torch.cuda.get_rng_state(device)) for device, state in self._cuda.items())

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """In here they give the same numbers once more; afterwards they go on as if nothing had been."""
        with torch.random.fork_rng(devices=list(self._cuda)):
            torch.set_rng_state(self._cpu)
            for device, state in self._cuda.items():
                torch.cuda.set_rng_state(state, device)
            yield


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, bool | int | float | str) and type(a) is type(b) and a == b)


def _version(value: Any) -> int:
    """How often a tensor's memory has been written to in place."""
    return value._version if isinstance(value, Tensor) else 0


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _written(operator: Any, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """The arguments that an operator writes to."""
    for argument, value in zip(operator._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
            yield value
