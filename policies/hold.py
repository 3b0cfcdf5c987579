"""The router-side queue: hold a request briefly where waiting for its replica beats moving.

A policy that counts the work ahead of a request picks the warm replica also where the request
would wait there, as long as moving costs more. Waiting in the engine's queue is first come first
served and final. Here the shortest prefill goes first, another replica can still be chosen, and
tenants take turns (``policies.fair``).

The order is that of ``work_s - ageing * waited_s``. All items age alike, so that
``work_s + ageing * added_s`` orders them the same for ever: a heap does.

No clock and no wait in here: a router drives it with timers, a simulator with its events.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Final, Generic

from msgspec import Meta, Struct

from policies.fair import FairQueue
from policies.ordered import Item
from state.model import ReplicaId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from policies.model import Decision

LOOKS: Final = 16
"""Decisions made over again at one wake-up; more where more replicas are waited for."""
SCANNED: Final = 256
"""Waiting requests passed at one wake-up, looked at or not."""


class HoldSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The router-side queue: a request waits while its replica's backlog is over ``release_ms``.

    Shortest uncached prefill first; a waiting second is worth ``ageing`` seconds of it. After
    ``max_wait_s`` it goes whatever the backlog. ``is_fair``: tenants take turns by what they used.
    Beyond ``max_queue`` waiting requests nobody is held.
    """

    enabled: bool = False
    release_ms: Annotated[float, Meta(gt=0)] = 300.0
    ageing: Annotated[float, Meta(ge=0)] = 0.1
    max_wait_s: Annotated[float, Meta(gt=0)] = 10.0
    is_fair: bool = True
    max_queue: Annotated[int, Meta(ge=1, le=65_536)] = 1_024


class HoldEnd(enum.StrEnum):
    """Why a request no longer waits, or did not."""

    RELEASED = "released"
    """Its replica's backlog fell, or another replica is the better one by now."""
    TIMED_OUT = "timed_out"
    LEFT = "left"
    """The client went away."""
    BYPASSED = "bypassed"
    """It should have waited, but the queue was full."""
    DRAINED = "drained"
    """The router shuts down."""


class _Entry(Struct):
    """One waiting item; ``replica`` is the one it waits for."""

    replica: ReplicaId
    due_s: float


class HoldQueue(Generic[Item]):
    """Requests that wait for their replicas; items are compared by hash and equality.

    Times are of one clock that does not go back. A change costs O(log n).
    """

    def __init__(self, settings: HoldSettings) -> None:
        self._settings = settings
        self._fair: FairQueue[Item] = FairQueue()
        self._entries: OrderedDict[Item, _Entry] = OrderedDict()
        self._waiting: dict[ReplicaId, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_full(self) -> bool:
        """Whether nothing may be added."""
        return len(self._entries) >= self._settings.max_queue

    def is_over(self, decision: Decision) -> bool:
        """Return whether a request would wait too long on the chosen replica."""
        wait_ms = decision.predicted_wait_ms
        return wait_ms is not None and wait_ms > self._settings.release_ms

    def takes(self, decision: Decision) -> bool:
        """Return whether an arriving request shall wait: for its replica, or for its turn there."""
        if decision.predicted_wait_ms is None:
            return False
        return self.is_over(decision) or decision.replica in self._waiting

    def add(
        self,
        item: Item,
        replica: ReplicaId,
        *,
        work_ms: float,
        uncached_tokens: int,
        tenant: str,
        now_s: float,
    ) -> None:
        """Let ``item`` wait for ``replica``, where its own prefill would take ``work_ms``.

        Raises ValueError for an item that waits already.
        """
        if item in self._entries:
            message = "the item waits already"
            raise ValueError(message)
        settings = self._settings
        self._entries[item] = _Entry(replica, now_s + settings.max_wait_s)
        self._waiting[replica] = self._waiting.get(replica, 0) + 1
        key = work_ms / 1000.0 + settings.ageing * now_s
        self._fair.add(item, key, tenant if settings.is_fair else "", uncached_tokens)

    def charge(self, tenant: str, uncached_tokens: int) -> None:
        """Count a request that went to its replica without waiting, while others wait."""
        if self._entries:
            self._fair.charge(tenant if self._settings.is_fair else "", uncached_tokens)

    def used_tokens(self, tenant: str) -> int:
        """Return what ``tenant`` counts as having used, since last nobody waited."""
        return self._fair.used_tokens(tenant if self._settings.is_fair else "")

    def candidates(self) -> Iterator[Item]:
        """Yield the waiting items in the order of their turns; change nothing meanwhile."""
        return iter(self._fair)

    def next_due_s(self) -> float | None:
        """Return when the next item has waited long enough; None when none waits."""
        entry = next(iter(self._entries.values()), None)
        return entry.due_s if entry is not None else None

    def wake(
        self,
        now_s: float,
        peek: Callable[[Item], Decision | None],
        send: Callable[[Item, HoldEnd], None],
    ) -> None:
        """Send what has waited ``max_wait_s``, and of the others those whose time has come.

        ``peek`` returns what would be chosen now, without taking anything. ``send`` is called with
        each item that leaves, once, and shall take what the choice takes before it returns: the
        next item is looked at after it. Items without a choice are sent, too, to learn it there.
        """
        while (due_s := self.next_due_s()) is not None and due_s <= now_s:
            self._send(next(iter(self._entries)), HoldEnd.TIMED_OUT, send)
        looks = max(LOOKS, len(self._waiting))
        busy: set[ReplicaId] = set()
        behind: list[Item] = []
        for item in list(islice(self._fair, SCANNED)):
            if not looks or (len(busy) >= len(self._waiting) and len(behind) >= looks):
                break
            if self._entries[item].replica in busy:
                behind.append(item)  # others wait for the same, and they are first
                continue
            looks -= 1
            self._look(item, busy, peek, send)
        for item in behind[:looks]:
            self._look(item, busy, peek, send)

    def drain(self, send: Callable[[Item, HoldEnd], None]) -> None:
        """Send everything, in order."""
        for item in list(self._fair):
            self._send(item, HoldEnd.DRAINED, send)

    def remove(self, item: Item) -> bool:
        """Take out an item that goes nowhere; False when it does not wait (any more)."""
        entry = self._entries.pop(item, None)
        if entry is None:
            return False
        self._fair.discard(item)
        self._no_longer(entry.replica)
        return True

    def _look(
        self,
        item: Item,
        busy: set[ReplicaId],
        peek: Callable[[Item], Decision | None],
        send: Callable[[Item, HoldEnd], None],
    ) -> None:
        """Choose again for ``item``: it goes, or waits for a replica that is noted as busy."""
        decision = peek(item)
        if decision is None or not self.is_over(decision):
            self._send(item, HoldEnd.RELEASED, send)
            return
        busy.add(decision.replica)
        entry = self._entries[item]
        if decision.replica != entry.replica:
            self._no_longer(entry.replica)
            entry.replica = decision.replica
            self._waiting[entry.replica] = self._waiting.get(entry.replica, 0) + 1

    def _send(self, item: Item, end: HoldEnd, send: Callable[[Item, HoldEnd], None]) -> None:
        entry = self._entries.pop(item)
        self._fair.send(item)
        self._no_longer(entry.replica)
        send(item, end)

    def _no_longer(self, replica: ReplicaId) -> None:
        self._waiting[replica] -= 1
        if not self._waiting[replica]:
            del self._waiting[replica]
