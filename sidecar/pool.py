"""The page pool of one tier: fixed pages, reference counts, and the state of every page.

A page is *free* (no content that matters) or in one of five states. *Allocated*: in a block table,
nothing computed yet. *Used*: held, with content. *Reserved*: claimed for a transfer under way.
*Evictable*: nobody holds it, its content is indexed and may be reused until the page is needed.
*Pinned*: the same, and protected until a deadline. ``free`` and the five add up to ``total_pages``
after every change, and by tenant to what the tenant has; ``audit`` checks each page.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final, NewType

from msgspec import Struct

from sidecar.eviction import LeastRecentlyUsed
from sidecar.journal import PageRecord, Transition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sidecar.eviction import Eviction
    from sidecar.journal import Operation, PageState, TierName

PageId = NewType("PageId", int)
"""A page's place in the pool: 0 to ``total_pages - 1``."""

STATES: Final[tuple[PageState, ...]] = (
    "free",
    "allocated",
    "used",
    "reserved",
    "evictable",
    "pinned",
)
FREE, ALLOCATED, USED, RESERVED, EVICTABLE, PINNED = range(len(STATES))
_FREE_RUN: Final = re.compile(re.escape(bytes([FREE])) + b"+")
_TAKEN_AS: Final = {"create": ALLOCATED, "append": ALLOCATED, "reserve": RESERVED}


class PoolError(Exception):
    """A broken invariant: always a defect of the engine, never of a client."""


class Taken(Struct, frozen=True):
    """Pages handed out, and those among them whose cached content was given up, oldest first."""

    pages: list[PageId]
    evicted: list[PageId]


class PagePool:
    """Hands out pages: free ones first, then those that ``eviction`` gives up.

    ``holder`` arguments name the request (or transfer) for ``journal``, which gets a Transition for
    every change; the pool itself only counts references. ``tenant`` owns what is taken for it.
    """

    def __init__(
        self,
        total_pages: int,
        eviction: Eviction | None = None,
        *,
        tier: TierName = "device",
        journal: Callable[[Transition], None] | None = None,
    ) -> None:
        if total_pages < 1:
            message = f"total_pages: expected at least 1, got {total_pages}"
            raise ValueError(message)
        self.total_pages = total_pages
        self.tier: Final = tier
        self.eviction: Final[Eviction] = eviction or LeastRecentlyUsed()
        self.releases = 0
        """Grows whenever pages may have become available."""
        self._journal = journal
        self._references = [0] * total_pages
        self._state = bytearray(total_pages)
        self._tenant = [""] * total_pages
        self._is_indexed = bytearray(total_pages)
        self._pinned_until_s: dict[PageId, float] = {}
        self._deadlines: list[tuple[float, PageId]] = []
        self._free = deque(PageId(page) for page in range(total_pages))
        self._counts = [total_pages, 0, 0, 0, 0, 0]
        self._by_tenant: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(STATES))
        self._owned: dict[str, int] = {}

    @property
    def free_pages(self) -> int:
        """Pages without content."""
        return len(self._free)

    @property
    def cached_pages(self) -> int:
        """Unreferenced pages with reusable content."""
        return self._counts[EVICTABLE] + self._counts[PINNED]

    @property
    def held_pages(self) -> int:
        """Pages that somebody references."""
        return self._counts[ALLOCATED] + self._counts[USED] + self._counts[RESERVED]

    def available_pages(self, tenant: str = "") -> int:
        """Pages that ``take`` can hand out now for ``tenant``."""
        return len(self._free) + self.eviction.available_pages(tenant, self._owned)

    def references(self, page: PageId) -> int:
        """Return how many hold ``page``."""
        return self._references[page]

    def is_indexed(self, page: PageId) -> bool:
        """Return whether the content of ``page`` is kept when it is released."""
        return bool(self._is_indexed[page])

    def count_evictable(self, pages: Iterable[PageId]) -> int:
        """Return how many of ``pages`` are evictable: sharing them makes so many unavailable."""
        return sum(1 for page in pages if self._state[page] == EVICTABLE)

    def take(
        self,
        wanted_pages: int,
        tenant: str = "",
        *,
        holder: str | None = None,
        how: Operation = "create",
    ) -> Taken:
        """Hand out pages with one reference each; raises PoolError when there are not enough."""
        if wanted_pages > self.available_pages(tenant):
            message = f"{wanted_pages} pages wanted, {self.available_pages(tenant)} available"
            raise PoolError(message)
        from_free = min(wanted_pages, len(self._free))
        pages = [self._free.popleft() for _ in range(from_free)]
        evicted = [self._evict(tenant) for _ in range(wanted_pages - from_free)]
        pages += evicted
        state = _TAKEN_AS[how]
        for page in pages:
            self._references[page] = 1
            self._state[page] = state
            self._tenant[page] = tenant
        self._counts[FREE] -= wanted_pages
        self._counts[state] += wanted_pages
        self._by_tenant[tenant][state] += wanted_pages
        self._owned[tenant] = self._owned.get(tenant, 0) + wanted_pages
        if evicted:
            self._note("evict", evicted, why=self.eviction.rule)
        self._note(how, pages, holder, tenant=tenant)
        self._check_conservation()
        return Taken(pages, evicted)

    def share(self, pages: Sequence[PageId], holder: str | None = None) -> None:
        """Add a reference to each of ``pages``, which must be held or cached."""
        for page in pages:
            state = self._state[page]
            if state == FREE:
                message = f"page {page} is free and cannot be shared"
                raise PoolError(message)
            if state == EVICTABLE:
                self.eviction.withdraw(page)
            if state in (EVICTABLE, PINNED):
                self._move(page, USED)
            self._references[page] += 1
        self._note("share", pages, holder)
        self._check_conservation()

    def fill(self, pages: Iterable[PageId]) -> None:
        """Note that ``pages`` have content now, at least in part; used ones stay as they are."""
        filled = [page for page in pages if self._state[page] in (ALLOCATED, RESERVED)]
        for page in filled:
            self._move(page, USED)
        self._note("fill", filled)

    def index(self, pages: Sequence[PageId]) -> None:
        """Keep the content of held ``pages`` when they are released."""
        for page in pages:
            if self._references[page] == 0:
                message = f"page {page} is not held and cannot become reusable"
                raise PoolError(message)
            self._is_indexed[page] = True
        self._note("index", pages)

    def unindex(self, pages: Iterable[PageId]) -> None:
        """Give up the content of ``pages``: unreferenced ones become free at once."""
        gone = [page for page in pages if self._is_indexed[page]]
        for page in gone:
            self._is_indexed[page] = False
            if self._state[page] == EVICTABLE:
                self.eviction.withdraw(page)
            self._pinned_until_s.pop(page, None)
            if self._references[page] == 0:
                self._set_free(page)
        self.releases += 1
        self._note("unindex", gone)
        self._check_conservation()

    def release(
        self, pages: Iterable[PageId], holder: str | None = None, why: str | None = None
    ) -> None:
        """Drop a reference to each of ``pages``; the first one becomes the first to evict."""
        pages = list(pages)
        evictable = []
        above = []
        for page in pages:
            if self._references[page] == 0:
                message = f"page {page} is released more often than it was taken"
                raise PoolError(message)
            self._references[page] -= 1
            if self._references[page]:
                above.append(page)
            elif not self._is_indexed[page]:
                self._set_free(page)
            elif page in self._pinned_until_s:
                self._move(page, PINNED)
                above.append(page)
            else:
                self._move(page, EVICTABLE)
                evictable.append((page, self._tenant[page]))
        if evictable:
            self.eviction.admit(evictable, above)
        self.releases += 1
        self._note("release", pages, holder, why=why)
        self._check_conservation()

    def replace(self, source: PageId, target: PageId, holder: str | None = None) -> None:
        """Let a holder of the shared ``source`` go on with ``target``, its own copy of it."""
        if self._references[source] < 2 or self._references[target] != 1:  # noqa: PLR2004 - shared
            message = f"page {source} is not shared, or {target} is"
            raise PoolError(message)
        self._references[source] -= 1
        self._move(target, USED)
        self._note("copy", (source,), holder, targets=(target,))

    def pin(self, pages: Iterable[PageId], until_s: float) -> None:
        """Protect indexed ``pages`` from eviction until ``until_s``; never shortens a pin."""
        pinned = [page for page in pages if self._is_indexed[page]]
        for page in pinned:
            if self._state[page] == EVICTABLE:
                self.eviction.withdraw(page)
                self._move(page, PINNED)
            deadline_s = max(until_s, self._pinned_until_s.get(page, until_s))
            self._pinned_until_s[page] = deadline_s
            heapq.heappush(self._deadlines, (deadline_s, page))
        self._note("pin", pinned)

    def unpin(self, pages: Iterable[PageId], why: str | None = None) -> None:
        """End the pins of ``pages``, children first."""
        ended = [page for page in pages if self._pinned_until_s.pop(page, None) is not None]
        evictable = [page for page in ended if self._state[page] == PINNED]
        for page in evictable:
            self._move(page, EVICTABLE)
        above = [page for page in ended if self._state[page] == USED]
        self.eviction.admit([(page, self._tenant[page]) for page in evictable], above)
        self.releases += 1
        self._note("unpin", ended, why=why)

    def expire_pins(self, now_s: float) -> None:
        """End the pins whose deadline has come."""
        ended = set()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            until_s, page = heapq.heappop(self._deadlines)
            if self._pinned_until_s.get(page) == until_s:
                ended.add(page)
        if ended:
            # Parents were pinned first, and are to be evicted last.
            self.unpin(
                [each for each in reversed(self._pinned_until_s) if each in ended], "expired"
            )

    def pinned(self) -> list[PageId]:
        """Return the pages with a pin, held ones too, in the order in which they were pinned."""
        return list(self._pinned_until_s)

    def forget_content(self) -> None:
        """Make every cached page free; held pages become free when they are released."""
        for page in map(PageId, range(self.total_pages)):
            if self._state[page] == EVICTABLE:
                self.eviction.withdraw(page)
            if self._state[page] in (EVICTABLE, PINNED):
                self._set_free(page)
        self._is_indexed = bytearray(self.total_pages)
        self._pinned_until_s.clear()
        self._deadlines.clear()
        self.releases += 1
        self._note("clear", ())
        self._check_conservation()

    def states(self) -> dict[str, int]:
        """Return the pages in each state."""
        return dict(zip(STATES, self._counts, strict=True))

    def tenants(self) -> dict[str, dict[str, int]]:
        """Return, for every tenant that owns pages, the pages in each state."""
        return {
            tenant: dict(zip(STATES[1:], counts[1:], strict=True))
            for tenant, counts in self._by_tenant.items()
        }

    def largest_free_run_pages(self) -> int:
        """Return the longest run of neighbouring free pages. Costs O(total pages)."""
        return max(map(len, _FREE_RUN.findall(self._state)), default=0)

    def snapshot(self) -> list[PageRecord]:
        """Return every page that is not free. The holders are not known here: the owner adds."""
        return [
            PageRecord(
                page,
                STATES[state],
                is_indexed=bool(self._is_indexed[page]),
                is_pinned=page in self._pinned_until_s,
                tenant=self._tenant[page],
            )
            for page, state in enumerate(self._state)
            if state != FREE
        ]

    def audit(self) -> None:
        """Check every page; raises PoolError. Costs O(total pages): for tests."""
        self._check_conservation()
        free = set(self._free)
        if len(free) != len(self._free):
            message = "a page is free twice"
            raise PoolError(message)
        counts = [0] * len(STATES)
        for page in map(PageId, range(self.total_pages)):
            state = self._state[page]
            counts[state] += 1
            is_held = state in (ALLOCATED, USED, RESERVED)
            is_kept = state in (EVICTABLE, PINNED)
            if (
                (page in free) != (state == FREE)
                or is_held != (self._references[page] > 0)
                or (is_kept and not self._is_indexed[page])
                or (is_kept and (page in self._pinned_until_s) != (state == PINNED))
            ):
                message = f"page {page} is {STATES[state]} with {self._references[page]} references"
                raise PoolError(message)
        by_tenant = [sum(each) for each in zip(*self._by_tenant.values(), strict=True)][1:]
        if counts != self._counts or (by_tenant and by_tenant != counts[1:]):
            message = f"counted {counts}, kept {self._counts} and {by_tenant} by tenant"
            raise PoolError(message)

    def _evict(self, tenant: str) -> PageId:
        page = self.eviction.victim(tenant, self._owned)
        self._is_indexed[page] = False
        self._leave(page)
        self._counts[FREE] += 1
        return page

    def _set_free(self, page: PageId) -> None:
        self._leave(page)
        self._state[page] = FREE
        self._counts[FREE] += 1
        self._free.append(page)

    def _leave(self, page: PageId) -> None:
        """Take ``page`` out of its state and from its tenant."""
        state, tenant = self._state[page], self._tenant[page]
        self._counts[state] -= 1
        self._by_tenant[tenant][state] -= 1
        self._owned[tenant] -= 1
        if not self._owned[tenant]:
            del self._owned[tenant], self._by_tenant[tenant]

    def _move(self, page: PageId, state: int) -> None:
        before = self._state[page]
        self._state[page] = state
        self._counts[before] -= 1
        self._counts[state] += 1
        counts = self._by_tenant[self._tenant[page]]
        counts[before] -= 1
        counts[state] += 1

    def _note(
        self,
        op: Operation,
        pages: Sequence[PageId],
        holder: str | None = None,
        *,
        why: str | None = None,
        tenant: str | None = None,
        targets: Sequence[PageId] = (),
    ) -> None:
        if self._journal is None or not (pages or op == "clear"):
            return
        transition = Transition(
            op=op,
            tier=self.tier,
            pages=list(pages),
            targets=list(targets),
            request=holder,
            why=why,
            tenant=tenant,
        )
        self._journal(transition)

    def _check_conservation(self) -> None:
        if sum(self._counts) != self.total_pages or self._counts[FREE] != len(self._free):
            message = f"{self.states()} with {len(self._free)} free are not {self.total_pages}"
            raise PoolError(message)
