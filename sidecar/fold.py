"""Folding: from pages as an engine reports them to the prefix blocks that routers look up.

An engine names pages by opaque handles and tells which were stored after which parent, and which
copies it removed. The folder keeps these pages as trees, one forest per *space*: an adapter and a
scope, told at the start of a prompt and inherited through the parent. A scope that begins behind
unsalted pages, at the start of a block, is the private tail of a public prefix: a space of its own
under ``state.prefix.tail_root``. An index block is a run of
``block_tokens / page_tokens`` pages; its id follows from the tokens on the path (``state.prefix``),
and it is resident in a tier while every one of its pages has a copy there.

Copies are counted, because an engine may compute a page twice and announces each copy's end. Two
corrections keep a count from outliving its page. A run of several pages from the start of a prompt
that are all held already is a *report* of known pages, not a copy: an engine that finds a prefix
computes its last page again at most. And more copies than the pool has pages mean that some were
reports, so every page then counts once.

The folder would rather forget than claim: a handle that stands for pages of two spaces is removed
from both, and pages that depend on more than tokens are followed (their children must not look
like orphans) but never indexed.
"""

from __future__ import annotations

from collections import deque
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from sidecar.change import FoldCounts, ResidentBlocks
from sidecar.event import ClearedPages, RemovedPages, StoredPages
from sidecar.ghost import Ghosts
from sidecar.orphan import OrphanStores
from sidecar.page_tree import Page, begins_tail, detached, parent_block, space_of
from state.model import Tier
from state.prefix import TOKEN_BYTES, next_block
from state.secret import ChainKeys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sidecar.change import Fold
    from sidecar.event import KvEvent
    from sidecar.page_tree import Space, SpaceName
    from state.model import BlockId, ModelIdentity, NamespaceId

_TIERS: Final = (Tier.GPU, Tier.HOST, Tier.DISK)
_INDEX_OF_TIER: Final = {tier: index for index, tier in enumerate(_TIERS)}
_GPU: Final = 0
_DEFAULT_MAX_PAGES: Final = 1 << 20
_MAX_ORPHAN_PAGES: Final = 1 << 16
NO_KEYS: Final[Mapping[str, str]] = {}


class PageSizeError(Exception):
    """The engine stores pages of another size than the folder was made for."""

    def __init__(self, page_tokens: int) -> None:
        super().__init__(f"the engine stores pages of {page_tokens} tokens")
        self.page_tokens = page_tokens


class PageFolder:
    """The pages of one engine under one identity. Pure: no clock, no I/O, single-threaded."""

    def __init__(
        self,
        identity: ModelIdentity,
        page_tokens: int,
        *,
        keys: ChainKeys | None = None,
        capacity_pages: int | None = None,
        adapter_keys: Mapping[str, str] = NO_KEYS,
        max_orphan_pages: int = _MAX_ORPHAN_PAGES,
    ) -> None:
        if page_tokens < 1 or identity.block_tokens % page_tokens:
            message = f"blocks of {identity.block_tokens} tokens, pages of {page_tokens}"
            raise ValueError(message)
        self.identity = identity
        self.page_tokens = page_tokens
        self.counts = FoldCounts()
        self.orphans = OrphanStores(max_orphan_pages)
        self._keys = keys or ChainKeys()
        self._adapter_keys = adapter_keys
        self._pages_per_block = identity.block_tokens // page_tokens
        self._max_pages = (
            capacity_pages or _DEFAULT_MAX_PAGES,
            _DEFAULT_MAX_PAGES,
            _DEFAULT_MAX_PAGES,
        )
        self.group: int | None = None
        """The KV group that is followed, once one was named."""
        self._has_stored = False
        self._pages: dict[int, list[Page]] = {}
        self._spaces: dict[SpaceName, Space] = {}
        self._held: tuple[dict[Page, None], ...] = tuple({} for _ in _TIERS)
        self._gpu_copies = 0
        self._multiple: set[Page] = set()
        self._resident = ResidentBlocks()
        self._ghosts = Ghosts()

    def apply(self, events: Iterable[KvEvent]) -> Fold:
        """Follow ``events`` in order and return their net effect.

        Raises PageSizeError, after which the folder is of no use any more.
        """
        self._resident.mark()
        for event in events:
            if isinstance(event, StoredPages):
                self._store(event)
            elif isinstance(event, RemovedPages):
                self._remove(event)
            elif isinstance(event, ClearedPages):
                self._clear()
        self._trim()
        return self._resident.net()

    def resident(self) -> Mapping[tuple[NamespaceId, Tier], set[BlockId]]:
        """Return every resident block, to announce them all."""
        return self._resident.blocks()

    def drop_adapter(self, adapter: str) -> Fold:
        """Index nothing more of what is stored under ``adapter`` now: it has other weights."""
        self._resident.mark()
        for key in [key for key in self._spaces if key[0] == adapter]:
            space = self._spaces.pop(key)
            for tier, block in detached(space, chain.from_iterable(self._pages.values()), _TIERS):
                self._resident.discard(space.namespace, tier, block)
        return self._resident.net()

    def held_pages(self) -> int:
        """Return the number of distinct pages with a copy in GPU memory."""
        return len(self._held[_GPU])

    def pages_by_salt(self) -> tuple[int, int]:
        """Return how many known pages are of prompts without and with a cache salt."""
        plain = sum(space.pages for space in self._spaces.values() if not space.scope)
        return plain, sum(space.pages for space in self._spaces.values()) - plain

    def known_pages(self) -> int:
        """Return the number of pages in memory: held in any tier, or an ancestor of such a page."""
        return sum(len(pages) for pages in self._pages.values())

    def _store(self, event: StoredPages) -> None:
        if not event.is_prefix_group or not self._is_followed(event.group):
            self.counts.other_group_events += 1
            return
        if event.tier is None:
            self.counts.unknown_tier_events += 1
            return
        if event.group is not None:
            self.group = event.group
        if not event.handles:
            return
        if not event.packed_tokens:
            self._store_known(event.handles, _INDEX_OF_TIER[event.tier])
            return
        if not self._is_expected_size(event):
            return
        waiting = deque([event])
        while waiting:
            store = waiting.popleft()
            for page in self._attach(store):
                if self.orphans:
                    waiting.extend(self.orphans.take(page.handle))

    def _is_followed(self, group: int | None) -> bool:
        """One group with whole prefixes stands for all groups of a hybrid model."""
        return group is None or self.group is None or group == self.group

    def _is_expected_size(self, event: StoredPages) -> bool:
        if event.page_tokens == self.page_tokens:
            self._has_stored = True
            return True
        is_short = len(event.handles) == 1 and event.page_tokens < self.page_tokens
        if not (is_short and self._has_stored):
            raise PageSizeError(event.page_tokens)
        self.counts.short_pages += 1
        return False

    def _store_known(self, handles: tuple[int, ...], tier: int) -> None:
        """Add a copy of pages that the engine does not describe again (offloading)."""
        for handle in handles:
            pages = self._pages.get(handle, ())
            if len(pages) == 1:
                self._add_copy(pages[0], tier)
            else:
                self.counts.unknown_pages += 1

    def _attach(self, event: StoredPages) -> list[Page]:
        """Add the copies of one run; returns its pages, none when the parent is unknown."""
        if event.tier is None:
            return []
        parent: Page | None = None
        space: Space | None = None
        if event.parent is None:
            if event.opaque_from != 0:
                space = self._space(event.adapter, event.scope or "")
        else:
            candidates = self._pages.get(event.parent)
            if candidates is None:
                self.orphans.add(event)
                return []
            parent = self._choose_parent(candidates, event)
            space = parent.space if parent else None
            if parent is not None and begins_tail(parent, event.scope):
                space = self._space(event.adapter, event.scope or "", parent.block)
        tier = _INDEX_OF_TIER[event.tier]
        pages = self._run(event, parent, space)
        if event.parent is None and len(pages) > 1 and all(page.copies[tier] for page in pages):
            self.counts.reports += 1
            return pages
        for page in pages:
            self._add_copy(page, tier)
        return pages

    def _choose_parent(self, candidates: list[Page], event: StoredPages) -> Page | None:
        """Return the page that ``event`` continues; None when that is not certain."""
        if len(candidates) == 1 and candidates[0].space is None:
            return candidates[0]
        fitting = [
            page
            for page in candidates
            if page.space is not None
            and page.space.adapter == event.adapter
            and (event.scope in {None, page.space.scope} or begins_tail(page, event.scope))
        ]
        if len(fitting) == 1 and all(page.space is not None for page in candidates):
            return fitting[0]
        self.counts.ambiguous_events += 1
        return None

    def _run(self, event: StoredPages, parent: Page | None, space: Space | None) -> list[Page]:
        page_bytes = self.page_tokens * TOKEN_BYTES
        pages = []
        for index, handle in enumerate(event.handles):
            if index == event.opaque_from:
                space = None
            page = self._find(handle, space)
            if page is not None and space is not None and page.parent is not parent:
                self.counts.ambiguous_events += 1
                space = None
                page = self._find(handle, None)
            if page is None:
                start = index * page_bytes
                packed = event.packed_tokens[start : start + page_bytes]
                page = self._create(handle, space, parent, packed)
            pages.append(page)
            parent = page
        return pages

    def _find(self, handle: int, space: Space | None) -> Page | None:
        for page in self._pages.get(handle, ()):
            if page.space is space:
                return page
        return None

    def _create(self, handle: int, space: Space | None, parent: Page | None, packed: bytes) -> Page:
        slot = (parent.slot + 1) % self._pages_per_block if parent is not None else 0
        page = Page(handle, space, parent, slot, packed if space is not None else b"")
        self._pages.setdefault(handle, []).append(page)
        if parent is not None:
            if parent.children is None:
                parent.children = set()
            parent.children.add(page)
        if space is None:
            self.counts.opaque_pages += 1
            return page
        space.pages += 1
        if slot == self._pages_per_block - 1:
            path = list(self._block_path(page))
            root = parent_block(path[-1].parent, space)
            packed_block = b"".join(member.packed for member in reversed(path))
            page.block = next_block(root, packed_block, space.key)
            page.packed = b""
        return page

    def _block_path(self, last: Page) -> Iterator[Page]:
        """Yield the pages of the block that ends with ``last``, last first."""
        page: Page | None = last
        for _ in range(self._pages_per_block):
            if page is None:
                return
            yield page
            page = page.parent

    def _space(self, adapter: str, scope: str, after: BlockId | None = None) -> Space:
        space = self._spaces.get((adapter, scope, after))
        if space is None:
            own = self._adapter_keys.get(adapter)
            space = space_of(self.identity, adapter, scope, self._keys, own, after)
            self._spaces[space.name] = space
        return space

    def _remove(self, event: RemovedPages) -> None:
        if not self._is_followed(event.group):
            self.counts.other_group_events += 1
            return
        if event.tier is None:
            self.counts.unknown_tier_events += 1
            return
        tier = _INDEX_OF_TIER[event.tier]
        for handle in event.handles:
            if self.orphans:
                self.orphans.cut(handle, event.tier)
            holders = [page for page in self._pages.get(handle, ()) if page.copies[tier]]
            if not holders:
                self.counts.unknown_pages += 1
            for page in holders:
                self._drop_copies(page, tier, 1)
            if tier == _GPU and holders:
                self.counts.removed_pages += len(holders)
                if not any(any(page.copies) for page in holders):
                    self._ghosts.leave(handle)

    def _add_copy(self, page: Page, tier: int) -> None:
        copies = page.copies[tier]
        if copies and tier != _GPU:
            return  # offloaded pages are keyed by their hash: there is one copy
        if tier == _GPU:
            self.counts.stored_pages += 1
            if not any(page.copies) and self._ghosts.is_back(page.handle):
                self.counts.returned_pages += 1
        page.copies[tier] = copies + 1
        if tier == _GPU:
            self._gpu_copies += 1
            if copies:
                self._multiple.add(page)
        if not copies:
            self._held[tier][page] = None
            self._recount(page, tier)

    def _drop_copies(self, page: Page, tier: int, copies: int) -> None:
        page.copies[tier] -= copies
        if tier == _GPU:
            self._gpu_copies -= copies
            if page.copies[tier] <= 1:
                self._multiple.discard(page)
        if not page.copies[tier]:
            del self._held[tier][page]
            self._recount(page, tier)
            self._prune(page)

    def _recount(self, page: Page, tier: int) -> None:
        """Bring the residency of every block through ``page`` up to date."""
        if page.space is None:
            return
        stack = [page]
        while stack:
            member = stack.pop()
            if member.block is None:
                stack += [child for child in member.children or () if child.space is page.space]
                continue
            is_resident = all(part.copies[tier] for part in self._block_path(member))
            if is_resident == bool(member.counted_tiers & (1 << tier)):
                continue
            member.counted_tiers ^= 1 << tier
            count = self._resident.add if is_resident else self._resident.discard
            count(page.space.namespace, _TIERS[tier], member.block)

    def _prune(self, page: Page) -> None:
        """Forget ``page`` and those of its ancestors that nothing needs any more."""
        current: Page | None = page
        while current is not None and not current.children and not any(current.copies):
            twins = self._pages[current.handle]
            twins.remove(current)
            if not twins:
                del self._pages[current.handle]
            space = current.space
            if space is not None:
                space.pages -= 1
                if not space.pages:
                    del self._spaces[space.name]
            parent = current.parent
            if parent is not None and parent.children is not None:
                parent.children.discard(current)
            current = parent

    def _clear(self) -> None:
        self._pages.clear()
        self._spaces.clear()
        for held in self._held:
            held.clear()
        self._gpu_copies = 0
        self._multiple.clear()
        self._resident.clear()
        self._ghosts.clear()
        self.orphans.clear()

    def _trim(self) -> None:
        """Hold no more than the engine can: first one copy a page, then without the oldest."""
        if self._gpu_copies > self._max_pages[_GPU]:
            self.counts.overflows += 1
            for page in list(self._multiple):
                self._drop_copies(page, _GPU, page.copies[_GPU] - 1)
        for tier, held in enumerate(self._held):
            excess = len(held) - self._max_pages[tier]
            if excess > 0:
                self.counts.overflows += 1
                for page in list(islice(held, excess + self._max_pages[tier] // 64)):
                    self._drop_copies(page, tier, page.copies[tier])
