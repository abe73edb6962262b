"""The answer to "which layout?": the best layouts with what each takes and holds; or, where none fits, what is missing.

`plan` is what the command, and a run with `layout: auto`, call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from meshwright.predict.cost.step import StepTime, step_time
from meshwright.predict.memory import Memory, memory
from meshwright.predict.plan.capacity import Allowance, allowance
from meshwright.predict.plan.scale import Change, changes
from meshwright.predict.plan.search import Candidate, Progress, Result, Search
from meshwright.predict.plan.space import run_of
from meshwright.predict.states import STATES
from meshwright.spec.batch import micro_steps
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.run import RunSpec

GROUPS: dict[str, tuple[str, ...]] = {
    "states": STATES,
    "activations": ("activations",),
    "logits": ("logits", "loss workspace"),
    "gathered units": ("gathered units",),
    "buffers": ("buffers", "reductions", "receive buffers", "sent messages"),
    "temporaries": ("inputs", "fresh gradients", "temporaries"),
}
"""What a plan shows of a rank's memory, and which of `Memory.categories` each is."""
DAY = 86400


@dataclass(frozen=True)
class Choice:
    """A layout with micro-batches of `micro` sequences: the time of its step, and the memory of its fullest rank."""

    run: RunSpec
    layout: Layout
    micro: int
    time: StepTime
    memory: Memory
    capacity: int
    allowance: Allowance

    @property
    def micro_batches(self) -> int:
        return micro_steps(self.run.batch.sequences, self.layout.data_ranks, self.micro)

    @property
    def held(self) -> dict[str, int]:
        """Bytes by GROUPS, and on a CPU what checkpoints are written from, which is in the same memory."""
        found = {name: sum(self.memory.categories.get(each, 0) for each in of) for name, of in GROUPS.items()}
        return found | (self.memory.host if self.memory.device == "cpu" else {})

    @property
    def needed(self) -> int:
        """Bytes that a device must have: what is held, and the allowance."""
        return round(self.allowance.needed(self.memory.total))

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.allowance.usable(self.capacity)

    def days(self, tokens: float) -> float:
        """Days of training on so many tokens."""
        return tokens / self.time.tokens_per_second / DAY

    def to_dict(self, tokens: float | None = None) -> dict[str, Any]:
        """In dicts, lists, strings and numbers, for JSON."""
        time = asdict(self.time) | {"bubble": self.time.bubble, "exposed": self.time.exposed}
        return {
            "layout": self.layout.model_dump(mode="json"),
            "micro": self.micro,
            "micro_batches": self.micro_batches,
            "time": time,
            "days": None if tokens is None else self.days(tokens),
            "memory": self.held
            | {
                "total": self.memory.total,
                "allowance": self.needed - self.memory.total,
                "needed": self.needed,
                "capacity": self.capacity,
                "moment": self.memory.moment,
                "rank": self.memory.rank,
            },
            "fits": self.fits,
        }


@dataclass(frozen=True)
class Plan:
    """What a search has found: `choices`, best first; where none fits, `nearest`, and `changes` that would do."""

    run: RunSpec
    cluster: Cluster
    choices: tuple[Choice, ...]
    result: Result
    nearest: Choice | None = None
    changes: tuple[Change, ...] = ()

    @property
    def best(self) -> Choice:
        return self.choices[0]

    @property
    def chosen(self) -> RunSpec:
        """The run with the best layout and its micro-batches."""
        return run_of(self.run, self.best.layout, self.best.micro)

    @property
    def why(self) -> str:
        """Why the first is first, in a sentence."""
        found = self.result
        words = f"{self.best.time.seconds:.3g} s a step, the least of {found.fitting:,} layouts that fit"
        words += f" of {found.layouts:,}"
        if found.cut_short:
            words += ", as far as the search went"
        if len(self.choices) > 1:
            words += f"; the next takes {self.choices[1].time.seconds / self.best.time.seconds - 1:.1%} longer"
        return words

    def to_dict(self, tokens: float | None = None) -> dict[str, Any]:
        """In dicts, lists, strings and numbers, for JSON."""
        found = self.result
        return {
            "devices": self.cluster.devices,
            "device": self.cluster.device.name,
            "sequences": self.run.batch.sequences,
            "seq_len": self.run.data.seq_len,
            "precision": self.run.precision,
            "layouts": found.layouts,
            "fitting": found.fitting,
            "simulated": found.simulated,
            "cut_short": found.cut_short,
            "usable": found.usable,
            "choices": [choice.to_dict(tokens) for choice in self.choices],
            "nearest": None if self.nearest is None else self.nearest.to_dict(tokens),
            "changes": [asdict(change) for change in self.changes],
        }


def plan(
    run: RunSpec,
    cluster: Cluster,
    *,
    top: int = 1,
    only: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The `top` best layouts of `run`'s model, sequences, batch, precision and options on all devices of `cluster`.

    The run's own layout and batch.micro do not matter. only: fields of the layout, and "micro", that are given: see
    `Space`. Interrupted (KeyboardInterrupt), it answers with the best so far. Where none fits, `choices` is empty.
    """
    search = Search(run, cluster, top=top, only=only)
    result = search.run_all(progress)
    choices = tuple(choice_of(search, candidate) for candidate in result.best)
    if choices or result.cut_short:
        return Plan(run, cluster, choices, result)
    nearest = search.nearest()
    if nearest is None:
        return Plan(run, cluster, (), result)
    return Plan(run, cluster, (), result, choice_of(search, nearest), tuple(changes(search, nearest)))


def choice_of(search: Search, candidate: Candidate) -> Choice:
    """A layout of a search with all its figures."""
    layout, device = candidate.layout, search.cluster.device
    run = run_of(search.run, layout, candidate.micro)
    held = memory(run, layout, search.fullest_rank(candidate), search.device)
    length = candidate.seconds if isfinite(candidate.seconds) else None
    time = step_time(run, layout, search.cluster, search.parts, length=length)
    return Choice(search.run, layout, candidate.micro, time, held, device.memory, allowance(device))


def best_with(
    run: RunSpec, cluster: Cluster, only: Mapping[str, Any], progress: Progress | None = None
) -> Choice | None:
    """The best layout that has the fields of `only`; where none of these fits, the one that holds least."""
    search = Search(run, cluster, top=1, only=only)
    result = search.run_all(progress)
    candidate = result.best[0] if result.best else search.nearest()
    return None if candidate is None else choice_of(search, candidate)
