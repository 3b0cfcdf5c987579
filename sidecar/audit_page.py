"""The pages of one tier as an audit sees them: who holds what, and what each transition may do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, get_args

from sidecar.journal import PageState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sidecar.journal import PageRecord, TierName

STATES: Final[tuple[PageState, ...]] = get_args(PageState)
HELD_STATES: Final[tuple[PageState, ...]] = ("allocated", "used", "reserved")
KEPT_STATES: Final[tuple[PageState, ...]] = ("evictable", "pinned")
_FILLED_STATES: Final = frozenset({"used", *KEPT_STATES})


class Violation(Exception):  # noqa: N818
    """A transition that cannot be true, and the page, tier and request at fault, if any."""

    def __init__(
        self,
        message: str,
        *,
        page: int | None = None,
        tier: TierName | None = None,
        request: str | None = None,
    ) -> None:
        super().__init__(message)
        self.page = page
        self.tier = tier
        self.request = request


@dataclass(slots=True)
class AuditedPage:
    """A page that is not free. ``holders`` counts how often each request holds it."""

    state: PageState
    holders: dict[str, int] = field(default_factory=dict)
    is_indexed: bool = False
    is_pinned: bool = False
    tenant: str = ""

    def __str__(self) -> str:
        marks: list[str] = [self.state]
        marks += ["indexed"] if self.is_indexed else []
        marks += ["pinned"] if self.is_pinned and self.state != "pinned" else []
        marks += [f"held by {', '.join(sorted(self.holders))}"] if self.holders else []
        return ", ".join(marks)


class TierPages:
    """All pages of one tier. A page that is not in ``pages`` is free.

    ``counts`` and ``tenants`` (by tenant, without free) follow every change, ``peaks`` keeps the
    highest count of each state. Methods raise Violation where a page may not do that.
    """

    def __init__(self, name: TierName, total_pages: int) -> None:
        self.name = name
        self.total_pages = total_pages
        self.pages: dict[int, AuditedPage] = {}
        self.held: dict[str, set[int]] = {}
        self.counts: dict[str, int] = dict.fromkeys(STATES, 0)
        self.counts["free"] = total_pages
        self.peaks = dict(self.counts)
        self.tenants: dict[str, dict[str, int]] = {}
        self._evicted: set[int] = set()

    def load(self, records: Iterable[PageRecord]) -> None:
        """Fill an empty tier from a snapshot."""
        for record in records:
            self._expect_free(record.page, "the snapshot lists it twice")
            if record.state == "free":
                continue
            page = AuditedPage(
                record.state,
                dict(record.holders),
                record.is_indexed,
                record.is_pinned,
                record.tenant or "",
            )
            wrong = _record_fault(page)
            if wrong is not None:
                raise self._violation(record.page, wrong, min(page.holders, default=None))
            self._put(record.page, page)
            for request in page.holders:
                self.held.setdefault(request, set()).add(record.page)

    def take(self, number: int, state: PageState, request: str | None, tenant: str) -> None:
        """Make a free page ``allocated`` or ``reserved``."""
        self._expect_free(number, "only a free page can be taken", request)
        self._put(number, AuditedPage(state, tenant=tenant))
        if request is not None:
            self._hold(number, self.pages[number], request)

    def fill(self, number: int) -> None:
        """Note that an allocated or reserved page has content."""
        page = self._page(number, "filled")
        if page.state not in {"allocated", "reserved"}:
            raise self._violation(number, f"it is filled, but it is {page}")
        self._evicted.discard(number)
        if page.holders:
            self._set(number, page, "used")

    def index(self, number: int) -> None:
        """Note that a page's content is found."""
        page = self._page(number, "indexed")
        if page.is_indexed:
            raise self._violation(number, f"it is indexed twice: it is {page}")
        page.is_indexed = True
        if not page.holders:
            self._set(number, page, "pinned" if page.is_pinned else "evictable")

    def unindex(self, number: int) -> None:
        """Note that a page's content is not found any more."""
        page = self._page(number, "unindexed")
        if not page.is_indexed:
            raise self._violation(number, f"it is unindexed, but it is {page}, and not indexed")
        page.is_indexed = page.is_pinned = False
        if not page.holders:
            self._set(number, page, "free")

    def share(self, number: int, request: str) -> None:
        """Add a holder to a page that has content, or will have it when this step is over."""
        page = self._page(number, "shared", request)
        if page.state == "reserved" and not page.holders:
            told = f"{request} shares it, but it is {page}: its content is still on its way"
            raise self._violation(number, told, request)
        if page.state in KEPT_STATES:
            self._set(number, page, "used")
        self._hold(number, page, request)

    def release(self, number: int, request: str | None) -> None:
        """Take a holder away; without ``request``: give up a reserved page without holder."""
        page = self._page(number, "released", request)
        if request is None:
            if page.state != "reserved" or page.holders:
                raise self._violation(number, f"nobody releases it, but it is {page}")
            self._set(number, page, "free")
            return
        if request not in page.holders:
            raise self._violation(number, f"{request} releases it, but it is {page}", request)
        page.holders[request] -= 1
        if page.holders[request] == 0:
            del page.holders[request]
            self._forget_holder(number, request)
        if not page.holders:
            kept: PageState = "pinned" if page.is_pinned else "evictable"
            self._set(number, page, kept if page.is_indexed else "free")

    def pin(self, number: int) -> None:
        """Protect a page; a second pin moves the deadline and changes nothing here."""
        page = self._page(number, "pinned")
        page.is_pinned = True
        if page.state == "evictable":
            self._set(number, page, "pinned")

    def unpin(self, number: int) -> None:
        """Protect a page no more."""
        page = self._page(number, "unpinned")
        if not page.is_pinned:
            raise self._violation(number, f"it is unpinned, but it is {page}, and not pinned")
        page.is_pinned = False
        if page.state == "pinned":
            self._set(number, page, "evictable")

    def evict(self, number: int) -> None:
        """Make an evictable page free."""
        page = self._page(number, "evicted")
        if page.state != "evictable":
            holder = min(page.holders, default=None)
            raise self._violation(number, f"it is evicted, but it is {page}", holder)
        self._set(number, page, "free")
        self._evicted.add(number)

    def clear(self) -> None:
        """Forget all content; pages that nobody holds become free."""
        for number, page in list(self.pages.items()):
            page.is_indexed = page.is_pinned = False
            if page.state in KEPT_STATES:
                self._set(number, page, "free")

    def expect_content(self, number: int) -> None:
        """Raise Violation unless the page has content that can be copied elsewhere.

        An evicted page has it until the step that takes the page fills it, or a snapshot follows.
        """
        self._expect_known(number)
        page = self.pages.get(number)
        if number not in self._evicted and (page is None or page.state not in _FILLED_STATES):
            told = f"its content is moved, but it is {page or 'free'}"
            raise self._violation(number, told)

    def expect_state(self, number: int, state: PageState, request: str | None = None) -> None:
        """Raise Violation unless the page is in ``state``, and held by ``request`` if given."""
        page = self._page(number, f"to be {state}", request)
        if page.state != state or (request is not None and request not in page.holders):
            by = "" if request is None else f" and held by {request}"
            told = f"it must be {state}{by}, but it is {page}"
            raise self._violation(number, told, request)

    def expect_counts(
        self, totals: Mapping[str, int], tenants: Mapping[str, Mapping[str, int]] | None = None
    ) -> None:
        """Raise Violation unless the pool counts its pages as they are counted here."""
        wrong = conservation_fault(totals, self.total_pages, tenants)
        if wrong is not None:
            raise self._violation(None, wrong)
        for state, pages in self.counts.items():
            if totals.get(state, 0) != pages:
                raise self._violation(None, f"{totals.get(state, 0)} {state} pages, not {pages}")
        if tenants is None:
            return
        for tenant in sorted({*self.tenants, *tenants}):
            ours, theirs = self.tenants.get(tenant, {}), tenants.get(tenant, {})
            for state in STATES[1:]:
                if theirs.get(state, 0) != ours.get(state, 0):
                    told = f"{theirs.get(state, 0)} {state} pages of tenant {tenant or '(none)'}"
                    raise self._violation(None, f"{told}, not {ours.get(state, 0)}")

    def expect_equal(self, snapshot: TierPages) -> None:
        """Raise Violation unless ``snapshot`` says the same of every page; go on from it."""
        if snapshot.total_pages != self.total_pages:
            told = f"the snapshot has {snapshot.total_pages} pages, not {self.total_pages}"
            raise self._violation(None, told)
        for number in sorted(self.pages.keys() | snapshot.pages.keys()):
            was, now = self.pages.get(number), snapshot.pages.get(number)
            if was != now:
                holders = {*(was.holders if was else ()), *(now.holders if now else ())}
                told = f"the snapshot says {now or 'free'}, the lines before it {was or 'free'}"
                raise self._violation(number, told, min(holders, default=None))
        self._evicted.clear()

    def expect_unclaimed(self) -> None:
        """Raise Violation when the engine has stopped and a page is still held or reserved."""
        for number in sorted(self.pages):
            page = self.pages[number]
            if page.state in HELD_STATES:
                told = f"it leaked: the engine has stopped and it is {page}"
                raise self._violation(number, told, min(page.holders, default=None))

    def expect_ended(self, request: str) -> None:
        """Raise Violation when ``request`` still holds a page."""
        numbers = self.held.get(request)
        if numbers:
            told = f"it leaked: request {request} ended and still holds {len(numbers)} pages"
            raise self._violation(min(numbers), told, request)

    def _violation(self, number: int | None, message: str, request: str | None = None) -> Violation:
        return Violation(message, page=number, tier=self.name, request=request)

    def _page(self, number: int, verb: str, request: str | None = None) -> AuditedPage:
        page = self.pages.get(number)
        if page is None:
            self._expect_known(number)
            raise self._violation(number, f"it is {verb}, but it is free", request)
        return page

    def _expect_known(self, number: int) -> None:
        if not 0 <= number < self.total_pages:
            raise self._violation(number, f"the tier has {self.total_pages} pages, from 0 on")

    def _expect_free(self, number: int, rule: str, request: str | None = None) -> None:
        self._expect_known(number)
        if number in self.pages:
            raise self._violation(number, f"{rule}, but it is {self.pages[number]}", request)

    def _hold(self, number: int, page: AuditedPage, request: str) -> None:
        page.holders[request] = page.holders.get(request, 0) + 1
        self.held.setdefault(request, set()).add(number)

    def _forget_holder(self, number: int, request: str) -> None:
        numbers = self.held[request]
        numbers.discard(number)
        if not numbers:
            del self.held[request]

    def _put(self, number: int, page: AuditedPage) -> None:
        self.pages[number] = page
        of_tenant = self.tenants.setdefault(page.tenant, dict.fromkeys(STATES, 0))
        of_tenant[page.state] += 1
        self._recount("free", page.state)

    def _set(self, number: int, page: AuditedPage, state: PageState) -> None:
        of_tenant = self.tenants[page.tenant]
        of_tenant[page.state] -= 1
        self._recount(page.state, state)
        page.state = state
        if state == "free":
            del self.pages[number]
        else:
            of_tenant[state] += 1

    def _recount(self, old: str, new: str) -> None:
        counts = self.counts
        counts[old] -= 1
        counts[new] += 1
        self.peaks[new] = max(self.peaks[new], counts[new])


def _record_fault(page: AuditedPage) -> str | None:
    """Return how a page of a snapshot contradicts itself; None when it does not."""
    is_kept = page.state in KEPT_STATES
    if min(page.holders.values(), default=1) < 1:
        return f"expected holders that hold it at least once, got {page.holders}"
    if page.state in {"allocated", "used"} and not page.holders:
        return f"it is {page}, but nobody holds it"
    if is_kept and (page.holders or not page.is_indexed):
        return f"it is {page}, but such a page is indexed and has no holder"
    if is_kept and page.is_pinned != (page.state == "pinned"):
        return f"it is {page}, but is_pinned is {page.is_pinned}"
    if page.state == "reserved" and not page.holders and page.is_indexed:
        return "it is reserved and indexed, but nobody holds it"
    return None


def conservation_fault(
    states: Mapping[str, int],
    total_pages: int,
    tenants: Mapping[str, Mapping[str, int]] | None = None,
) -> str | None:
    """Return in words how one tier's counts by state fail to add up; None when they do.

    ``tenants`` has the counts of the five states by tenant; they must add up to the tier's.
    """
    for state, pages in states.items():
        if state not in STATES:
            return f"{state} is no state: expected one of {', '.join(STATES)}"
        if pages < 0:
            return f"{pages} pages are {state}"
    found_pages = sum(states.values())
    if found_pages != total_pages:
        terms = " + ".join(f"{states.get(state, 0)} {state}" for state in STATES)
        return f"{terms} = {found_pages} pages, not {total_pages}"
    if tenants is None:
        return None
    for state in STATES[1:]:
        of_tenants = sum(counts.get(state, 0) for counts in tenants.values())
        if of_tenants != states.get(state, 0):
            return f"{of_tenants} pages of all tenants are {state}, not {states.get(state, 0)}"
    return None
