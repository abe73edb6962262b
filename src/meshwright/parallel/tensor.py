"""Tensor parallelism (Megatron-LM, Shoeybi et al. 2019), and sequence parallelism beside it (Korthikanti et al. 2022).

The ranks of `tp` compute every block together. A block's halves, attention and MLP, are each a product whose outputs
are dealt out (columns: heads, or feed-forward units), something between that does not mix them, and a product whose
inputs are dealt out in the same way (rows); the ranks' results of that are added. So a half needs one sum forward and
one backward, and the same between two halves would be needed after each product if both were cut alike. The embedding
and the head are cut by words, and the loss is computed from parts of the logits (vocabulary.py).

    ===============  ==========================================  =============================================
    a half block     forward                                     backward
    ===============  ==========================================  =============================================
    tp               all-reduce of the outputs                   all-reduce of the input's gradient
    tp and sp        all-gather of the input, reduce-scatter     all-gather of the outputs' gradient and of the
                     of the outputs                              input, reduce-scatter of the input's gradient
    ===============  ==========================================  =============================================

Beside `tp` alone, norms, dropout and the residual stream are the same on all ranks. With `sp` each rank has its part
of the sequence there. An all-reduce is a reduce-scatter and an all-gather, so both send the same, but for the input
that backward gathers again instead of keeping it whole. That gather, and the sums of inputs' gradients, run under
products.

Memory a rank: parameters, gradients and states of all matrices by t; of a layer's activations sbh(34 + 5as/h) with `tp`
sbh(10 + 24/t + 5as/ht), with `sp` too all of it by t.

The model stays as it is written: `apply` puts other layers in the place of its own, by the plan of spec/splitting.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from meshwright.comm.mesh import Mesh
from meshwright.model.dropout import Dropout
from meshwright.model.layers import Conv1D, Linear
from meshwright.parallel import vocabulary
from meshwright.parallel.placement import Placement, cut_out, plain_placements
from meshwright.parallel.products import Columns, Line, Rows, Together
from meshwright.parallel.recompute import Recompute
from meshwright.spec.cuts import Cut
from meshwright.spec.errors import UserError
from meshwright.spec.model import divisors
from meshwright.spec.splitting import Option, Split, cut_of, key_of, summed


def apply(
    module: nn.Module,
    mesh: Mesh,
    plan: Mapping[str, Split],
    *,
    sequence: bool = False,
    chunks: int = 1,
    recompute: Recompute | None = None,
) -> tuple[Line, dict[str, Placement]]:
    """Cut `module` over the mesh's `tp` ranks by `plan`; returns the line of ranks, and a record of each parameter.

    The module is changed in place: layers that `plan` names by their place in the module tree, with `*` for a number,
    are replaced by ones that hold this rank's part, under the same names; values are cut too, where there are any
    (not on the meta device). Columns and rows must be nn.Linear or this project's layers. All ranks of `tp` must give
    the same input, with `sequence` parts of the same. chunks: with `sequence`, pieces in which forward gathers inputs,
    each multiplied while the next ones are on the wire. Raises UserError for a name that is nowhere, and for a layer
    that cannot be cut so.
    """
    line = Line(mesh.group("tp"), sequence=sequence, chunks=chunks, recompute=recompute)
    whole = plain_placements(module, replicated=[axis for axis, size in mesh.sizes.items() if size > 1])
    coordinate, tp = mesh.coords["tp"], mesh.sizes["tp"]
    keys = {
        name: key for name, _ in module.named_modules(remove_duplicate=False) if (key := key_of(plan, name)) is not None
    }
    if sequence and (options := [key for key, split in plan.items() if split.options]):
        raise UserError(
            f"tensor: {', '.join(options)} gather or scatter features, and between such layers every rank would have "
            "the whole gradient of what sequence parallelism takes for a part; use one of the two"
        )
    if missing := [key for key in plan if key not in keys.values()]:
        raise UserError(f"tensor: the plan names {', '.join(missing)}, and the module has no such layer")
    splits = {name: plan[key] for name, key in keys.items()}
    olds = {name: module.get_submodule(name) for name in splits}  # all of them, before one is replaced
    for name, split in splits.items():
        _check_layer(name, olds[name], split, tp, sequence)
    for placement in whole.values():
        if len({splits.get(name.rpartition(".")[0]) for name in placement.names}) > 1:
            raise UserError(f"tensor: {' and '.join(placement.names)} are one tensor, and the plan cuts them unlike")
    placements = {
        name: _placed(placement, splits.get(name.rpartition(".")[0]), module, tp, coordinate, sequence)
        for name, placement in whole.items()
    }
    local = {
        each: nn.Parameter(
            cut_out(module.get_parameter(name), placement.cuts), module.get_parameter(name).requires_grad
        )
        for name, placement in placements.items()
        if placement.cuts
        for each in placement.names[:1]
    }
    shared = {other: placements[name].name for name in placements for other in placements[name].names}
    together: dict[tuple[str, str], Together] = {}
    news: dict[str, nn.Module] = {}
    for name, split in splits.items():
        old = olds[name]
        part = {leaf: local.get(shared[f"{name}.{leaf}"], p) for leaf, p in old.named_parameters(recurse=False)}
        new: nn.Module | None = None
        parent = name.rpartition(".")[0]
        if split.style in ("columns", "rows"):
            outputs = _outputs(old, name)
            kind = Columns if split.style == "columns" else Rows
            options = dict.fromkeys(_options(split, name), True)
            new = kind(part["weight"], part.get("bias"), outputs, line, _reason(parent), **options)
            if isinstance(new, Columns) and split.reads:
                new.together = together.setdefault((parent, split.reads), new.together)
                first = new.together.layers[0]
                if (first.outputs, first.gather_input) != (new.outputs, new.gather_input):
                    raise UserError(f"tensor: layers of {parent or 'the module'} that read one input are unlike {name}")
                if new not in new.together.layers:
                    new.together.layers.append(new)
        elif split.style in ("vocabulary", "positions"):
            new = vocabulary.part_of(old, name, part, line)
        if new is not None:
            news[name] = new.train(old.training)
    # Nothing is refused from here on.
    for name, old in olds.items():
        if isinstance(old, Dropout) and (sequence or splits[name].style == "heads"):
            old.part = (coordinate, tp)
    for name, new in news.items():
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, new)
    if any(placement.cuts for placement in placements.values()):
        for each in module.modules():
            each.register_state_dict_pre_hook(_refuse_parts)
    for (parent, _), layers in together.items():
        module.get_submodule(parent).register_forward_hook(layers.forget, always_call=True)
    return line, placements


def _placed(
    placement: Placement, split: Split | None, module: nn.Module, tp: int, coordinate: int, sequence: bool
) -> Placement:
    cut = None
    if split is not None:
        layer = placement.name.rpartition(".")[0]
        outputs = _outputs(module.get_submodule(layer), layer) if split.style in ("columns", "rows") else 0
        cut = cut_of(split, placement.shape, outputs, tp, coordinate)
        if cut is not None and split.style != "vocabulary":
            _check_divides(placement, split, cut, tp)
    partial = summed(split, placement.shape, cut, sequence)
    counted = coordinate == 0 if cut is None else cut.copy == 0
    replicated = placement.replicated if cut is None else tuple(a for a in placement.replicated if a != "tp")
    return replace(
        placement, cuts=() if cut is None else (cut,), partial=partial, counted=counted, replicated=replicated
    )


def _check_divides(placement: Placement, split: Split, cut: Cut, tp: int) -> None:
    """Raise UserError for what cannot be dealt out in equal parts: filled up, it would compute what is not there."""
    size, what = placement.shape[cut.dim], "inputs" if split.style == "rows" else "outputs"
    if sum(cut.blocks) != size:
        fused = " + ".join(map(str, cut.blocks))
        raise UserError(f"tensor: {placement.name} has {size} {what}, and the plan says {fused}")
    torn = split.heads % tp and (split.style == "rows" or tp % split.heads)  # copies of inputs would be added twice
    if torn or any(block % cut.ways for block in cut.blocks):
        by = math.gcd(*cut.blocks, split.heads)
        heads = f" of {split.heads} heads" if split.heads else ""
        raise UserError(
            f"tensor: tp={tp} does not divide the {size} {what}{heads} of {placement.name}; "
            f"use one of {', '.join(map(str, divisors(by)))}"
        )


def _check_layer(name: str, old: nn.Module, split: Split, tp: int, sequence: bool) -> None:
    """Raise UserError for a layer that the plan names and that would lose something, or get nothing."""
    if isinstance(old, nn.modules.dropout._DropoutNd) and tp > 1:
        raise UserError(
            f"tensor: {name} draws its masks from torch's generator, which does not know the parts of a "
            "tensor; use meshwright.model.dropout.Dropout"
        )
    if split.style not in ("columns", "rows", "vocabulary", "positions"):
        return
    hooks = [old._forward_hooks, old._forward_pre_hooks, old._backward_hooks, old._backward_pre_hooks]
    for parameter in old.parameters(recurse=False):
        hooks += [parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)]
    if any(hooks):
        raise UserError(f"tensor: {name} has hooks, which what takes its place would not have; register them after it")


def _refuse_parts(*_: object) -> None:
    raise UserError(
        "tensor: state_dict() would hold this rank's parts of tensors; take the whole ones from "
        "Sharded.named_parameters() on all ranks"
    )


def _outputs(layer: nn.Module, name: str) -> int:
    """The dimension of a linear layer's weight along which its outputs run."""
    if type(layer) not in (nn.Linear, Linear, Conv1D):  # nor a class made of one, which may do anything
        raise UserError(f"tensor: {name} is no linear layer, and cannot be cut by columns or rows")
    return 1 if isinstance(layer, Conv1D) else 0


def _options(split: Split, name: str) -> tuple[Option, ...]:
    right: tuple[Option, ...] = ("gather_input", "gather_output") if split.style == "columns" else ("scatter_input",)
    if wrong := [option for option in split.options if option not in right]:
        raise UserError(f"tensor: {name} is cut by {split.style}, which have no {', '.join(wrong)}")
    if "gather_output" in split.options and (split.fused or split.heads):
        raise UserError(
            f"tensor: {name} is to gather its outputs, so nothing in them is torn apart; leave fused and heads out"
        )
    return split.options


def _reason(parent: str) -> str:
    """ "tp.attn" or "tp.mlp": the half block that a layer is in, by the last name of its module that is no number."""
    last = next((word for word in reversed(parent.split(".")) if word and not word.isdigit()), "model")
    return f"tp.{ {'self_attn': 'attn'}.get(last, last) }"
