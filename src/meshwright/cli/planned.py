"""`layout=auto`: the layout that is planned to be fastest, chosen before a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.cli.common import check_ranks, resolved, say
from meshwright.comm.place import launched, place

if TYPE_CHECKING:
    from meshwright.predict.plan.answer import Plan
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.load import Written
    from meshwright.spec.run import RunSpec


def planned(written: Written, ranks: int | None, quiet: bool) -> RunSpec | None:
    """The run with the best layout for its cluster, and batch.micro with it; None, and why on stderr, if none fits.

    ranks: of the cluster's devices; by default all. Says what was chosen, unless `quiet`. Raises UserError.
    """
    from meshwright.cli.tables import layout_words
    from meshwright.predict.plan.answer import plan

    run = written.to_plan()
    if run.cluster is None:
        check_ranks(ranks or 1, "or name a cluster to plan for")
    cluster = cluster_of(run, ranks)
    speaks = not (launched() and place().rank)
    if speaks and not quiet:
        known = "as measured" if cluster.constants else "as it is known; `meshwright probe` measures it"
        where = run.cluster or f"this machine, {known}"
        say(f"planning for {cluster.devices} × {cluster.device.name} ({where})")
    found = plan(run, cluster, top=2)  # the second best, to tell by how much it is beaten
    if not found.choices:
        if speaks:
            say(f"layout=auto: no layout of {found.result.layouts:,} fits {cluster.device.name}", *_nearest(found))
        return None
    chosen = found.chosen
    if speaks and not quiet:
        say(f"chose   {layout_words(chosen.layout)}, batch.micro={chosen.batch.micro}: {found.why}")
    return resolved(chosen, cluster.devices)


def _nearest(found: Plan) -> list[str]:
    """What comes closest, and the changes that would do."""
    if found.nearest is None:
        return []
    from meshwright.cli.printing import size
    from meshwright.cli.tables import layout_words

    held = f"{size(found.nearest.needed)} of {size(found.nearest.capacity)}"
    return [
        f"  nearest: {layout_words(found.nearest.layout)}, {held}",
        *(f"  would fit: {change.words} ({change.option})" for change in found.changes),
    ]


def cluster_of(run: RunSpec, ranks: int | None) -> Cluster:
    """What `run` is planned for: its cluster, or this machine; with `ranks`, as many devices. Raises UserError."""
    if run.cluster is None:
        from meshwright.train.probe import machine

        if launched():
            return machine(run.device, place().local_world, place().world // place().local_world)
        return machine(run.device, ranks)
    from meshwright.spec.clusterfile import load_cluster

    cluster = load_cluster(run.cluster)
    return cluster if ranks is None else cluster.part(ranks)
