"""Where the launchers of one run meet: this one alone, or those of several nodes, which may come and go.

Torch's c10d rendezvous does it: a store at an endpoint, which one of the nodes hosts, holds who takes part. A node that
comes waits there, and those that run see it; one whose heartbeat stops is taken off the list.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed.elastic.rendezvous.registry as registry
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

from meshwright.spec.errors import RunError, UserError

HEARTBEAT, HEARTBEATS = 3, 5
"""Seconds between two signs of life of a node, and how many may be missing before it is taken for dead."""
LAST_CALL = 5
"""Seconds that enough nodes wait for more."""
JOIN = 600
"""Seconds that too few nodes wait for others."""
FAREWELL = HEARTBEAT * HEARTBEATS
"""Seconds that a node stays for others to hear that the run is over: the store may be its own."""
_STORE_TRIES = 3
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Nodes:
    """The launchers that make a run together: how many at `least` and at `most`, and the endpoint (host:port) at which
    they meet. `name` keeps runs apart that meet at one endpoint; `address` is how the others reach this node."""

    least: int
    most: int
    endpoint: str
    name: str
    address: str | None = None

    @classmethod
    def of(cls, count: str, endpoint: str | None, name: str, address: str | None = None) -> Nodes:
        """From "2" or "1:4". Raises UserError."""
        least, colon, most = count.partition(":")
        try:
            low, high = int(least), int(most if colon else least)
        except ValueError:
            low = high = 0
        if not 1 <= low <= high:
            raise UserError(f"command line: --nnodes {count}: write a number of nodes, or the least and most: 1:4")
        if endpoint is None:
            raise UserError(
                "command line: --nnodes needs --rdzv-endpoint HOST:PORT, the same on all nodes: one node's address and "
                "a free port there"
            )
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UserError(f"command line: --rdzv-endpoint {endpoint}: write HOST:PORT, such as node0:29400")
        if address is None and _local(host):
            address = _LOOPBACK
        return cls(low, high, endpoint, name, address)

    @property
    def elastic(self) -> bool:
        """Whether a node may be missing."""
        return self.least < self.most

    @property
    def hosted_here(self) -> bool:
        """Whether the endpoint is on this machine."""
        return bool(_matches_machine_hostname(self.endpoint.rpartition(":")[0]))


def _local(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")


def meet(nodes: Nodes | None) -> RendezvousHandler:
    """The rendezvous of `nodes`, or of this launcher alone at a port that the system picks. Raises RunError."""
    if nodes is None:
        return _handler(
            RendezvousParameters(
                backend="c10d", endpoint=f"{_LOOPBACK}:0", run_id=uuid.uuid4().hex, min_nodes=1, max_nodes=1,
                local_addr=_LOOPBACK, is_host=True, timeout=60,
            ),
            "no local port for the ranks to meet at",
        )  # fmt: skip
    return _handler(
        RendezvousParameters(
            backend="c10d", endpoint=nodes.endpoint, run_id=nodes.name, min_nodes=nodes.least, max_nodes=nodes.most,
            local_addr=nodes.address, keep_alive_interval=HEARTBEAT, keep_alive_max_attempt=HEARTBEATS,
            last_call_timeout=LAST_CALL, join_timeout=JOIN,
        ),
        f"the nodes cannot meet at {nodes.endpoint}",
    )  # fmt: skip


def _handler(parameters: RendezvousParameters, otherwise: str) -> RendezvousHandler:
    for attempt in range(_STORE_TRIES):
        try:
            return registry.get_rendezvous_handler(parameters)
        except (RendezvousConnectionError, OSError, RuntimeError) as exc:
            if attempt == _STORE_TRIES - 1:
                raise RunError(f"launch: {otherwise} ({exc})") from exc
            time.sleep(0.2)
    raise AssertionError


def end(handler: Any, stop_waiting: Callable[[], bool]) -> None:
    """Close the rendezvous to all nodes, and stay until each that takes part has done the same.

    With the process that hosts the store everything in it ends: a node that hears of the end by its connection alone
    cannot tell it from a loss.
    """
    handler.shutdown()
    store = handler._store
    try:
        store.set(_left(handler._this_node), "")
        others = [_left(node) for node in handler._state_holder.state.participants]
        until = time.monotonic() + FAREWELL
        while not (store.check(others) or stop_waiting() or time.monotonic() > until):
            time.sleep(0.1)
    except (DistError, RuntimeError, OSError):  # the store is gone, with the node that hosted it
        pass


def _left(node: object) -> str:
    return f"meshwright.left/{node}"


# -- what torch keeps to itself -------------------------------------------------------------------------------------


def participants(handler: Any) -> int:
    """Nodes that take part, as this one saw it last."""
    return len(handler._state_holder.state.participants)


def round_number(handler: Any) -> int:
    """How often the nodes have met before, on all of them the same."""
    return int(handler._state_holder.state.round)


def forget_store(handler: Any) -> None:
    """Have the next rendezvous give the ranks a new store, and tell all nodes where it is.

    Torch keeps the first one for good. Then a node that becomes the first when another comes hosts one of its own,
    which the others never hear of; and keys that ranks left in it meet those of their successors.
    """
    handler._bootstrap_store_info = None
    handler._shared_tcp_store_server = None


def launch_name(handler: Any) -> str:
    """One name for all starts of this launch, on all its nodes."""
    name: bytes = handler._store.compare_set("meshwright.launch", "", uuid.uuid4().hex)
    return name.decode()
