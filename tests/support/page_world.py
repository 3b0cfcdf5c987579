"""A worker's pure core in a simulated world: every operation that can happen to it, checked.

``tests/property`` drives it with hypothesis, ``support.soak`` with a seed for millions of
operations. Whatever is called, in whatever order: ``check`` holds afterwards.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sidecar.audit import AuditReplay
from sidecar.cache import PagedCache
from sidecar.eviction import ByteBenefit, LeastRecentlyUsed, TenantQuota
from sidecar.journal import Transition
from sidecar.scheduler import NeverFitsError, Scheduler
from sidecar.scope import Scopes
from sidecar.step import Phase, SchedulerLimits, Sequence, Step
from sidecar.tier import LowerTier
from sidecar.tiers import Tiers
from state.model import ModelIdentity
from state.prefix import pack_tokens
from support.page_events import EventReader
from support.page_files import PageFiles
from support.page_memory import PageMemory, Share, next_cell
from support.page_shape import Prices, Shape

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequences

    from sidecar.eviction import Eviction
    from sidecar.pool import PageId, PagePool

SALTS = (None, "a", "b")
MOST_TOKENS = 60
MOST_LIVE = 12
PUBLIC_FAMILY = 0


class PageWorld:
    """One engine's pages, and what they would hold."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        identity = ModelIdentity(model="m", tokenizer="t", block_tokens=shape.page_tokens)
        self.scopes = Scopes(identity, 0)
        if shape.public_tokens:
            self.scopes.allow([pack_tokens(self._family(PUBLIC_FAMILY, shape.public_tokens))])
        self.replay = AuditReplay()
        host = LowerTier("host", shape.host_slots, self._note) if shape.host_slots else None
        disk = LowerTier("disk", shape.disk_slots, self._note) if shape.disk_slots else None
        prices = Prices(shape)
        self.tiers = Tiers(
            prices,
            shape.page_tokens,
            host=host,
            disk=disk,
            fetch=shape.fetch,
            demote=shape.demote,
        )
        self.cache = PagedCache(
            shape.pages,
            shape.page_tokens,
            eviction=self._eviction(),
            costs=prices,
            tiers=self.tiers,
            journal=self._note,
        )
        self.pools: list[PagePool] = [self.cache.pool]
        self.pools += [tier.pool for tier in (host, disk) if tier is not None]
        limits = SchedulerLimits(
            max_sequences=shape.sequences,
            max_step_tokens=shape.step_tokens,
            max_sequence_tokens=MOST_TOKENS,
        )
        self.scheduler = Scheduler(self.cache, limits)
        self.memory = PageMemory(shape.pages, shape.page_tokens, shape.host_slots)
        self._files = PageFiles(self.cache.exchange, self.memory)
        self.events = EventReader(self.cache, is_gapless=not self._may_have_holes)
        self.live: list[Sequence] = []
        self.readers: list[tuple[str, list[PageId]]] = []
        self.now_s = 0.0
        self.done: Counter[str] = Counter()
        self._cells: dict[Sequence, list[int]] = {}
        self._step: Step | None = None
        self._shares: list[Share] = []
        self._names = 0
        totals: dict[str, dict[str, int]] = {pool.tier: pool.states() for pool in self.pools}
        self.replay.feed(Transition(op="open", totals=totals))

    @property
    def is_running(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    @property
    def _may_have_holes(self) -> bool:
        """Public pages belong to nobody, so quotas may give them up before what hangs on them."""
        return self.shape.eviction == "quota" and self.shape.public_tokens > 0

    def submit(
        self, family: int, shared_tokens: int, tail: Sequences[int], outputs: int, salt: int
    ) -> None:
        """Ask for an answer to a prompt; prompts of one family begin alike."""
        if len(self.live) >= MOST_LIVE:
            return
        packed = pack_tokens([*self._family(family, shared_tokens), *tail])
        place = self.scopes.place(packed, SALTS[salt])
        table = self.cache.open_table(packed, place, SALTS[salt], self._name("r"))
        wanted_tokens = table.total_tokens + outputs
        most_pages = self.scheduler.most_pages(place.tenant)
        fits = wanted_tokens <= MOST_TOKENS
        fits = fits and self.cache.pages_for(wanted_tokens - 1) <= most_pages
        try:
            sequence = self.scheduler.submit(table, outputs, has_peer=shared_tokens % 3 == 0)
        except NeverFitsError:
            assert not fits
            self.done["refused"] += 1
        else:
            assert fits
            self._follow(sequence)

    def fork(self, which: int, outputs: int) -> None:
        """Ask for one more answer to the prompt of a live sequence."""
        if not self.live or len(self.live) >= MOST_LIVE:
            return
        parent = self.live[which % len(self.live)]
        packed = bytes(parent.table.packed[: 4 * parent.prompt_tokens])
        table = self.cache.open_table(
            packed, parent.table.place, parent.table.salt, self._name("f")
        )
        try:
            sequence = self.scheduler.submit(table, outputs, parent=parent)
        except NeverFitsError:
            return
        self.done["forks"] += sequence.phase is Phase.FORKING
        self._follow(sequence)

    def schedule(self) -> None:
        """Compose a step, unless one is under way or there is nothing to do."""
        if self._step is not None or not self.scheduler.has_work:
            return
        step = self.scheduler.schedule(self.now_s)
        if not step.works:
            assert self.scheduler.is_fetching or self.readers, "work that never proceeds"
            self.done["empty steps"] += 1
            return
        planned = sum(work.new_tokens for work in step.works)
        assert planned <= self.shape.step_tokens
        assert len({id(work.sequence) for work in step.works}) == len(step.works)
        assert self.scheduler.running_sequences <= self.shape.sequences
        self._step = step
        self._shares = [
            Share(
                self._cells[work.sequence],
                tuple(work.sequence.table.pages),
                work.context_tokens,
                work.context_tokens + work.new_tokens,
            )
            for work in step.works
        ]
        self.memory.learn(step, [share.cells for share in self._shares])
        self._expect_no_aliases()
        moves = step.moves
        for what, count in (
            ("demotions", len(moves.demotions)),
            ("arrivals", len(moves.arrivals)),
            ("copies", len(moves.copies)),
        ):
            self.done[what] += count

    def complete(self, token: int) -> None:
        """Let the step under way run to its end."""
        if self._step is None:
            return
        step, self._step = self._step, None
        self.memory.run(step.moves, self._shares)
        for sequence in self.scheduler.complete(step):
            self._append(sequence, token)
            if sequence.output_tokens == sequence.max_output_tokens:
                self._end(sequence, "done")
        self._files.waiting.extend(step.moves.demotions)
        self.done["steps"] += 1
        self.check_content()

    def fail(self, cut: int) -> None:
        """Let the step under way break: who took part ends, nobody else notices."""
        if self._step is None:
            return
        step, self._step = self._step, None
        self.memory.tear(step.moves, self._shares, cut)
        for sequence in self.scheduler.fail(step):
            self._end(sequence, "failed")
        self.done["failures"] += 1
        self.check_content()

    def abort(self, which: int) -> None:
        """End a live sequence, whatever it does at the moment; twice changes nothing."""
        if self.live:
            sequence = self.live[which % len(self.live)]
            self.done[f"abort {sequence.phase.name}"] += 1
            self._end(sequence, "cancelled")
            self.scheduler.end(sequence)

    def arrive(self, which: int, cut: int, *, is_bad: bool) -> None:
        """Bring what a sequence waits for: all of it, or only the first ``cut`` pages."""
        fetching = [each for each in self.live if each.phase is Phase.FETCHING]
        if not fetching:
            return
        sequence = fetching[which % len(fetching)]
        contents: list[object] = []
        for index, each in enumerate(sequence.table.incoming):
            content: object = None
            if each.source == "disk":
                content = self._files.read(each.key, is_bad=is_bad and index == cut)
            elif each.source == "peer" and index < cut:
                content = self.memory.truth.get(each.key)
            contents.append(content)
        reused_tokens = self.scheduler.fetched(sequence, contents)  # type: ignore[arg-type]
        assert reused_tokens < sequence.table.total_tokens
        self.done["fetches"] += 1

    def begin_write(self) -> None:
        """Start to bring a demoted page to disk."""
        self._files.begin_write()

    def end_write(self, *, is_good: bool) -> None:
        """End the write under way."""
        self.done["files"] += self._files.end_write(is_good=is_good)

    def pin(self, which: int, ttl_s: float) -> None:
        """Protect the prefix of a live sequence."""
        if self.live:
            table = self.live[which % len(self.live)].table
            self.done["pins"] += self.cache.pin(table, self.now_s + ttl_s)

    def unpin(self, which: int) -> None:
        """Protect it no more."""
        if self.live:
            self.cache.unpin(self.live[which % len(self.live)].table)

    def wait(self, seconds: float) -> None:
        """Let time pass; pins end."""
        self.now_s += seconds
        self.cache.pool.expire_pins(self.now_s)

    def begin_read(self, which: int) -> None:
        """Hold the cached pages of a prefix, as a transfer to another worker does."""
        if self.live and len(self.readers) < 2:
            chain = self.live[which % len(self.live)].table.chain
            pages = self.cache.tree.match(chain, len(chain))
            if pages:
                name = self._name("t")
                self.cache.pool.share(pages, name)
                self.readers.append((name, pages))

    def end_read(self) -> None:
        """Let such pages go."""
        if self.readers:
            name, pages = self.readers.pop()
            self.cache.pool.release(pages[::-1], name, "read")
            self._note(Transition(op="end", request=name, why="done"))

    def reset(self) -> None:
        """Forget all content of all tiers."""
        self.cache.reset()
        self._files.clear()
        assert all(pool.cached_pages == 0 for pool in self.pools)

    def run_to_the_end(self, token: int) -> None:
        """Finish everything: with nobody in the way, there is always a next step."""
        while self.readers:
            self.end_read()
        for turn in range(5000):
            self.complete(token)
            if not self.live:
                break
            if turn % 3 == 0 or not self.scheduler.has_work:
                self.arrive(turn, turn % 4, is_bad=False)
            self.schedule()
        assert not self.live, "a request that never ends"
        while self._files.has_writes:
            self.begin_write()
            self.end_write(is_good=True)
        assert all(pool.held_pages == 0 for pool in self.pools)
        self.done["runs to the end"] += 1

    def check(self) -> None:
        """Check what holds at every moment."""
        for pool in self.pools:
            pool.audit()
        references: Counter[PageId] = Counter()
        for _, pages in self.readers:
            references.update(pages)
        for sequence in self.live:
            self._check_sequence(sequence)
            references.update(sequence.table.pages)
        assert len(references) == self.cache.pool.held_pages
        assert all(self.cache.pool.references(page) == n for page, n in references.items())
        self.events.check()

    def check_content(self) -> None:
        """Check what every sequence and every key would read, between two steps."""
        self.memory.expect_indexed(self.cache)
        for sequence in self.live:
            if sequence.phase is Phase.RUNNING and not sequence.table.arrivals:
                tokens = sequence.computed_tokens
                self.memory.expect(self._cells[sequence], sequence.table.pages, tokens)
        tenants: dict[str, dict[str, dict[str, int]]] = {
            pool.tier: pool.tenants() for pool in self.pools
        }
        totals: dict[str, dict[str, int]] = {pool.tier: pool.states() for pool in self.pools}
        self.replay.feed(Transition(op="count", totals=totals, tenants=tenants))

    def _check_sequence(self, sequence: Sequence) -> None:
        pages = sequence.table.pages
        assert len(set(pages)) == len(pages)
        assert (sequence.phase in (Phase.RUNNING, Phase.FETCHING)) == bool(pages)
        assert len(pages) >= self.cache.pages_for(sequence.computed_tokens)
        assert len(pages) <= self.cache.pages_for(sequence.table.total_tokens), "waste"
        assert sequence.computed_tokens < sequence.table.total_tokens
        cached_tokens = sequence.cached_tokens
        assert cached_tokens is None or 0 <= cached_tokens < sequence.prompt_tokens

    def _expect_no_aliases(self) -> None:
        seen: set[PageId] = set()
        for share in self._shares:
            written = share.written(self.shape.page_tokens)
            assert not written & seen, "two sequences write one page"
            seen |= written

    def _follow(self, sequence: Sequence) -> None:
        self.live.append(sequence)
        cells: list[int] = []
        self._cells[sequence] = cells
        packed = sequence.table.packed
        for start in range(0, len(packed), 4):
            token = int.from_bytes(packed[start : start + 4], "little")
            cells.append(next_cell(cells, token, self._scope(sequence, len(cells))))

    def _append(self, sequence: Sequence, token: int) -> None:
        self.scheduler.append(sequence, token)
        cells = self._cells[sequence]
        cells.append(next_cell(cells, token, self._scope(sequence, len(cells))))

    def _scope(self, sequence: Sequence, position: int) -> int:
        """Return whose KV it is: everybody's (0), or that of one salt."""
        table = sequence.table
        if position < table.place.public_pages * self.shape.page_tokens:
            return 0
        return SALTS.index(table.salt)

    def _end(self, sequence: Sequence, why: str) -> None:
        self.scheduler.end(sequence, why)
        self.live.remove(sequence)
        del self._cells[sequence]
        assert not sequence.table.pages
        self.done["preemptions"] += sequence.preemptions
        self._note(Transition(op="end", request=sequence.table.request, why=why))

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def _note(self, transition: Transition) -> None:
        self.replay.feed(transition)

    def _family(self, family: int, tokens: int) -> list[int]:
        return [100 * (family + 1) + index for index in range(tokens)]

    def _eviction(self) -> Eviction:
        if self.shape.eviction == "lru":
            return LeastRecentlyUsed()
        if self.shape.eviction == "benefit":
            return ByteBenefit(half_life_s=10.0)
        tenants = [self.scopes.place(b"", salt).tenant for salt in SALTS[1:]]
        return TenantQuota(dict(zip(tenants, self.shape.quota_pages, strict=True)))
