"""Which cached page goes next: least recently used, least benefit per byte, or tenant quotas.

A policy sees pages when they become evictable, as a run with children before their parents, and
must give them up in an order that leaves no prefix with a hole: a child goes before its parent.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sidecar.pool import PageId

EvictionName = Literal["lru", "benefit", "quota"]
HALF_LIFE_S: Final = 300.0


class Eviction(Protocol):
    """Orders the evictable pages. ``owned`` has all pages of each tenant, in any state."""

    @property
    def rule(self) -> str:
        """The name that the audit gives as the reason."""

    def admit(self, run: Sequence[tuple[PageId, str]], above: Sequence[PageId] = ()) -> None:
        """Take pages, each with its tenant, that became evictable; children come first.

        ``above`` are pages of the same prefix that stay in use, or pinned.
        """

    def withdraw(self, page: PageId) -> None:
        """Forget an admitted page: it is in use again, pinned or gone."""

    def note_use(
        self, pages: Sequence[PageId], saved_ms: Sequence[float], now_s: float, *, are_new: bool
    ) -> None:
        """Learn that ``pages`` were computed or hit: recomputing each would take ``saved_ms``.

        ``are_new``: they have other content than before.
        """

    def victim(self, tenant: str, owned: Mapping[str, int]) -> PageId:
        """Give up a page for ``tenant``; KeyError when ``available_pages`` is 0."""

    def available_pages(self, tenant: str, owned: Mapping[str, int]) -> int:
        """Return how many pages could be given up for ``tenant`` now."""


class LeastRecentlyUsed:
    """Gives up what was released longest ago. Long prefixes that rest lose everything."""

    rule: Final = "lru"

    def __init__(self) -> None:
        self._pages: OrderedDict[PageId, None] = OrderedDict()

    def admit(self, run: Sequence[tuple[PageId, str]], above: Sequence[PageId] = ()) -> None:  # noqa: ARG002 - in use
        """See ``Eviction``."""
        for page, _ in run:
            self._pages[page] = None

    def withdraw(self, page: PageId) -> None:
        """See ``Eviction``."""
        del self._pages[page]

    def note_use(
        self, pages: Sequence[PageId], saved_ms: Sequence[float], now_s: float, *, are_new: bool
    ) -> None:
        """See ``Eviction``: the order of release is enough."""

    def victim(self, tenant: str, owned: Mapping[str, int]) -> PageId:  # noqa: ARG002 - serves all alike
        """See ``Eviction``."""
        return self._pages.popitem(last=False)[0]

    def available_pages(self, tenant: str, owned: Mapping[str, int]) -> int:  # noqa: ARG002 - the same
        """See ``Eviction``."""
        return len(self._pages)


class ByteBenefit:
    """Gives up the page that saves the fewest prefill ms per byte and time.

    All pages have the same bytes, so a page is worth ``saved_ms`` x its rate of use. The rate is a
    count that decays with a half-life; as all decay alike, the order of ``ln(saved_ms x count at
    the last use) + last use / time constant`` never changes with time, and a heap keeps it. What is
    used rarely loses, however little it holds: small tenants do.
    """

    rule: Final = "benefit"

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self._constant_s = half_life_s / math.log(2)
        self._uses: dict[PageId, tuple[float, float]] = {}
        self._worth: dict[PageId, float] = {}
        self._admitted: dict[PageId, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, PageId]] = []
        self._ordinal = 0

    def admit(self, run: Sequence[tuple[PageId, str]], above: Sequence[PageId] = ()) -> None:
        """See ``Eviction``. A parent is worth at least what its children are."""
        least = -math.inf
        for page, _ in run:
            least = self._worth[page] = max(least, self._worth.get(page, -math.inf))
            self._ordinal += 1
            self._admitted[page] = (least, self._ordinal)
            heapq.heappush(self._heap, (least, self._ordinal, page))
        for page in above:
            self._worth[page] = max(least, self._worth.get(page, -math.inf))

    def withdraw(self, page: PageId) -> None:
        """See ``Eviction``."""
        del self._admitted[page]
        if len(self._heap) > 2 * len(self._admitted) + 64:
            self._heap = [(*order, page) for page, order in self._admitted.items()]
            heapq.heapify(self._heap)

    def note_use(
        self, pages: Sequence[PageId], saved_ms: Sequence[float], now_s: float, *, are_new: bool
    ) -> None:
        """See ``Eviction``."""
        for page, page_ms in zip(pages, saved_ms, strict=True):
            if are_new:
                self._uses.pop(page, None)
                self._worth.pop(page, None)
            count, last_s = self._uses.get(page, (0.0, now_s))
            count = count * math.exp((last_s - now_s) / self._constant_s) + 1
            self._uses[page] = (count, now_s)
            worth = math.log(max(page_ms, 1e-9) * count) + now_s / self._constant_s
            self._worth[page] = max(worth, self._worth.get(page, worth))

    def victim(self, tenant: str, owned: Mapping[str, int]) -> PageId:  # noqa: ARG002 - serves all alike
        """See ``Eviction``."""
        while self._heap:
            worth, ordinal, page = heapq.heappop(self._heap)
            if self._admitted.get(page) == (worth, ordinal):
                del self._admitted[page]
                self._uses.pop(page, None)
                self._worth.pop(page, None)
                return page
        raise KeyError(tenant)

    def available_pages(self, tenant: str, owned: Mapping[str, int]) -> int:  # noqa: ARG002 - the same
        """See ``Eviction``."""
        return len(self._admitted)


class TenantQuota:
    """Guarantees each tenant its quota of pages; what others leave unused may be borrowed.

    The tenant furthest above its quota gives up its least recently used page; a tenant at or below
    its quota loses nothing to others, and reuses its own least recently used pages instead. A
    tenant without a quota has none guaranteed: all that it has is borrowed.
    """

    rule: Final = "quota"

    def __init__(self, quotas_pages: Mapping[str, int]) -> None:
        self.quotas_pages: Final = dict(quotas_pages)
        self._pages: dict[str, OrderedDict[PageId, None]] = {}
        self._tenants: dict[PageId, str] = {}

    def admit(self, run: Sequence[tuple[PageId, str]], above: Sequence[PageId] = ()) -> None:  # noqa: ARG002 - in use
        """See ``Eviction``."""
        for page, tenant in run:
            self._pages.setdefault(tenant, OrderedDict())[page] = None
            self._tenants[page] = tenant

    def withdraw(self, page: PageId) -> None:
        """See ``Eviction``."""
        tenant = self._tenants.pop(page)
        pages = self._pages[tenant]
        del pages[page]
        if not pages:
            del self._pages[tenant]

    def note_use(
        self, pages: Sequence[PageId], saved_ms: Sequence[float], now_s: float, *, are_new: bool
    ) -> None:
        """See ``Eviction``: the order of release is enough."""

    def victim(self, tenant: str, owned: Mapping[str, int]) -> PageId:
        """See ``Eviction``."""
        loser = max(
            (each for each in self._pages if each == tenant or self._excess(each, owned) > 0),
            key=lambda each: (self._excess(each, owned) > 0, self._excess(each, owned)),
        )
        page = next(iter(self._pages[loser]))
        self.withdraw(page)
        return page

    def available_pages(self, tenant: str, owned: Mapping[str, int]) -> int:
        """See ``Eviction``."""
        return sum(
            len(pages) if each == tenant else min(len(pages), max(0, self._excess(each, owned)))
            for each, pages in self._pages.items()
        )

    def reserved_pages(self, tenant: str) -> int:
        """Return the pages guaranteed to all but ``tenant``: what it can never have for sure."""
        return sum(pages for each, pages in self.quotas_pages.items() if each != tenant)

    def _excess(self, tenant: str, owned: Mapping[str, int]) -> int:
        return owned.get(tenant, 0) - self.quotas_pages.get(tenant, 0)
