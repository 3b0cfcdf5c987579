"""The page pool: fixed pages, reference counts, a free list, an LRU of reusable pages.

A page is in exactly one of three states. *Free*: nobody uses it and its content is worthless.
*Held*: at least one sequence references it. *Cached*: nobody references it, but its content is
indexed and may be reused until the page is needed. ``free + held + cached == total`` is checked
after every change; ``audit`` checks each page.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NewType

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PageId = NewType("PageId", int)
"""A page's place in the pool: 0 to ``total_pages - 1``."""


class PoolError(Exception):
    """A broken invariant: always a defect of the engine, never of a client."""


class Taken(Struct, frozen=True):
    """Pages handed out, and those among them whose cached content was given up, oldest first."""

    pages: list[PageId]
    evicted: list[PageId]


class PagePool:
    """Hands out pages: free ones first, then the least recently used cached ones."""

    def __init__(self, total_pages: int) -> None:
        if total_pages < 1:
            message = f"total_pages: expected at least 1, got {total_pages}"
            raise ValueError(message)
        self.total_pages = total_pages
        self.held_pages = 0
        self.releases = 0
        """Grows whenever pages may have become available."""
        self._references = [0] * total_pages
        self._is_reusable = bytearray(total_pages)
        self._free = deque(PageId(page) for page in range(total_pages))
        self._cached: OrderedDict[PageId, None] = OrderedDict()

    @property
    def free_pages(self) -> int:
        """Pages without content."""
        return len(self._free)

    @property
    def cached_pages(self) -> int:
        """Unreferenced pages with reusable content."""
        return len(self._cached)

    @property
    def available_pages(self) -> int:
        """Pages that ``take`` can hand out now."""
        return len(self._free) + len(self._cached)

    def references(self, page: PageId) -> int:
        """Return how many sequences hold ``page``."""
        return self._references[page]

    def count_cached(self, pages: Iterable[PageId]) -> int:
        """Return how many of ``pages`` are cached: sharing them makes so many unavailable."""
        return sum(1 for page in pages if self._references[page] == 0)

    def take(self, wanted_pages: int) -> Taken:
        """Hand out pages with one reference each; raises PoolError when there are not enough."""
        if wanted_pages > self.available_pages:
            message = f"{wanted_pages} pages wanted, {self.available_pages} available"
            raise PoolError(message)
        from_free = min(wanted_pages, len(self._free))
        pages = [self._free.popleft() for _ in range(from_free)]
        evicted = [self._cached.popitem(last=False)[0] for _ in range(wanted_pages - from_free)]
        pages += evicted
        for page in pages:
            self._references[page] = 1
        for page in evicted:
            self._is_reusable[page] = False
        self.held_pages += wanted_pages
        self._check_conservation()
        return Taken(pages, evicted)

    def share(self, pages: Sequence[PageId]) -> None:
        """Add a reference to each of ``pages``, which must be held or cached."""
        for page in pages:
            if self._references[page] == 0:
                if page not in self._cached:
                    message = f"page {page} is free and cannot be shared"
                    raise PoolError(message)
                del self._cached[page]
                self.held_pages += 1
            self._references[page] += 1
        self._check_conservation()

    def release(self, pages: Iterable[PageId]) -> None:
        """Drop a reference to each of ``pages``; the first one becomes the first to evict."""
        for page in pages:
            if self._references[page] == 0:
                message = f"page {page} is released more often than it was taken"
                raise PoolError(message)
            self._references[page] -= 1
            if self._references[page] == 0:
                self.held_pages -= 1
                if self._is_reusable[page]:
                    self._cached[page] = None
                else:
                    self._free.append(page)
        self.releases += 1
        self._check_conservation()

    def mark_reusable(self, page: PageId) -> None:
        """Keep the content of a held ``page`` when it is released."""
        if self._references[page] == 0:
            message = f"page {page} is not held and cannot become reusable"
            raise PoolError(message)
        self._is_reusable[page] = True

    def forget_content(self) -> None:
        """Make every cached page free; held pages become free when they are released."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._is_reusable = bytearray(self.total_pages)
        self.releases += 1
        self._check_conservation()

    def audit(self) -> None:
        """Check every page; raises PoolError. Costs O(total pages): for tests."""
        self._check_conservation()
        free = set(self._free)
        if len(free) != len(self._free):
            message = "a page is free twice"
            raise PoolError(message)
        for page in map(PageId, range(self.total_pages)):
            states = (page in free, self._references[page] > 0, page in self._cached)
            if states.count(True) != 1 or self._references[page] < 0:
                message = f"page {page} is free, held, cached: {states}"
                raise PoolError(message)
            if page in self._cached and not self._is_reusable[page]:
                message = f"page {page} is cached without reusable content"
                raise PoolError(message)

    def _check_conservation(self) -> None:
        found_pages = len(self._free) + self.held_pages + len(self._cached)
        if found_pages != self.total_pages:
            message = (
                f"{len(self._free)} free + {self.held_pages} held + {len(self._cached)} cached "
                f"pages are not {self.total_pages}"
            )
            raise PoolError(message)
