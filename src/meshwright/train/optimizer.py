"""AdamW over flat shards: torch's fused kernel, one tensor for each run of parameters that decays alike.

The kernel is called by its operator and not through `torch.optim.AdamW`: making one of those imports the compiler,
about three seconds of every rank's start, to update a handful of flat tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.parallel.flat import Segment, Unit
from meshwright.parallel.placement import Placement
from meshwright.parallel.zero import Sharded
from meshwright.spec.run import WIDENED, Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _State:
    """A unit's shard and what Adam keeps for it: two moments of the master weights' dtype and size."""

    unit: Unit
    segments: tuple[Segment, ...]
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True)
class _Step:
    """What all kernel calls of one step share. divisor: `divide_by` as the kernel takes it, float32, one element."""

    lr: float
    divide_by: float
    divisor: Tensor


class FlatAdamW:
    """Decoupled weight decay (Loshchilov and Hutter 2019) on matrices only, on each unit's shard."""

    def __init__(self, sharded: Sharded, options: Optimizer) -> None:
        self._sharded = sharded
        self._options = options
        self._step = torch.zeros((), dtype=torch.float32, device=sharded.device)
        self._states = [
            _State(unit, unit.segments, torch.zeros_like(unit.master), torch.zeros_like(unit.master))
            for unit in sharded.units
            if unit.trainable
        ]

    @torch.no_grad()
    def step(self, lr: float, divide_by: float = 1.0) -> None:
        """Update every shard from its gradients, divided by `divide_by`, and let the other ranks have the result.

        Each unit's gather begins as soon as the unit is updated; forward needs the first one first.
        """
        self._step += 1
        # Once, and not for each call: an accelerator's is a copy from the host.
        step = _Step(lr, divide_by, torch.tensor(divide_by, dtype=torch.float32, device=self._step.device))
        # With nothing to gather, one call of the kernel for all units.
        at_once = [self._states] if self._sharded.stage == 0 else [[state] for state in self._states]
        for states in at_once:
            for decay in (True, False):
                self._update([(s, run) for s in states for run in s.segments if run.decay == decay], step)
            for state in states:
                self._sharded.publish(state.unit)

    def _update(self, runs: Sequence[tuple[_State, Segment]], step: _Step) -> None:
        if not runs:
            return
        weights = [run.of(state.unit.master) for state, run in runs]
        gradients = [run.of(state.unit.gradient_shard) for state, run in runs]
        moments = [[run.of(state.exp_avg) for state, run in runs], [run.of(state.exp_avg_sq) for state, run in runs]]
        decay = self._options.weight_decay if runs[0][1].decay else 0.0
        if gradients[0].dtype == weights[0].dtype:
            self._kernel(weights, gradients, moments[0], moments[1], decay, step)
            return
        # The kernel wants both in one dtype: widen a part at a time, so that no whole copy is made.
        for weight, gradient, first, second in zip(weights, gradients, *moments, strict=True):
            for start in range(0, len(weight), WIDENED):
                part = slice(start, start + WIDENED)
                wide = gradient[part].to(weight.dtype)
                self._kernel([weight[part]], [wide], [first[part]], [second[part]], decay, step)

    def _kernel(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        decay: float,
        step: _Step,
    ) -> None:
        """The division takes no pass of its own: the kernel does it, as for a loss scale. It knows the divisor in
        float32 only, so gradients of higher precision are divided beforehand."""
        scale = None
        if gradients[0].dtype == torch.float64:
            torch._foreach_div_(gradients, step.divide_by)
        else:
            scale = step.divisor
        torch._fused_adamw_(
            weights,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            [self._step] * len(weights),
            lr=step.lr,
            beta1=self._options.betas[0],
            beta2=self._options.betas[1],
            weight_decay=decay,
            eps=self._options.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
        )

    @property
    def steps(self) -> int:
        """Updates made so far; skipped steps do not count."""
        return int(self._step)

    def set_steps(self, steps: int) -> None:
        """Continue bias correction as after `steps` updates."""
        self._step.fill_(steps)

    def named_moments(self) -> Iterator[tuple[Placement, str, Tensor]]:
        """Each parameter's record, "exp_avg" or "exp_avg_sq", and that moment, whole; collective, see `whole`."""
        for kind in MOMENTS:
            shards = {state.unit: getattr(state, kind) for state in self._states}
            for placement, moment in self._sharded.whole(shards.get, kind):
                yield placement, kind, moment

    def shards(self) -> dict[Unit, dict[str, Tensor]]:
        """By unit and kind, the moments of this rank's shards."""
        return {state.unit: {kind: getattr(state, kind) for kind in MOMENTS} for state in self._states}

    def storages(self) -> dict[str, list[Tensor]]:
        """The tensors held, by the names that memory prediction uses."""
        return {
            "adam moments": [moment for state in self._states for moment in (state.exp_avg, state.exp_avg_sq)],
            "scalars": [self._step],
        }
