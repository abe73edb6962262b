"""The engine of pipelines on plain modules: what a stage keeps and lets go, channels, and what it refuses."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.comm.mesh import Mesh, _rounds
from meshwright.parallel.pipeline import Pipeline
from meshwright.schedule import make
from meshwright.schedule.actions import Schedule
from meshwright.spec.errors import UserError
from meshwright.spec.traffic import SENT_TOGETHER

SHAPE = (2, 3, 4)
LARGE_SHAPE = (2, SENT_TOGETHER // 64, 4)  # float64: a message that is looked after at once


class Chain:
    """One linear layer a stage; micro-batches in `empty` have nothing. Weights on all ranks alike."""

    def __init__(
        self, schedule: Schedule, place: int, empty: tuple[int, ...] = (), shape: tuple[int, ...] = SHAPE
    ) -> None:
        self.each = shape
        generator = torch.Generator().manual_seed(1)
        self.all = [nn.Linear(4, 4, dtype=torch.float64) for _ in schedule.stages]
        with torch.no_grad():
            for layer in self.all:
                for parameter in layer.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
        self.x = torch.randn(schedule.micros, *shape, generator=generator, dtype=torch.float64)
        self.stages = schedule.of_rank(place)
        self.empty, self.last = empty, len(schedule.stages) - 1
        self.outputs: list[StorageWeakRef] = []
        self.computed = 0
        self.lasts: list[tuple[int, int]] = []

    def shape(self, micro):
        return None if micro in self.empty else self.each

    def forward(self, stage, micro, hidden):
        self.computed += 1
        # An addition: backward does not need what it makes.
        out = torch.tanh(self.all[stage](self.x[micro] if hidden is None else hidden)) + 1
        if stage < self.last:
            self.outputs.append(StorageWeakRef(out.untyped_storage()))
            return out
        return out.square().sum()

    def before_backward(self, stage, micro, last):
        if last:
            self.lasts.append((stage, micro))

    def after_backward(self, stage, micro):
        pass

    def expected(self):
        """Gradients of all stages, on one rank."""
        for micro, x in enumerate(self.x):
            if micro not in self.empty:
                for layer in self.all:
                    x = torch.tanh(layer(x)) + 1
                x.square().sum().backward()
        found = [[p.grad.clone() for p in layer.parameters()] for layer in self.all]
        for layer in self.all:
            layer.zero_grad()
        return found


def train(mesh, name, micros, chunks, empty):
    schedule = make(name, mesh.sizes["pp"], micros, chunks)
    chain = Chain(schedule, mesh.coords["pp"], empty)
    expected = chain.expected()
    pipeline = Pipeline(mesh, schedule, torch.float64)
    for _ in range(2):  # twice: nothing of a step stays for the next
        for layer in chain.all:
            layer.zero_grad()
        chain.lasts.clear()
        pipeline.run(chain)
    worst = max(
        float((p.grad - right).abs().max())
        for stage in chain.stages
        for p, right in zip(chain.all[stage].parameters(), expected[stage], strict=True)
    )
    return worst, chain.stages, [stage for stage, _ in chain.lasts]


@pytest.mark.parametrize(
    ("name", "ranks_", "micros", "chunks", "empty"),
    [
        ("naive", 2, 3, 1, ()),
        ("gpipe", 3, 4, 1, (3,)),
        ("1f1b", 4, 2, 1, ()),  # fewer micro-batches than ranks
        ("1f1b", 3, 7, 1, (0, 6)),
        ("interleaved", 2, 4, 3, (3,)),
        ("interleaved", 3, 4, 2, ()),
    ],
)
def test_gradients_are_one_ranks(ranks, name, ranks_, micros, chunks, empty):
    for worst, stages, lasts in ranks.run(ranks_, train, name, micros, chunks, empty, axes={"pp": ranks_}):
        assert worst < 1e-14
        assert sorted(lasts) == sorted(stages)  # each stage is told of its last backward once


class Watched(Chain):
    """Counts, before the first backward, the outputs whose memory is still there."""

    def before_backward(self, stage, micro, last):
        if not self.lasts:
            patience = time.monotonic() + 5
            while self.there and time.monotonic() < patience:
                time.sleep(0.01)
            self.lasts = [(self.there, micro)]

    @property
    def there(self):
        return sum(not output.expired() for output in self.outputs)


def outputs_there(mesh, shape):
    schedule = make("gpipe", 2, 4, 1)
    chain = Watched(schedule, mesh.coords["pp"], shape=shape)
    Pipeline(mesh, schedule, torch.float64).run(chain)
    return chain.lasts[0][0]


def test_an_output_is_let_go_when_it_has_left(ranks):
    """GPipe's first rank has made all outputs before the first gradient comes, and keeps their graphs only."""
    assert ranks.run(2, outputs_there, LARGE_SHAPE, axes={"pp": 2}) == [0, 0]


def scored(mesh, micros):
    schedule = make("interleaved", 2, micros, 2)
    chain = Chain(schedule, mesh.coords["pp"], (1,))
    pipeline = Pipeline(mesh, schedule, torch.float64)
    with torch.no_grad():
        pipeline.run_forward(chain)
    return [chain.computed, chain.lasts]


def test_forward_alone(ranks):
    assert ranks.run(2, scored, 4, axes={"pp": 2}) == [[6, []]] * 2  # three micro-batches on two stages


def refused(mesh):
    with pytest.raises(UserError, match=r"1f1b is for 3 pipeline ranks, and there are 2"):
        Pipeline(mesh, make("1f1b", 3, 3, 1), torch.float32)
    halves = make("1f1b", 2, 2, 1)
    apart = tuple(
        tuple(action._replace(kind="backward_input") if action.kind == "backward" else action for action in actions)
        for actions in halves.ranks
    )
    with pytest.raises(UserError, match="inputs and of weights apart, which is not available yet"):
        Pipeline(mesh, Schedule("zb", halves.stages, halves.micros, apart), torch.float32)


def test_what_the_engine_cannot_run_is_refused(ranks):
    """All is asserted on the ranks, whose failures `run` raises."""
    ranks.run(2, refused, axes={"pp": 2})


def talk(mesh: Mesh):
    """Along a ring of ranks, both ways at once, over channels that nobody else uses."""
    ranks = mesh.sizes["pp"]
    wanted = [(a, (a + 1) % ranks, "there") for a in range(ranks)] + [
        ((a + 1) % ranks, a, "back") for a in range(ranks)
    ]
    channels = mesh.channels("pp", wanted)
    place, heard = mesh.coords["pp"], {}
    pending = []
    for (source, target, what), group in channels.items():
        message = torch.tensor([10.0 * source + target])
        if source == place:
            pending.append(group.send(message, 1 - group.rank, reason="t", phase="step", async_=True))
        else:
            heard[source, what] = torch.zeros(1)
            pending.append(group.recv(heard[source, what], 1 - group.rank, reason="t", phase="step", async_=True))
    for one in pending:
        one.wait()
    ends = mesh.ends("pp")
    return place, {key: float(value) for key, value in heard.items()}, None if ends is None else ends.ranks


@pytest.mark.parametrize("size", [2, 3, 4])
def test_channels_join_two_ranks_each(ranks, size):
    for place, heard, ends in ranks.run(size, talk, axes={"pp": size}):
        before, behind = (place - 1) % size, (place + 1) % size
        assert heard == {(before, "there"): 10 * before + place, (behind, "back"): 10 * behind + place}
        assert ends == ((0, size - 1) if place in (0, size - 1) else None)


def test_rounds_have_each_rank_once():
    wanted = [(0, 1, "a"), (1, 2, "a"), (2, 3, "a"), (1, 0, "g"), (3, 0, "a")]
    rounds = _rounds(wanted)
    assert sorted(channel for together in rounds for channel in together) == sorted(wanted)
    for together in rounds:
        places = [place for channel in together for place in channel[:2]]
        assert len(places) == len(set(places))
