"""The audit of a page cache: replays its transitions and proves that no page is lost.

Each tier is a pool with a fixed number of pages. A page is *free*; *allocated*: in a block table,
nothing computed yet; *used*: held by a request, with content; *reserved*: claimed for a transfer
that is under way; *evictable*: held by nobody, its content kept and found; or *pinned*: evictable,
but protected until a deadline. The five and free add up to the tier's pages, and the five of a
tenant to the tenant's. The replay knows what each transition may do to which page and fails at the
first one that does something else; what the pool itself counts must agree with it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, get_args

from msgspec import Struct

from sidecar.audit_page import STATES, TierPages, Violation
from sidecar.audit_page import conservation_fault as conservation_fault
from sidecar.journal import TierName

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sidecar.journal import Operation, PageState, Transition

TIERS: Final[tuple[TierName, ...]] = get_args(TierName)
CLOSED: Final = "closed"
"""The ``why`` of the count that an engine writes when it stops."""
RESUMED: Final = "resumed"
"""The ``why`` of a snapshot after transitions that could not be written."""
_NEEDS_REQUEST: Final = frozenset({"create", "append", "share", "copy", "end"})
_NEEDS_WHY: Final = frozenset({"evict", "end"})
_NEEDS_TARGETS: Final = frozenset({"copy", "move"})
_NEEDS_NO_PAGES: Final = frozenset({"open", "clear", "end", "count"})


class AuditFault(Exception):  # noqa: N818
    """The first transition that cannot be true.

    ``line`` counts the transitions fed, from 1 on, or the lines of ``file`` where one is read.
    """

    def __init__(
        self,
        message: str,
        *,
        line: int,
        page: int | None = None,
        tier: TierName | None = None,
        request: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.file: Path | None = None
        self.page = page
        self.tier = tier
        self.request = request


class AuditSummary(Struct, frozen=True, kw_only=True):
    """What a replay saw. ``runs`` is lives of the log, ``lost_transitions`` were never written.

    ``ended_requests`` is by reason, ``evicted_pages`` by rule, ``peak_pages`` and ``final_pages``
    by tier and state. ``cut_requests`` were open when a run broke off.
    """

    transitions: int
    runs: int
    lost_transitions: int
    ended_requests: dict[str, int]
    open_requests: list[str]
    cut_requests: int
    evicted_pages: dict[str, int]
    total_pages: dict[str, int]
    peak_pages: dict[str, dict[str, int]]
    final_pages: dict[str, dict[str, int]]


class AuditReplay:
    """Follows transitions from an ``open`` on; raises AuditFault at the first that is wrong.

    After a fault the replay is of no more use. Transitions with ``n`` 0 come from memory: their
    numbers are not checked, and each ``open`` among them begins anew.
    """

    def __init__(self) -> None:
        self.transitions = 0
        self.is_closed = False
        """Whether the last transition says that the engine has stopped and holds nothing."""
        self._runs = 0
        self._run = 0
        self._number = 0
        self._lost_transitions = 0
        self._tiers: dict[TierName, TierPages] = {}
        self._open_requests: set[str] = set()
        self._cut_requests = 0
        self._ended: Counter[str] = Counter()
        self._evicted: Counter[str] = Counter()
        self._peaks: dict[TierName, Counter[str]] = {}

    def feed(self, transition: Transition) -> None:
        """Replay one transition."""
        self.transitions += 1
        try:
            _check_form(transition)
            if transition.op == "open":
                self._begin(transition)
            else:
                self._check_number(transition)
                self._apply(transition, self._tier(transition.tier))
        except Violation as violation:
            raise self._fault(violation, transition.op) from None
        self.is_closed = transition.op == "count" and transition.why == CLOSED
        self._number = transition.n

    def check_stopped(self) -> None:
        """Raise AuditFault when a page is still claimed or a request has not ended."""
        try:
            self._expect_stopped()
        except Violation as violation:
            raise self._fault(violation, "at the end") from None

    def summary(self) -> AuditSummary:
        """Return what was seen so far."""
        self._keep_peaks()
        return AuditSummary(
            transitions=self.transitions,
            runs=self._runs,
            lost_transitions=self._lost_transitions,
            ended_requests=dict(sorted(self._ended.items())),
            open_requests=sorted(self._open_requests),
            cut_requests=self._cut_requests,
            evicted_pages=dict(sorted(self._evicted.items())),
            total_pages={name: tier.total_pages for name, tier in self._tiers.items()},
            peak_pages={name: dict(peaks) for name, peaks in self._peaks.items()},
            final_pages={name: {**tier.counts} for name, tier in self._tiers.items()},
        )

    def tenant_pages(self, tier: TierName) -> dict[str, dict[str, int]]:
        """Return the pages of ``tier`` by tenant and state, free ones aside."""
        return {tenant: {**counts} for tenant, counts in self._tier(tier).tenants.items()}

    def _begin(self, transition: Transition) -> None:
        """Start from a snapshot; one that continues a run must say what the replay says."""
        tiers = {name: _read_tier(transition, name) for name in TIERS if name in transition.totals}
        is_same_run = self._run == transition.run > 0
        if is_same_run and transition.why != RESUMED:
            self._check_number(transition)
            for name in TIERS:
                ours, theirs = self._tiers.get(name), tiers.get(name)
                if ours is not None and theirs is not None:
                    ours.expect_equal(theirs)
                elif ours is not theirs:
                    message = "it is not in every snapshot of a run"
                    raise Violation(message, tier=name)
            return
        if is_same_run:
            self._lost_transitions += self._gap(transition)
        else:
            self._runs += 1
            self._cut_requests += len(self._open_requests)
            self._run = transition.run
        self._keep_peaks()
        self._tiers = tiers
        device = tiers.get("device")
        self._open_requests = set() if device is None else set(device.held)

    def _apply(self, transition: Transition, tier: TierPages) -> None:
        if transition.request is not None and transition.tier == "device":
            self._open_requests.add(transition.request)
        mark = _MARKS.get(transition.op)
        if mark is not None:
            for page in transition.pages:
                mark(tier, page)
        elif transition.op == "count":
            self._count(transition)
        elif transition.op == "end":
            self._end(transition)
        elif transition.op == "move":
            _move(transition, tier, self._tier(transition.target_tier or transition.tier))
        else:
            _STEPS[transition.op](transition, tier)
        if transition.op == "evict":
            self._evicted[transition.why or ""] += len(transition.pages)

    def _end(self, transition: Transition) -> None:
        request = transition.request or ""
        for tier in self._tiers.values():
            tier.expect_ended(request)
        self._open_requests.discard(request)
        self._ended[transition.why or ""] += 1

    def _count(self, transition: Transition) -> None:
        for name in TIERS:
            totals = transition.totals.get(name)
            if totals is not None:
                self._tier(name).expect_counts(totals, transition.tenants.get(name))
        if transition.why == CLOSED:
            self._expect_stopped()

    def _expect_stopped(self) -> None:
        for tier in self._tiers.values():
            tier.expect_unclaimed()
        if self._open_requests:
            request = min(self._open_requests)
            message = f"the engine has stopped and request {request} never ended"
            raise Violation(message, request=request)

    def _check_number(self, transition: Transition) -> None:
        if self._gap(transition) > 0:
            message = f"lines {self._number + 1} to {transition.n - 1} (n) are missing"
            raise Violation(message)

    def _gap(self, transition: Transition) -> int:
        """Return how many numbers were left out before ``transition``."""
        if self._run == 0 and transition.n == 0:
            return 0
        gap = transition.n - self._number - 1
        if gap < 0:
            message = f"expected line {self._number + 1} (n), got line {transition.n} again"
            raise Violation(message)
        return gap

    def _tier(self, name: TierName) -> TierPages:
        tier = self._tiers.get(name)
        if tier is None:
            message = "expected a snapshot of this tier before (op open), found none"
            raise Violation(message, tier=name)
        return tier

    def _keep_peaks(self) -> None:
        for name, tier in self._tiers.items():
            peaks = self._peaks.setdefault(name, Counter())
            peaks |= Counter(tier.peaks)
            self._peaks[name] = Counter({state: peaks[state] for state in STATES})

    def _fault(self, violation: Violation, place: str) -> AuditFault:
        """Return ``violation`` as a fault of the transition that was fed last."""
        where = [] if violation.page is None else [f"page {violation.page}"]
        where += [] if violation.tier is None else [violation.tier]
        text = " of ".join(where)
        return AuditFault(
            f"{place}: {text}{': ' if text else ''}{violation}",
            line=self.transitions,
            page=violation.page,
            tier=violation.tier,
            request=violation.request,
        )


def _check_form(transition: Transition) -> None:
    """Raise Violation when a field is missing, or is there that has no meaning."""
    op = transition.op
    if op in _NEEDS_REQUEST and not transition.request:
        message = "request: expected who holds, got none"
    elif op in _NEEDS_WHY and not transition.why:
        message = "why: expected a reason, got none"
    elif (op in _NEEDS_NO_PAGES) != (not transition.pages):
        expected = "none" if op in _NEEDS_NO_PAGES else "at least one"
        message = f"pages: expected {expected}, got {len(transition.pages)}"
    elif op in _NEEDS_TARGETS and len(transition.targets) != len(transition.pages):
        message = f"targets: expected {len(transition.pages)}, got {len(transition.targets)}"
    elif op == "move" and transition.target_tier in {None, transition.tier}:
        message = f"target_tier: expected another tier, got {transition.target_tier}"
    elif op in {"open", "count"} and not set(TIERS).issuperset(transition.totals):
        message = f"totals: expected tiers {', '.join(TIERS)}, got {', '.join(transition.totals)}"
    elif not set(transition.totals).issuperset([*transition.records, *transition.tenants]):
        message = "totals: expected every tier that records and tenants have"
    else:
        return
    raise Violation(message, request=transition.request)


def _read_tier(transition: Transition, name: TierName) -> TierPages:
    totals = transition.totals[name]
    tier = TierPages(name, sum(totals.values()))
    tier.load(transition.records.get(name, ()))
    tier.expect_counts(totals, transition.tenants.get(name))
    return tier


def _take(transition: Transition, tier: TierPages) -> None:
    state: PageState = "reserved" if transition.op == "reserve" else "allocated"
    for page in transition.pages:
        tier.take(page, state, transition.request, transition.tenant or "")


def _copy(transition: Transition, tier: TierPages) -> None:
    request = transition.request or ""
    for page, target in zip(transition.pages, transition.targets, strict=True):
        tier.expect_state(page, "used", request)
        tier.expect_state(target, "allocated", request)
        tier.fill(target)
        tier.release(page, request)


def _move(transition: Transition, tier: TierPages, target_tier: TierPages) -> None:
    for page, target in zip(transition.pages, transition.targets, strict=True):
        tier.expect_content(page)
        target_tier.expect_state(target, "reserved")


def _share(transition: Transition, tier: TierPages) -> None:
    for page in transition.pages:
        tier.share(page, transition.request or "")


def _release(transition: Transition, tier: TierPages) -> None:
    for page in transition.pages:
        tier.release(page, transition.request)


def _clear(_: Transition, tier: TierPages) -> None:
    tier.clear()


_MARKS: Final[dict[Operation, Callable[[TierPages, int], None]]] = {
    "fill": TierPages.fill,
    "index": TierPages.index,
    "unindex": TierPages.unindex,
    "pin": TierPages.pin,
    "unpin": TierPages.unpin,
    "evict": TierPages.evict,
}
_STEPS: Final[dict[Operation, Callable[[Transition, TierPages], None]]] = {
    "create": _take,
    "append": _take,
    "reserve": _take,
    "share": _share,
    "copy": _copy,
    "release": _release,
    "clear": _clear,
}
