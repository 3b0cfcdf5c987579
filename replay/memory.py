"""An engine's KV memory in virtual time: the worker's page pool, its prefix tree, a host tier."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from sidecar.pool import PagePool
from sidecar.tree import PageFacts, PrefixTree
from state.model import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from replay.engine import Job
    from replay.setting import FleetSettings
    from state.model import BlockId

_FACTS: Final = PageFacts(None, b"", 0)


class EngineMemory:
    """Pages of one replica. A page holds one block of the trace.

    ``news`` collects what an engine would tell: (tier, is it stored, block), in order.
    """

    def __init__(self, settings: FleetSettings, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        shares = settings.replicas if settings.is_pooled else 1
        self._capacity_pages = max(1, shares * settings.capacity_tokens // page_tokens)
        self._pool = PagePool(self._capacity_pages)
        self._tree = PrefixTree()
        self._host_pages = shares * settings.host_tokens // page_tokens
        self._host: OrderedDict[BlockId, None] = OrderedDict()
        self._fetch_ms = settings.fetch_token_ms * page_tokens
        self._cost = settings.cost
        self.news: list[tuple[Tier, bool, BlockId]] = []
        self.evictions = 0
        self.resident_tokens_s = 0.0
        self._noted_s = 0.0

    @property
    def available_pages(self) -> int:
        """Pages that could be had at once."""
        return self._pool.available_pages()

    @property
    def releases(self) -> int:
        """Grows whenever pages may have become available."""
        return self._pool.releases

    @property
    def used_fraction(self) -> float:
        """Share of the pages that running requests hold."""
        return self._pool.held_pages / self._capacity_pages

    def pages_for(self, tokens: int) -> int:
        """Return the pages that hold ``tokens``."""
        return -(-tokens // self.page_tokens)

    def fits(self, tokens: int) -> bool:
        """Return whether a sequence of ``tokens`` could ever run."""
        return self.pages_for(tokens) <= self._capacity_pages

    def note_time(self, now_s: float) -> None:
        """Integrate what is resident up to now."""
        pages = self._capacity_pages - self._pool.free_pages
        self.resident_tokens_s += (now_s - self._noted_s) * pages * self.page_tokens
        self._noted_s = now_s

    def match_blocks(self, chain: tuple[BlockId, ...]) -> int:
        """Return how many leading blocks are on the device."""
        return len(self._tree.match(chain, len(chain)))

    def admit(self, job: Job) -> float | None:
        """Give ``job`` its pages and set what it need not compute; return the fetch time in ms.

        None, and no change, when there are not enough pages.
        """
        target = job.target_tokens
        limit = (target - 1) // self.page_tokens
        shared = self._tree.match(job.chain, limit)
        wanted = self.pages_for(target) - len(shared)
        if wanted > self._pool.available_pages() - self._pool.count_evictable(shared):
            return None
        self._pool.share(shared)
        held = len(shared)
        pulled = max(0, min(job.pulled_blocks, limit) - held)
        fetched = self._fetchable(job, held + pulled, limit)
        taken = self._pool.take(wanted)
        self._drop(taken.evicted)
        job.pages = shared + taken.pages
        came = held + pulled + fetched
        self._index(job, held, came)
        job.computed_tokens = came * self.page_tokens
        if job.cached_tokens is None:
            job.cached_tokens = job.computed_tokens
            job.fetched_tokens = (pulled + fetched) * self.page_tokens
        return self._fetch_ms * fetched

    def index(self, job: Job, computed_tokens: int) -> None:
        """Make the blocks reusable that are full once ``computed_tokens`` are there."""
        self._index(
            job,
            job.computed_tokens // self.page_tokens,
            min(len(job.chain), computed_tokens // self.page_tokens),
        )

    def extend(self, job: Job, pages: int) -> bool:
        """Give ``job`` more pages; False, and no change, when there are none."""
        if pages > self._pool.available_pages():
            return False
        taken = self._pool.take(pages)
        self._drop(taken.evicted)
        job.pages += taken.pages
        return True

    def release(self, job: Job) -> None:
        """Take back the pages of ``job``, the last one first."""
        self._pool.release(reversed(job.pages))
        job.pages = []

    def forget(self, now_s: float) -> None:
        """Lose everything."""
        self.note_time(now_s)
        self._pool = PagePool(self._capacity_pages)
        self._tree = PrefixTree()
        self._host.clear()
        self.news.clear()

    def _index(self, job: Job, start: int, end: int) -> None:
        if end <= start:
            return
        tree, pages, chain, news = self._tree, job.pages, job.chain, self.news
        fresh = []
        for place in range(start, end):
            page, block = pages[place], chain[place]
            if tree.key(page) is None:
                tree.insert(page, block, _FACTS)
                fresh.append(page)
                news.append((Tier.GPU, True, block))
        self._pool.index(fresh)
        self._pool.fill(fresh)

    def _fetchable(self, job: Job, start: int, limit: int) -> int:
        """Return how many blocks from ``start`` on the host tier gives for less than computing."""
        if not self._host:
            return 0
        end = start
        for block in job.chain[start:limit]:
            if block not in self._host:
                break
            end += 1
        if end == start:
            return 0
        size, cost = self.page_tokens, self._cost
        tokens, context = (end - start) * size, start * size
        pairs = tokens * context + tokens * (tokens + 1) // 2
        compute_ms = cost.prefill_token_ms * tokens + cost.attention_pair_ms * pairs
        if self._fetch_ms * (end - start) >= compute_ms:
            return 0
        for block in job.chain[start:end]:
            self._host.move_to_end(block)
        return end - start

    def _drop(self, pages: Iterable[int]) -> None:
        for page in pages:
            block, _, copies = self._tree.remove(page)  # type: ignore[arg-type]
            self.evictions += 1
            if copies:
                continue
            self.news.append((Tier.GPU, False, block))
            if self._host_pages:
                self._demote(block)

    def _demote(self, block: BlockId) -> None:
        if block in self._host:
            self._host.move_to_end(block)
            return
        self._host[block] = None
        self.news.append((Tier.HOST, True, block))
        if len(self._host) > self._host_pages:
            gone, _ = self._host.popitem(last=False)
            self.news.append((Tier.HOST, False, gone))
