"""AdamW over flat segments: torch's fused kernel, one tensor for each run of parameters that decays alike.

The kernel is called by its operator and not through `torch.optim.AdamW`: making one of those imports the compiler,
about three seconds of every rank's start, to update a handful of flat tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.parallel.placement import Placement
from meshwright.parallel.zero import Segment, Sharded
from meshwright.spec.run import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _State:
    """A segment and what Adam keeps for it: two moments of its dtype and size, one float32 step counter."""

    segment: Segment
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


class FlatAdamW:
    """Decoupled weight decay (Loshchilov and Hutter 2019) on matrices only, by `Sharded`'s segments."""

    def __init__(self, sharded: Sharded, options: Optimizer) -> None:
        self._options = options
        self._states = [
            _State(
                segment,
                torch.zeros_like(segment.parameters),
                torch.zeros_like(segment.parameters),
                torch.zeros((), dtype=torch.float32, device=segment.parameters.device),
            )
            for segment in sharded.segments()
        ]

    @torch.no_grad()
    def step(self, lr: float, divide_by: float = 1.0) -> None:
        """Update every parameter from the segments' gradients, divided by `divide_by`.

        The division takes no pass of its own: the kernel does it, as for a loss scale. It knows the divisor in
        float32 only, so gradients of higher precision are divided beforehand.
        """
        for decay in (True, False):
            states = [state for state in self._states if state.segment.decay == decay]
            if not states:
                continue
            scale = None
            if states[0].segment.gradients.dtype == torch.float64:
                torch._foreach_div_([state.segment.gradients for state in states], divide_by)
            else:
                scale = torch.tensor(divide_by, dtype=torch.float32, device=states[0].step.device)
            torch._foreach_add_([state.step for state in states], 1)
            torch._fused_adamw_(
                [state.segment.parameters for state in states],
                [state.segment.gradients for state in states],
                [state.exp_avg for state in states],
                [state.exp_avg_sq for state in states],
                [],
                [state.step for state in states],
                lr=lr,
                beta1=self._options.betas[0],
                beta2=self._options.betas[1],
                weight_decay=self._options.weight_decay if decay else 0.0,
                eps=self._options.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=scale,
            )

    @property
    def steps(self) -> int:
        """Updates made so far; skipped steps do not count."""
        return int(self._states[0].step) if self._states else 0

    def set_steps(self, steps: int) -> None:
        """Continue bias correction as after `steps` updates."""
        for state in self._states:
            state.step.fill_(steps)

    def named_moments(self) -> Iterator[tuple[Placement, str, Tensor]]:
        """Each parameter's record, "exp_avg" or "exp_avg_sq", and that moment in the parameter's own shape; a view."""
        for state in self._states:
            for kind, flat in zip(MOMENTS, (state.exp_avg, state.exp_avg_sq), strict=True):
                for member in state.segment.members:
                    part = flat[member.start - state.segment.offset : member.stop - state.segment.offset]
                    yield member.placement, kind, part.view(member.placement.local_shape)

    def storages(self) -> dict[str, list[Tensor]]:
        """The tensors held, by the names that memory prediction uses."""
        return {
            "adam moments": [moment for state in self._states for moment in (state.exp_avg, state.exp_avg_sq)],
            "step counters": [state.step for state in self._states],
        }
