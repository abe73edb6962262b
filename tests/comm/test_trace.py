"""What a rank records, and how the ranks' records come together."""

from __future__ import annotations

import itertools

import torch

from meshwright.comm import trace as traces
from meshwright.comm.trace import UNDER_WAY, Trace, Tracing, collect

CPU = torch.device("cpu")


def nested(spans) -> bool:
    """Whether of every two spans one holds the other, or they lie apart."""
    pairs = itertools.combinations(spans, 2)
    return all(b.begin >= a.end or b.end <= a.end for a, b in pairs)  # sorted by their beginning


def test_spans_nest_and_end(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(traces, "clock", lambda: float(next(ticks)))
    tracing, trace = Tracing(), Trace(CPU)
    tracing.now = trace
    trace.begin_step()
    with tracing.span("action", "backward", 1, 3), tracing.span("recompute", "recompute"):
        pass
    with tracing.span("optimizer", "update"):
        pass
    trace.end_step(7)
    found = trace.spans()
    assert [(s.category, s.name, s.begin, s.end) for s in found] == [
        ("step", "step 7", 1, 8),
        ("action", "backward", 2, 5),
        ("recompute", "recompute", 3, 4),
        ("optimizer", "update", 6, 7),
    ]
    assert nested(found)
    assert found[1].args == {"stage": 1, "micro": 3} and found[0].args == {"step": 7}


def test_nothing_is_recorded_while_off():
    tracing, trace = Tracing(), Trace(CPU)
    assert tracing.span("action", "forward", 0, 0) is tracing.span("data", "data")
    with tracing.span("action", "forward", 0, 0):
        tracing.now = trace  # what has begun before is not recorded either
    assert trace.spans() == []


def traced(mesh):
    """Some collectives in, before and beyond a step; the spans of all, and what the ledger knows."""
    world, t = mesh.world_group, torch.ones(4)
    untraced = world.all_reduce(t.clone(), reason="before", phase="step", async_=True)
    mesh.tracing.now = trace = Trace(mesh.device)
    trace.begin_step()
    untraced.wait()
    hidden = world.all_reduce(t.clone(), reason="hidden", phase="backward", micro=3, async_=True)
    with mesh.tracing.span("action", "forward", 0, 1):
        world.all_reduce(t.clone(), reason="exposed", phase="forward")
    hidden.wait()
    later = world.all_reduce(t.clone(), reason="later", phase="step", async_=True)
    world.barrier("meet")
    trace.end_step(1)
    mesh.tracing.now = None
    later.wait()
    world.all_reduce(t.clone(), reason="off", phase="step")
    rows, blocked = mesh.ledger.rows(), mesh.ledger.blocked_seconds
    found = collect(trace, mesh)
    assert (mesh.ledger.rows(), mesh.ledger.blocked_seconds) == (rows, blocked)
    return found


def test_collectives_of_all_ranks_on_one_clock(ranks):
    found, none = ranks.run(2, traced)
    assert none is None and [one.rank for one in found] == [0, 1]
    for one in found:
        assert one.coords == {"dp": one.rank}
        assert nested([s for s in one.spans if s.category != UNDER_WAY])
        kinds = [(s.category, s.name) for s in one.spans]
        assert sorted(kinds) == sorted(
            [("step", "step 1"), ("action", "forward"), ("wait", "before")]
            + [(kind, name) for kind in ("issue", "wait", UNDER_WAY) for name in ("hidden", "exposed", "meet")]
            + [("issue", "later"), (UNDER_WAY, "later")]
        )
        by = {(s.category, s.name): s for s in one.spans}
        hidden, waited = by[UNDER_WAY, "hidden"], by["wait", "hidden"]
        assert hidden.args == {"op": "all_reduce", "axis": "world", "bytes": 16, "phase": "backward", "micro": 3}
        assert hidden.begin == by["issue", "hidden"].begin and hidden.end >= waited.end >= by["action", "forward"].end
        assert by[UNDER_WAY, "later"].end == by["step", "step 1"].end  # nobody has waited for it in the step
    arrived = [s.begin for one in found for s in one.spans if (s.category, s.name) == ("issue", "meet")]
    left = [s.end for one in found for s in one.spans if (s.category, s.name) == ("wait", "meet")]
    assert max(arrived) <= min(left)  # a barrier is left when all have come: so the clocks agree
    assert min(s.begin for one in found for s in one.spans) == 0
