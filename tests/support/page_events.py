"""What a reader of the events knows, tier by tier, against what the tiers hold."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sidecar.pagechange import PagesCleared, PagesRemoved, PagesStored
from state.prefix import chain_of, pack_tokens

if TYPE_CHECKING:
    from sidecar.cache import PagedCache
    from sidecar.journal import TierName
    from state.model import BlockId


class EventReader:
    """Follows one cache's changes. ``is_gapless``: no parent may leave before its children."""

    def __init__(self, cache: PagedCache, *, is_gapless: bool) -> None:
        self._cache = cache
        self._is_gapless = is_gapless
        self._known: dict[TierName, Counter[BlockId]] = {}
        self._parents: dict[BlockId, BlockId | None] = {}

    def check(self) -> None:
        """Read what is new and compare."""
        for change in self._cache.drain_changes():
            match change:
                case PagesStored():
                    self._store(change)
                case PagesRemoved(keys=keys, tier=tier):
                    known = self._known.setdefault(tier, Counter())
                    known.subtract(keys)
                    assert all(known[key] >= 0 for key in keys), "removed before it was stored"
                case PagesCleared():
                    self._known.clear()
        content = self._cache.tree.copies()
        assert +self._known.get("device", Counter()) == content
        if self._is_gapless:
            for key in content:
                parent = self._parents[key]
                assert parent is None or parent in content, "a prefix has a hole"
        if self._cache.exchange is not None:
            tiers = self._cache.exchange.tiers
            for lower in (tiers.host, tiers.disk):
                if lower is not None:
                    told = set(+self._known.get(lower.name, Counter()))
                    assert told == set(lower._facts), f"{lower.name} has other pages than told"

    def _store(self, change: PagesStored) -> None:
        """Keys follow from parent and tokens alone, so that a reader can follow the chain."""
        self._known.setdefault(change.tier, Counter()).update(change.keys)
        if change.parent is not None and change.salt is None:
            packed = pack_tokens(change.token_ids)
            chain = chain_of(change.parent, packed, self._cache.page_tokens, 0)
            assert change.keys == chain
        above = change.parent
        for key in change.keys:
            self._parents[key] = above
            above = key
