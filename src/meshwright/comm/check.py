"""The debug check (MESHWRIGHT_COMM_CHECK=1): ranks compare what they are about to do before they do it.

Backends do not compare: Gloo takes a message of another length or dtype in silence, or aborts the process. With the
check on, each rank writes what it is about to do into the process group's store, where a rank in quite another
operation can be seen too, and reads what the others wrote. So a mismatch is an error that names both sides.

A collective meets its ranks when it is issued, also with async_=True. A send starts at once and is compared when it
is waited for. A receive starts only when the sender's announcement is there and fits, because a message that does not
fit may abort the receiver; it is looked for whenever this rank waits for anything, so exchanges that post all sends or
all receives first keep working. A rank waits for another MESHWRIGHT_COMM_CHECK_TIMEOUT seconds (30), or the group's
timeout where that is shorter.

The store has one server for all ranks, and each operation costs several trips to it: for finding errors, not for
speed.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.works import Work
from meshwright.spec.errors import RunError, UserError

ENVIRONMENT = "MESHWRIGHT_COMM_CHECK"
ENVIRONMENT_TIMEOUT = "MESHWRIGHT_COMM_CHECK_TIMEOUT"


Start = Callable[[], "Work | None"]


@dataclass(slots=True, eq=False)
class Call:
    """One operation, as this rank asks for it. `root` is the one rank of rooted operations, the other of a pair."""

    op: str
    reason: str
    axis: str
    tensors: tuple[Tensor, ...]
    reduction: str | None = None
    root: int | None = None
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # rows to each rank, rows from each rank
    distance: int | None = None  # of a shift
    number: int = 0  # the checker's count
    announced: str = ""  # what it has told the other ranks
    work: Work | None = None  # of a receive that the checker has started

    def __str__(self) -> str:
        return f"{self.op} {self.reason} ({self.axis})"

    def describe(self, ranks: Sequence[int]) -> str:
        """In words, with everything that must match; `ranks`: the group's numbers in the world."""
        words = [str(self), *(_kind(t) for t in self.tensors)]
        if self.reduction is not None:
            words.append(self.reduction)
        if self.root is not None:
            words.append({"send": "to", "recv": "from"}.get(self.op, "root") + f" rank {ranks[self.root]}")
        if self.distance is not None:
            words.append(f"by {self.distance}")
        if self.splits is not None:
            words.append(f"rows sent {list(self.splits[0])} received {list(self.splits[1])}")
        return " ".join(words)

    def must_match(self) -> list[object]:
        """What has to be equal on all ranks; for a pair, on both sides."""
        pair = self.op in ("send", "recv")
        # An all-to-all may move other numbers of rows on each rank; its splits are compared pair by pair.
        rows = 1 if self.op == "all_to_all" else 0
        kinds = [(str(t.dtype), tuple(t.shape[rows:])) for t in self.tensors]
        return [
            "pair" if pair else self.op,
            self.reason,
            kinds,
            self.reduction,
            None if pair else self.root,
            self.distance,
        ]


class Checks:
    """The check as one mesh has it: what its groups' checkers share.

    me: this rank's number in the world. timeout: the groups' own, in seconds. Raises UserError where the environment
    makes no sense.
    """

    def __init__(self, me: int, timeout: float) -> None:
        self.me = me
        self.timeout = min(timeout, _timeout())
        # torch has no public name for the store that the ranks already share.
        self.store = dist.PrefixStore("meshwright.check", dist.distributed_c10d._get_default_store())
        self._checkers: dict[tuple[int, ...], Checker] = {}

    @staticmethod
    def wanted() -> bool:
        """Whether the environment asks for the check. Raises UserError for a value other than 0 and 1."""
        value = os.environ.get(ENVIRONMENT, "")
        if value not in ("", "0", "1"):
            raise UserError(f"{ENVIRONMENT}={value}: neither on nor off; use 1 or 0")
        return value == "1"

    def of(self, ranks: Sequence[int]) -> Checker:
        """The one checker of these ranks."""
        key = tuple(ranks)
        if key not in self._checkers:
            self._checkers[key] = Checker(self, key)
        return self._checkers[key]

    def doing(self, text: str) -> None:
        """Let the other ranks know what this one does."""
        self.store.set(f"doing/{self.me}", text)

    def until(self, missing: Callable[[], Collection[int]], waiting: Callable[[], str]) -> None:
        """Return when no rank is `missing`; meanwhile receives that can start are started.

        Raises RunError with what every rank is doing when one does not come. `waiting()` says what this one wants.
        """
        deadline = time.monotonic() + self.timeout
        pause = 0.0
        while absent := missing():
            for checker in self._checkers.values():
                checker.start_receives()
            if time.monotonic() > deadline:
                raise RunError(
                    f"{waiting()} waited {self.timeout:g} s ({ENVIRONMENT_TIMEOUT}) for "
                    f"{', '.join(f'rank {rank}' for rank in absent)}: {together(self._everyone())}"
                )
            time.sleep(pause)
            pause = min(0.02, 2 * pause + 0.0002)

    def _everyone(self) -> dict[int, str]:
        keys = {rank: f"doing/{rank}" for rank in range(dist.get_world_size())}
        return {
            rank: self.store.get(key).decode() if self.store.check([key]) else "has not communicated yet"
            for rank, key in keys.items()
        }


class Checker:
    """Compares the operations of one group; made by `Checks.of`. `ranks`: the group's numbers in the world."""

    def __init__(self, checks: Checks, ranks: tuple[int, ...]) -> None:
        self._checks = checks
        self._store = checks.store
        self._ranks = ranks
        self._me = ranks.index(checks.me)
        # A later mesh over the same ranks counts from 0 again; it must not read what this one has left.
        nth, _made[ranks] = _made[ranks], _made[ranks] + 1
        self._prefix = f"{nth}:{'-'.join(map(str, ranks))}"
        self._collectives = 0
        self._messages: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._unstarted: defaultdict[int, deque[tuple[Call, Start]]] = defaultdict(deque)  # receives, by source

    def issue(self, call: Call, start: Start) -> Work | None:
        """Announce the operation, compare it with the other ranks', and start it; a receive is started later."""
        text = call.describe(self._ranks)
        self._checks.doing(f"in {text}")
        call.announced = json.dumps({"text": text, "match": call.must_match(), "splits": call.splits})
        if call.op in ("send", "recv"):
            pair = self._pair(call)
            call.number, self._messages[pair] = self._messages[pair], self._messages[pair] + 1
            self._store.set(self._pair_key(call, self._me), call.announced)
            if call.op == "send":
                return start()
            self._unstarted[pair[0]].append((call, start))
            return None
        call.number, self._collectives = self._collectives, self._collectives + 1
        keys = {i: f"{self._prefix}/{call.number}/{i}" for i in range(len(self._ranks))}
        self._store.set(keys.pop(self._me), call.announced)
        self._compare(call, self._read(call, keys))
        if call.number:  # whoever has announced this operation has read my announcement of the one before
            self._store.delete_key(f"{self._prefix}/{call.number - 1}/{self._me}")
        return start()

    def before_wait(self, call: Call) -> Work | None:
        """Compare a send with its receiver's side and wait until it receives; start a receive that is not started."""
        if call.op == "send":
            assert call.root is not None
            other = self._pair_key(call, call.root)
            self._compare(call, self._read(call, {call.root: other}))
            self._read(call, {call.root: f"{other}/started"})
            for key in (other, f"{other}/started"):
                self._store.delete_key(key)
        elif call.op == "recv":
            source = self._ranks[self._pair(call)[0]]
            self._checks.until(lambda: [source] if call.work is None else [], lambda: call.describe(self._ranks))
        return call.work

    def after(self, call: Call) -> None:
        """This rank is back from the operation."""
        self._checks.doing(f"computing, after {call.describe(self._ranks)}")

    def start_receives(self) -> None:
        """Compare and start, in the order of issue, the receives whose senders have announced their message."""
        for source, queue in self._unstarted.items():
            while queue:
                call, start = queue[0]
                theirs = self._pair_key(call, source)
                if not self._store.check([theirs]):
                    break
                self._compare(call, self._read(call, {source: theirs}))
                queue.popleft()
                call.work = start()
                self._store.delete_key(theirs)
                self._store.set(f"{self._pair_key(call, self._me)}/started", "")

    # -- comparing -------------------------------------------------------------------------------------------------

    def _compare(self, call: Call, announced: Mapping[int, str]) -> None:
        """Raise RunError unless the others' announcements and this rank's fit together."""
        headers = {i: json.loads(text) for i, text in sorted({**announced, self._me: call.announced}.items())}
        mine = headers[self._me]
        if any(h["match"] != mine["match"] for h in headers.values()):
            raise RunError("ranks do not agree on an operation: " + self._sides(headers))
        if call.op == "all_to_all":
            for i, sender in headers.items():
                for j, receiver in headers.items():
                    sent, expected = sender["splits"][0][j], receiver["splits"][1][i]
                    if sent != expected:
                        raise RunError(
                            f"rank {self._ranks[i]} sends {sent} rows to rank {self._ranks[j]}, which expects "
                            f"{expected}: {self._sides({i: sender, j: receiver})}"
                        )

    def _sides(self, headers: Mapping[int, dict[str, str]]) -> str:
        return together({self._ranks[i]: h["text"] for i, h in headers.items()})

    def _read(self, call: Call, keys: Mapping[int, str]) -> dict[int, str]:
        """What stands under the key of each place of the group, once all are there."""
        missing = dict(keys)

        def absent() -> list[int]:
            for i in [i for i, key in missing.items() if self._store.check([key])]:
                del missing[i]
            return [self._ranks[i] for i in missing]

        self._checks.until(absent, lambda: call.describe(self._ranks))
        return {i: self._store.get(key).decode() for i, key in keys.items()}

    def _pair(self, call: Call) -> tuple[int, int]:
        """Sender and receiver."""
        assert call.root is not None
        return (self._me, call.root) if call.op == "send" else (call.root, self._me)

    def _pair_key(self, call: Call, side: int) -> str:
        sender, receiver = self._pair(call)
        return f"{self._prefix}/{sender}>{receiver}/{call.number}/{side}"


_made: defaultdict[tuple[int, ...], int] = defaultdict(int)


def together(texts: Mapping[int, str]) -> str:
    """ "rank 0: this; ranks 1, 2: that", ranks that say the same in one place."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {text}" for text, r in ranks.items())


def _kind(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def _timeout() -> float:
    text = os.environ.get(ENVIRONMENT_TIMEOUT, "30")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UserError(f"{ENVIRONMENT_TIMEOUT}={text}: no time to wait; use seconds above 0")
    return seconds
