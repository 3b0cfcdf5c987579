"""The paged KV cache: pool, prefix tree and lower tiers together, and the record of what changed.

A sequence gets pages for its whole prompt at once and more as it decodes. A page is indexed in the
step that fills it, at the moment that step is composed: a step runs as a whole, so sequences of the
same step already share it. Pages are released last page first, so that eviction gives up children
before their parents and the tree never holds a prefix with a hole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sidecar.exchange import Exchange
from sidecar.pagechange import PageChange, PagesCleared, PagesRemoved, PagesStored
from sidecar.pool import PagePool
from sidecar.table import Acquired, BlockTable, Moves
from sidecar.tree import PageFacts, PrefixTree
from state.prefix import TOKEN_BYTES, chain_of, next_block, unpack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sidecar.eviction import Eviction
    from sidecar.journal import Operation, Transition
    from sidecar.pool import PageId
    from sidecar.scope import Place
    from sidecar.tiers import Costs, Tiers
    from state.model import BlockId


class PagedCache:
    """Gives pages to sequences, reuses those with equal prefixes, and records every change.

    ``costs`` is what eviction by benefit weighs pages with.
    """

    def __init__(
        self,
        total_pages: int,
        page_tokens: int,
        hash_seed: int = 0,
        *,
        eviction: Eviction | None = None,
        costs: Costs | None = None,
        tiers: Tiers | None = None,
        journal: Callable[[Transition], None] | None = None,
    ) -> None:
        if page_tokens < 1:
            message = f"page_tokens: expected at least 1, got {page_tokens}"
            raise ValueError(message)
        self.pool = PagePool(total_pages, eviction, journal=journal)
        self.tree = PrefixTree()
        self.exchange: Final = None if tiers is None else Exchange(tiers, journal)
        self.page_tokens = page_tokens
        self.hash_seed = hash_seed
        self.now_s = 0.0
        """The time of the step that is composed."""
        self.hits = 0
        """Prompts that found a prefix on the device, ``hit_pages`` of them, worth ``saved_ms``."""
        self.hit_pages = 0
        self.saved_ms = 0.0
        self._costs = costs
        self._reused: set[BlockId] = set()
        self._epoch = 0
        self._changes: list[PageChange] = []
        self._copies: list[tuple[PageId, PageId]] = []

    def pages_for(self, tokens: int) -> int:
        """Return the pages that hold ``tokens``, the last one perhaps in part."""
        return -(-tokens // self.page_tokens)

    def open_table(
        self, packed: bytes, place: Place, salt: str | None = None, request: str | None = None
    ) -> BlockTable:
        """Return a table without pages for the prompt ``packed``."""
        size, seed = self.page_tokens, self.hash_seed
        if place.tail is None:
            chain = chain_of(place.root, packed, size, seed)
        else:
            cut = place.public_pages * size * TOKEN_BYTES
            chain = chain_of(place.root, packed[:cut], size, seed)
            chain += chain_of(place.tail, packed[cut:], size, seed)
        return BlockTable(bytearray(packed), place, salt or None, request, list(chain))

    def open_like(self, other: BlockTable, prompt_tokens: int, request: str) -> BlockTable:
        """Return a table without pages for the prompt of ``other``, which may have grown."""
        chain = other.chain[: prompt_tokens // self.page_tokens]
        packed = other.packed[: prompt_tokens * TOKEN_BYTES]
        return BlockTable(packed, other.place, other.salt, request, chain)

    def acquire(self, table: BlockTable, *, has_peer: bool = False) -> Acquired | None:
        """Give ``table`` pages for all its tokens and say what it need not compute.

        None, and no change, when the pages do not suffice. The last token is always computed.
        """
        self._extend_chain(table, table.total_tokens // self.page_tokens)
        limit_pages = (table.total_tokens - 1) // self.page_tokens
        shared = self.tree.match(table.chain, limit_pages)
        held_pages = len(shared)
        if not self._hold(table, shared, self.pages_for(table.total_tokens) - held_pages):
            return None
        table.pages = shared
        table.indexed_pages = held_pages
        table.epoch = self._epoch
        self._count_hits(shared)
        if self.exchange is not None:
            if self.exchange.tiers.demote_rule == "reused":
                self._reused.update(table.chain[:held_pages])
            self._fetch(self.exchange, table, limit_pages, has_peer=has_peer)
        self._take(table, self.pages_for(table.total_tokens) - len(table.pages), "create")
        if any(each.source != "host" for each in table.incoming):
            return Acquired(held_pages * self.page_tokens, is_pending=True)
        return Acquired(self.arrive(table, [None] * len(table.incoming)))

    def arrive(self, table: BlockTable, contents: Sequence[bytes | None]) -> int:
        """Take what came for ``table`` (see ``Exchange.arrive``); return the tokens now reused."""
        came = 0 if self.exchange is None else self.exchange.arrive(table, contents)
        return (table.indexed_pages + came) * self.page_tokens

    def grow(self, table: BlockTable, tokens: int, computed_tokens: int) -> bool:
        """Make room for ``tokens``, of which ``computed_tokens`` are there already.

        False, and no change, when there is none. A page that is about to be written and that
        another sequence holds as well is copied first.
        """
        wanted_pages = self.pages_for(tokens) - len(table.pages)
        written = computed_tokens // self.page_tokens
        is_shared = written < len(table.pages) and self.pool.references(table.pages[written]) > 1
        if max(0, wanted_pages) + is_shared > self.pool.available_pages(table.place.tenant):
            return False
        if is_shared:
            source = table.pages[written]
            (target,) = self._taken(table, 1, "append", table.place.tenant)
            table.pages[written] = target
            self._copies.append((source, target))
            self.pool.replace(source, target, table.request)
        self._take(table, wanted_pages, "append")
        return True

    def fork(self, parent: BlockTable, child: BlockTable) -> None:
        """Give ``child``, which has the same tokens, all pages of ``parent``."""
        self.pool.share(parent.pages, child.request)
        child.pages = list(parent.pages)
        child.indexed_pages = parent.indexed_pages
        child.epoch = parent.epoch
        child.chain = list(parent.chain)

    def index(self, table: BlockTable, computed_tokens: int) -> list[PageId]:
        """Index the pages that are full once ``computed_tokens`` are computed; return them.

        After a reset a running sequence indexes nothing more: its parents are unknown.
        """
        first, end = table.indexed_pages, computed_tokens // self.page_tokens
        if end <= first or table.epoch != self._epoch:
            return []
        self._extend_chain(table, end)
        pages = table.pages[first:end]
        for index, page in enumerate(pages, start=first):
            self.tree.insert(page, table.chain[index], self._facts(table, index))
        self.pool.index(pages)
        self._note_use(pages, first, are_new=True)
        table.indexed_pages = end
        cut = table.place.public_pages
        if first < cut < end:
            self._changes.append(self._stored(table, first, cut))
            first = cut
        self._changes.append(self._stored(table, first, end))
        return pages

    def fill(self, table: BlockTable, first_token: int, end_token: int) -> None:
        """Note that the pages of these tokens have content now."""
        first, end = first_token // self.page_tokens, self.pages_for(end_token)
        self.pool.fill(table.pages[first:end])

    def release(self, table: BlockTable, why: str | None = None) -> None:
        """Take all pages of ``table`` back."""
        if self.exchange is not None:
            self.exchange.cancel(table)
        pages, table.pages = table.pages, []
        table.indexed_pages = 0
        self.pool.release(reversed(pages), table.request, why)

    def unindex(self, pages: Iterable[PageId]) -> None:
        """Forget the content of ``pages``: the step that should have written it failed."""
        gone = [page for page in pages if self.pool.is_indexed(page)]
        keys = tuple(self.tree.remove(page)[0] for page in gone)
        self._reused.difference_update(keys)
        self.pool.unindex(gone)
        if keys:
            self._changes.append(PagesRemoved(keys))

    def pin(self, table: BlockTable, until_s: float) -> int:
        """Pin the cached full pages of a prompt; return how many there are."""
        pages = self.tree.match(table.chain, len(table.chain))
        self.pool.pin(pages, until_s)
        return len(pages)

    def unpin(self, table: BlockTable) -> int:
        """End the pins of a prompt's pages, but for those below which others are pinned.

        Returns how many pages of the prompt are cached.
        """
        pages = self.tree.match(table.chain, len(table.chain))
        needed = self._above_pinned(except_pages=frozenset(pages))
        self.pool.unpin(
            [each for each in reversed(pages) if self.tree.key(each) not in needed], "asked"
        )
        return len(pages)

    def reset(self) -> None:
        """Forget all content in all tiers; running sequences keep their pages until they end."""
        self._epoch += 1
        self.tree.clear()
        self._reused.clear()
        self.pool.forget_content()
        if self.exchange is not None:
            self.exchange.clear()
        self._changes = [*self.drain_changes(), PagesCleared()]

    def drain_changes(self) -> list[PageChange]:
        """Return the changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes if self.exchange is None else changes + self.exchange.drain_changes()

    def drain_moves(self) -> Moves:
        """Return what the composed step has to copy."""
        moves = Moves() if self.exchange is None else self.exchange.drain_moves()
        moves.copies, self._copies = self._copies, []
        return moves

    def _above_pinned(self, except_pages: frozenset[PageId]) -> set[BlockId]:
        """Return the keys above all pinned pages but ``except_pages``."""
        above: set[BlockId] = set()
        for page in self.pool.pinned():
            key = None if page in except_pages else self.tree.key(page)
            facts = None if key is None else self.tree.facts(key)
            while facts is not None and facts.parent is not None and facts.parent not in above:
                above.add(facts.parent)
                facts = self.tree.facts(facts.parent)
        return above

    def _hold(self, table: BlockTable, shared: Sequence[PageId], wanted_pages: int) -> bool:
        """Take references to ``shared`` if ``wanted_pages`` are available besides them."""
        available_pages = self.pool.available_pages(table.place.tenant)
        if wanted_pages > available_pages:
            return False
        is_sure = wanted_pages <= available_pages - self.pool.count_evictable(shared)
        self.pool.share(shared, table.request)
        if is_sure or wanted_pages <= self.pool.available_pages(table.place.tenant):
            return True
        self.pool.release(shared[::-1], table.request, "refused")
        return False

    def _fetch(
        self, exchange: Exchange, table: BlockTable, limit_pages: int, *, has_peer: bool
    ) -> None:
        """Reserve pages for what is to come up from lower tiers or from a peer."""
        first_page = len(table.pages)
        keys = table.chain[first_page:limit_pages]
        fetch = exchange.tiers.plan(keys, first_page * self.page_tokens, has_peer=has_peer)
        # Leased first: taking pages moves others down, and those could push these out.
        sources = exchange.lease(keys, fetch, table.request or "")
        self._take(table, fetch.pages, "reserve")
        exchange.expect(table, first_page, sources)

    def _take(self, table: BlockTable, wanted_pages: int, how: Operation) -> None:
        """Append pages to ``table``: public ones for everybody, the rest for its tenant."""
        if wanted_pages <= 0:
            return
        public = max(0, min(wanted_pages, table.place.public_pages - len(table.pages)))
        if public > self.pool.available_pages():
            public = 0
        for pages, tenant in ((public, ""), (wanted_pages - public, table.place.tenant)):
            if pages:
                table.pages += self._taken(table, pages, how, tenant)

    def _taken(self, table: BlockTable, pages: int, how: Operation, tenant: str) -> list[PageId]:
        taken = self.pool.take(pages, tenant, holder=table.request, how=how)
        if taken.evicted:
            self._let_go(taken.evicted)
        return taken.pages

    def _let_go(self, evicted: Sequence[PageId]) -> None:
        """Announce that the device lost ``evicted``, and move the last copies down."""
        removed = [(page, *self.tree.remove(page)) for page in evicted]
        self._changes.append(PagesRemoved(tuple(key for _, key, _, _ in removed)))
        if self.exchange is None:
            return
        for page, key, facts, copies in removed:
            if not copies:
                self.exchange.let_go(page, key, facts, was_reused=key in self._reused)
                self._reused.discard(key)
        self._changes += self.exchange.drain_changes()

    def _count_hits(self, shared: Sequence[PageId]) -> None:
        self._note_use(shared, 0, are_new=False)
        self.hits += bool(shared)
        self.hit_pages += len(shared)
        if self._costs is not None and shared:
            self.saved_ms += self._costs.prefill_ms(len(shared) * self.page_tokens, 0)

    def _note_use(self, pages: Sequence[PageId], first_page: int, *, are_new: bool) -> None:
        if self._costs is not None and self.pool.eviction.rule == "benefit":
            size = self.page_tokens
            saved_ms = [
                self._costs.prefill_ms(size, (first_page + index) * size)
                for index in range(len(pages))
            ]
            self.pool.eviction.note_use(pages, saved_ms, self.now_s, are_new=are_new)

    def _extend_chain(self, table: BlockTable, pages: int) -> None:
        for page in range(len(table.chain), pages):
            if page == table.place.public_pages and table.place.tail is not None:
                parent = table.place.tail
            else:
                parent = table.chain[-1] if table.chain else table.place.root
            block = self._page_tokens(table, page, page + 1)
            table.chain.append(next_block(parent, block, self.hash_seed))

    def _facts(self, table: BlockTable, index: int) -> PageFacts:
        is_private = index >= table.place.public_pages and table.salt is not None
        return PageFacts(
            parent=table.chain[index - 1] if index else None,
            packed_tokens=self._page_tokens(table, index, index + 1),
            depth=index,
            tenant=table.place.tenant if is_private else "",
            salt=table.salt if index == table.place.public_pages else None,
        )

    def _stored(self, table: BlockTable, first: int, end: int) -> PagesStored:
        parent = table.chain[first - 1] if first else None
        tokens = unpack_tokens(self._page_tokens(table, first, end))
        salt = table.salt if first == table.place.public_pages else None
        return PagesStored(tuple(table.chain[first:end]), parent, tokens, salt)

    def _page_tokens(self, table: BlockTable, first_page: int, end_page: int) -> bytes:
        page_bytes = self.page_tokens * TOKEN_BYTES
        return bytes(table.packed[first_page * page_bytes : end_page * page_bytes])
