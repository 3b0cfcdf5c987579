"""A scheduler with tiers and a journal for tests: pure, steps run by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.cache import PagedCache
from sidecar.eviction import LeastRecentlyUsed
from sidecar.scheduler import Scheduler
from sidecar.scope import Place
from sidecar.step import SchedulerLimits
from sidecar.tier import LowerTier
from sidecar.tiers import Tiers
from state.model import BlockId
from state.prefix import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sidecar.eviction import Eviction
    from sidecar.journal import Transition
    from sidecar.step import Sequence, Step
    from sidecar.table import BlockTable
    from sidecar.tiers import DemoteRule, FetchRule

ROOT = BlockId(b"root".ljust(16))


class FlatPrices:
    """Prices per page and per token; ``fetch`` by source, in ms a page."""

    def __init__(self, token_ms: float = 1.0, pair_ms: float = 0.0, **fetch: float) -> None:
        self.token_ms, self.pair_ms = token_ms, pair_ms
        self.fetch = {"host": 0.1, "disk": 0.2, "peer": 0.3} | fetch

    def fetch_ms(self, source: str, pages: int) -> float:
        return self.fetch[source] * pages

    def prefill_ms(self, tokens: int, context_tokens: int) -> float:
        pairs = tokens * context_tokens + tokens * (tokens + 1) // 2
        return self.token_ms * tokens + self.pair_ms * pairs


class PageRig:
    """One scheduler. ``transitions`` has its journal."""

    def __init__(  # noqa: PLR0913 - a test names what matters to it
        self,
        pages: int = 16,
        page_tokens: int = 4,
        *,
        host_slots: int = 0,
        disk_slots: int = 0,
        eviction: Eviction | None = None,
        prices: FlatPrices | None = None,
        fetch: FetchRule = "always",
        demote: DemoteRule = "all",
        **limits: int,
    ) -> None:
        self.transitions: list[Transition] = []
        note = self.transitions.append
        prices = prices or FlatPrices()
        self.host = LowerTier("host", host_slots, note) if host_slots else None
        self.disk = LowerTier("disk", disk_slots, note) if disk_slots else None
        self.tiers = Tiers(
            prices, page_tokens, host=self.host, disk=self.disk, fetch=fetch, demote=demote
        )
        self.cache = PagedCache(
            pages,
            page_tokens,
            eviction=eviction or LeastRecentlyUsed(),
            costs=prices,
            tiers=self.tiers,
            journal=note,
        )
        self.scheduler = Scheduler(self.cache, SchedulerLimits(**limits))
        self.requests = 0

    def table(self, tokens: Iterable[int], place: Place | None = None) -> BlockTable:
        """Return a table for a prompt; requests are named r1, r2 and so on."""
        self.requests += 1
        packed = pack_tokens(tokens)
        return self.cache.open_table(packed, place or Place(ROOT), None, f"r{self.requests}")

    def submit(
        self,
        tokens: Iterable[int],
        outputs: int = 1,
        *,
        parent: Sequence | None = None,
        has_peer: bool = False,
        place: Place | None = None,
    ) -> Sequence:
        """Queue a prompt."""
        table = self.table(tokens, place)
        return self.scheduler.submit(table, outputs, parent=parent, has_peer=has_peer)

    def finish(self, step: Step, token: int = 7) -> None:
        """Let a step run to its end."""
        for sequence in self.scheduler.complete(step):
            self.scheduler.append(sequence, token)
            if sequence.output_tokens == sequence.max_output_tokens:
                self.scheduler.end(sequence)
        self.audit()

    def run(self) -> int:
        """Run until nothing is left to do; return the steps."""
        steps = 0
        while self.scheduler.has_work:
            step = self.scheduler.schedule()
            assert step.works
            self.finish(step)
            steps += 1
            assert steps < 1000
        return steps

    def answer(self, tokens: Iterable[int], outputs: int = 1) -> int | None:
        """Run a prompt to its end; return its cached tokens."""
        sequence = self.submit(tokens, outputs)
        self.run()
        return sequence.cached_tokens

    def keep_on_disk(self, tokens: Iterable[int]) -> list[BlockId]:
        """Put the full pages of a prompt on disk, as found there at start."""
        assert self.disk is not None
        chain = self.table(tokens).chain
        self.disk.restore(chain, lambda _: None)
        return chain

    def audit(self) -> None:
        """Check all pools."""
        for tier in (self.cache, self.host, self.disk):
            if tier is not None:
                tier.pool.audit()

    def held(self) -> list[int]:
        """Return the held pages of each tier."""
        return [
            tier.pool.held_pages for tier in (self.cache, self.host, self.disk) if tier is not None
        ]


def plan(step: Step) -> list[tuple[int, int]]:
    """Return the new and context tokens of each work."""
    return [(work.new_tokens, work.context_tokens) for work in step.works]
