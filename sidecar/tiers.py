"""The tiers below the device: what goes down, and what comes up instead of being computed again.

A page that the device gives up is copied to host memory and from there, in the background, to disk.
When a prompt comes whose prefix the device holds in part, the run that follows may be fetched: at
each point where the source changes, fetching up to there and computing the rest is compared with
computing all, by the measured figures, and the cheapest wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol

from msgspec import Struct

from sidecar.pool import PageId
from sidecar.tree import PageFacts
from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.tier import Dropped, LowerTier

SourceName = Literal["host", "disk", "peer"]
FetchRule = Literal["cheaper", "always", "never"]
DemoteRule = Literal["all", "reused"]
FIRST_RETRY: Final = 16
MOST_RETRY: Final = 1024
"""After so many plans without a dear source, in doubling steps, it is tried and measured again."""
LEAST_PATIENCE_S: Final = 0.05
MOVER: Final = "demotion"
"""Who holds a host slot until the step that fills it has run."""


class Costs(Protocol):
    """The measured prices of this engine."""

    def fetch_ms(self, source: SourceName, pages: int) -> float:
        """Return how long it takes to bring ``pages`` to the device."""

    def prefill_ms(self, tokens: int, context_tokens: int) -> float:
        """Return how long it takes to compute ``tokens`` after ``context_tokens``."""


class Fetch(Struct, frozen=True):
    """Pages to bring up, source by source, in the order of the prompt."""

    runs: tuple[tuple[SourceName, int], ...] = ()

    @property
    def pages(self) -> int:
        """All pages of the runs."""
        return sum(pages for _, pages in self.runs)


class Demotion(Struct, frozen=True):
    """A copy of a device page is to be written into a host slot."""

    page: PageId
    slot: PageId
    key: BlockId
    facts: PageFacts


@dataclass(slots=True)
class Refusals:
    """Plans in a row that left a source out, and how many there must be before it is tried."""

    plans: int = 0
    retry_after: int = FIRST_RETRY


class Tiers:
    """Host memory and disk under one device. Pure."""

    def __init__(
        self,
        costs: Costs,
        page_tokens: int,
        *,
        host: LowerTier | None = None,
        disk: LowerTier | None = None,
        fetch: FetchRule = "cheaper",
        demote: DemoteRule = "all",
    ) -> None:
        self.host: Final = host
        self.disk: Final = disk
        self.demote_rule: Final = demote
        self._costs = costs
        self._page_tokens = page_tokens
        self._fetch = fetch
        self._refusals: dict[SourceName, Refusals] = {}

    def plan(
        self, keys: Sequence[BlockId], context_tokens: int, *, has_peer: bool = False
    ) -> Fetch:
        """Return the fetch that makes a prompt ready soonest; ``keys`` follow what the device has.

        A peer is assumed to hold all that this worker does not: it was named because it should.
        """
        if self._fetch == "never":
            return Fetch()
        runs = self._runs(keys)
        missing_pages = len(keys) - sum(pages for _, pages in runs)
        if has_peer and missing_pages:
            runs.append(("peer", missing_pages))
        if not runs:
            return Fetch()
        if self._fetch == "always":
            return Fetch(tuple(runs))
        cheapest = self._cheapest(runs, len(keys), context_tokens)
        return Fetch(tuple(runs[: self._or_retried(runs, cheapest)]))

    def patience_s(self, first_page: int, pages: int) -> float | None:
        """Return how long a fetch of ``pages`` may take; None where it is to come at any price.

        As long as computing them: so whatever a peer does, a prompt takes at most about twice the
        time (the break-even rule of ski rental: A. Karlin et al., Algorithmica 3, 1988).
        """
        if self._fetch == "always":
            return None
        return max(LEAST_PATIENCE_S, 1e-3 * self.saved_ms(first_page, pages))

    def saved_ms(self, first_page: int, pages: int) -> float:
        """Return what computing ``pages`` would take after ``first_page`` of them."""
        tokens = self._page_tokens
        return self._costs.prefill_ms(pages * tokens, first_page * tokens)

    def demote(
        self, page: PageId, key: BlockId, facts: PageFacts, *, was_reused: bool
    ) -> tuple[Demotion | None, tuple[Dropped, ...]]:
        """Find a host slot for a page that leaves the device; also return what left the host."""
        if self.host is None:
            return None, ()
        if key in self.host:
            self._note_use(key)
            return None, ()
        if self.demote_rule == "reused" and not was_reused:
            return None, ()
        put = self.host.reserve(MOVER, facts.tenant)
        if put is None:
            return None, ()
        return Demotion(page, put.slot, key, facts), put.dropped

    def _note_use(self, key: BlockId) -> None:
        """Put copies of what the device used until now behind those that it did not."""
        for tier in (self.host, self.disk):
            if tier is not None and key in tier:
                tier.give_back(tier.lease((key,), MOVER), MOVER)

    def _runs(self, keys: Sequence[BlockId]) -> list[tuple[SourceName, int]]:
        """Return the leading run of ``keys`` held below, cut where the source changes."""
        runs: list[tuple[SourceName, int]] = []
        for key in keys:
            source = self._source(key)
            if source is None:
                break
            if runs and runs[-1][0] == source:
                runs[-1] = (source, runs[-1][1] + 1)
            else:
                runs.append((source, 1))
        return runs

    def _source(self, key: BlockId) -> Literal["host", "disk"] | None:
        if self.host is not None and key in self.host:
            return "host"
        if self.disk is not None and key in self.disk:
            return "disk"
        return None

    def _or_retried(self, runs: Sequence[tuple[SourceName, int]], cheapest: int) -> int:
        """Return ``cheapest``, or a run more: what is never used is never measured again."""
        for source, _ in runs[:cheapest]:
            self._refusals.pop(source, None)
        if cheapest == len(runs):
            return cheapest
        refusals = self._refusals.setdefault(runs[cheapest][0], Refusals())
        refusals.plans += 1
        if refusals.plans < refusals.retry_after:
            return cheapest
        refusals.plans = 0
        refusals.retry_after = min(2 * refusals.retry_after, MOST_RETRY)
        return cheapest + 1

    def _cheapest(
        self, runs: Sequence[tuple[SourceName, int]], wanted_pages: int, context_tokens: int
    ) -> int:
        """Return how many of ``runs`` to fetch so that ``wanted_pages`` are there soonest."""
        tokens = self._page_tokens
        best, best_ms = 0, self._costs.prefill_ms(wanted_pages * tokens, context_tokens)
        fetched_pages, fetch_ms = 0, 0.0
        for count, (source, pages) in enumerate(runs, start=1):
            fetched_pages += pages
            fetch_ms += self._costs.fetch_ms(source, pages)
            rest_tokens = (wanted_pages - fetched_pages) * tokens
            total_ms = fetch_ms + self._costs.prefill_ms(
                rest_tokens, context_tokens + fetched_pages * tokens
            )
            if total_ms < best_ms:
                best, best_ms = count, total_ms
        return best
