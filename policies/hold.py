"""The router's queue: for a place where all are taken, or where waiting for a replica beats moving.

A policy that counts the work ahead of a request picks the warm replica also where the request
would wait there, as long as moving costs more. Waiting in the engine's queue is first come first
served and final. Here the shortest prefill goes first, another replica can still be chosen, and
tenants take turns (``policies.fair``).

Where replicas or the router have no place left, a request waits for one (``Blocked``) in the same
queue, in the same order. Classes of priority come before that order: while one of a higher class
can go, none of a lower one does.

The order is that of ``work_s - ageing * waited_s``. All items age alike, so that
``work_s + ageing * added_s`` orders them the same for ever: a heap does.

No clock and no wait in here: a router drives it with timers, a simulator with its events.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Final, Generic

from msgspec import Meta, Struct

from policies.fair import FairQueue
from policies.ordered import Item, OrderedHeap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from policies.model import Decision

LOOKS: Final = 16
"""Decisions made over again at one wake-up; more where more replicas are waited for."""
SCANNED: Final = 256
"""Waiting requests passed at one wake-up, looked at or not, unless the caller says."""
CLASSES: Final = 3
"""Of priority, the first one first."""
NORMAL: Final = 1


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
    SHED = "shed"
    """There was no place for it in time, or another one needed its place in the queue."""


class Blocked(Struct, frozen=True):
    """There is no place for a request now; all that wait for the same have the same ``what``.

    Begins with what no replica's name does.
    """

    what: str


class _Entry(Struct):
    """One waiting item; ``what`` is the replica that it waits for, or what blocks it."""

    what: str
    priority: int
    lane: str


class HoldQueue(Generic[Item]):
    """Requests that wait for their replicas; items are compared by hash and equality.

    ``place_wait_s`` is how long one waits for a place. Times are of one clock that does not go
    back. A change costs O(log n).
    """

    def __init__(self, settings: HoldSettings, place_wait_s: float | None = None) -> None:
        self._settings = settings
        self._place_wait_s = settings.max_wait_s if place_wait_s is None else place_wait_s
        self._classes: tuple[FairQueue[Item], ...] = tuple(FairQueue() for _ in range(CLASSES))
        self._entries: OrderedDict[Item, _Entry] = OrderedDict()
        self._due: OrderedHeap[Item] = OrderedHeap()
        self._lanes: dict[tuple[int, str], int] = {}
        self._waiting: dict[str, int] = {}

    def adopt(self, settings: HoldSettings, place_wait_s: float | None = None) -> None:
        """Go by other settings from now on; who waits keeps its turn, and its time."""
        self._settings = settings
        self._place_wait_s = settings.max_wait_s if place_wait_s is None else place_wait_s

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

    def is_waited_for(self, what: str) -> bool:
        """Return whether somebody waits for this replica, or for what blocks."""
        return what in self._waiting

    def add(
        self,
        item: Item,
        awaited: str | Blocked,
        *,
        work_ms: float,
        uncached_tokens: int,
        tenant: str,
        now_s: float,
        priority: int = NORMAL,
    ) -> None:
        """Let ``item``, whose own prefill would take ``work_ms``, wait for a replica or a place.

        For a replica it waits ``max_wait_s`` at most. Raises ValueError for an item that waits
        already.
        """
        if item in self._entries:
            message = "the item waits already"
            raise ValueError(message)
        settings = self._settings
        what, wait_s = awaited, settings.max_wait_s
        if isinstance(what, Blocked):
            what, wait_s = what.what, self._place_wait_s
        lane = tenant if settings.is_fair else ""
        self._entries[item] = _Entry(what, priority, lane)
        self._lanes[priority, lane] = self._lanes.get((priority, lane), 0) + 1
        self._due.put(item, (now_s + wait_s,))
        self._waiting[what] = self._waiting.get(what, 0) + 1
        key = work_ms / 1000.0 + settings.ageing * now_s
        self._classes[priority].add(item, key, lane, uncached_tokens)

    def charge(self, tenant: str, uncached_tokens: int, priority: int = NORMAL) -> None:
        """Count a request that went to its replica without waiting, while others wait."""
        if self._entries:
            lane = tenant if self._settings.is_fair else ""
            self._classes[priority].charge(lane, uncached_tokens)

    def used_tokens(self, tenant: str, priority: int = NORMAL) -> int:
        """Return what ``tenant`` counts as having used, since last nobody waited."""
        return self._classes[priority].used_tokens(tenant if self._settings.is_fair else "")

    def candidates(self) -> Iterator[Item]:
        """Yield the waiting items in the order of their turns; change nothing meanwhile."""
        return chain.from_iterable(self._classes)

    def next_due_s(self) -> float | None:
        """Return when the next item has waited long enough; None when none waits."""
        first = self._due.first()
        return self._due.key_of(first)[0] if first is not None else None

    def giving_way(self, priority: int, tenant: str) -> Item | None:
        """Return who gives way to a newcomer where no more may wait; None for nobody.

        The last one of the lowest class after ``priority``. Else the last one of that tenant of the
        same class which has most waiting, if that is more than the newcomer's would have.
        """
        if not self._lanes:
            return None
        lane = tenant if self._settings.is_fair else ""
        lowest = max(each for each, _ in self._lanes)
        if lowest < priority:
            return None
        longest: str | None = None
        if lowest == priority:
            waiting, longest = max(
                (count, name) for (each, name), count in self._lanes.items() if each == priority
            )
            if waiting <= self._lanes.get((priority, lane), 0) + 1:
                return None
        return next(
            item
            for item, entry in reversed(self._entries.items())
            if entry.priority == lowest and longest in {None, entry.lane}
        )

    def wake(
        self,
        now_s: float,
        peek: Callable[[Item], Decision | Blocked | None],
        send: Callable[[Item, HoldEnd], None],
        scanned: int = SCANNED,
    ) -> None:
        """Send what has waited long enough, and of the others those whose time has come.

        ``peek`` returns what would be chosen now, without taking anything, or what blocks that.
        ``send`` is called with each item that leaves, once, and shall take what the choice takes
        before it returns: the next item is looked at after it. Items without a choice are sent,
        too, to learn it there.
        """
        while (due_s := self.next_due_s()) is not None and due_s <= now_s:
            first = self._due.first()
            if first is not None:
                self._send(first, HoldEnd.TIMED_OUT, send)
        looks = max(LOOKS, len(self._waiting))
        busy: set[str] = set()
        behind: list[Item] = []
        for item in list(islice(self.candidates(), scanned)):
            if not looks or (len(busy) >= len(self._waiting) and len(behind) >= looks):
                break
            if self._entries[item].what in busy:
                behind.append(item)  # others wait for the same, and they are first
                continue
            looks -= 1
            self._look(item, busy, peek, send)
        for item in behind[:looks]:
            self._look(item, busy, peek, send)

    def drain(
        self, send: Callable[[Item, HoldEnd], None], stays: Callable[[Item], bool] | None = None
    ) -> None:
        """Send everything, in order, but for what ``stays`` when it is its turn."""
        for item in list(self.candidates()):
            if stays is None or not stays(item):
                self._send(item, HoldEnd.DRAINED, send)

    def remove(self, item: Item) -> bool:
        """Take out an item that goes nowhere; False when it does not wait (any more)."""
        entry = self._entries.pop(item, None)
        if entry is None:
            return False
        self._classes[entry.priority].discard(item)
        self._forget(item, entry)
        return True

    def _look(
        self,
        item: Item,
        busy: set[str],
        peek: Callable[[Item], Decision | Blocked | None],
        send: Callable[[Item, HoldEnd], None],
    ) -> None:
        """Choose again for ``item``: it goes, or waits for what is noted as busy."""
        seen = peek(item)
        if isinstance(seen, Blocked):
            what: str = seen.what
        elif seen is None or not self.is_over(seen):
            self._send(item, HoldEnd.RELEASED, send)
            return
        else:
            what = seen.replica
        busy.add(what)
        entry = self._entries[item]
        if what != entry.what:
            self._no_longer(entry.what)
            entry.what = what
            self._waiting[what] = self._waiting.get(what, 0) + 1

    def _send(self, item: Item, end: HoldEnd, send: Callable[[Item, HoldEnd], None]) -> None:
        entry = self._entries.pop(item)
        self._classes[entry.priority].send(item)
        self._forget(item, entry)
        send(item, end)

    def _forget(self, item: Item, entry: _Entry) -> None:
        self._due.discard(item)
        self._no_longer(entry.what)
        key = (entry.priority, entry.lane)
        self._lanes[key] -= 1
        if not self._lanes[key]:
            del self._lanes[key]

    def _no_longer(self, what: str) -> None:
        self._waiting[what] -= 1
        if not self._waiting[what]:
            del self._waiting[what]
