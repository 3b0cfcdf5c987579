"""Stores whose parent page is not known yet: kept, within a bound, until the parent arrives."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from state.prefix import TOKEN_BYTES

if TYPE_CHECKING:
    from sidecar.event import StoredPages
    from state.model import Tier


class OrphanStores:
    """Holds at most ``max_pages`` pages; the oldest store goes first and ``dropped`` counts it."""

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self.pages = 0
        self.dropped = 0
        self._next_key = 0
        self._stores: dict[int, StoredPages] = {}
        self._keys_by_parent: defaultdict[int, list[int]] = defaultdict(list)
        self._keys_by_handle: defaultdict[int, set[int]] = defaultdict(set)

    def __bool__(self) -> bool:
        return bool(self._stores)

    def add(self, store: StoredPages) -> None:
        """Keep ``store``, which names a parent."""
        if store.parent is None or len(store.handles) > self.max_pages:
            self.dropped += 1
            return
        self._insert(store, store.parent)
        while self.pages > self.max_pages:
            self._discard(next(iter(self._stores)))
            self.dropped += 1

    def take(self, parent: int) -> list[StoredPages]:
        """Return and forget the stores that wait for ``parent``, oldest first."""
        keys = self._keys_by_parent.get(parent, ())
        return [self._discard(key) for key in list(keys)]

    def cut(self, handle: int, tier: Tier) -> None:
        """End every waiting run before ``handle``: a copy of it is gone.

        Engines evict children first, so a run that loses a page in its middle is rare; losing its
        tail costs credit, and keeping it could claim a page that is gone.
        """
        for key in list(self._keys_by_handle.get(handle, ())):
            store = self._stores[key]
            if store.tier is not tier or store.parent is None:
                continue
            self._discard(key)
            kept_pages = store.handles.index(handle)
            if kept_pages:
                shorter = msgspec.structs.replace(
                    store,
                    handles=store.handles[:kept_pages],
                    packed_tokens=store.packed_tokens[
                        : kept_pages * store.page_tokens * TOKEN_BYTES
                    ],
                )
                self._insert(shorter, store.parent)

    def clear(self) -> None:
        """Forget all of them."""
        self._stores.clear()
        self._keys_by_parent.clear()
        self._keys_by_handle.clear()
        self.pages = 0

    def _insert(self, store: StoredPages, parent: int) -> None:
        key = self._next_key
        self._next_key += 1
        self._stores[key] = store
        self._keys_by_parent[parent].append(key)
        for handle in store.handles:
            self._keys_by_handle[handle].add(key)
        self.pages += len(store.handles)

    def _discard(self, key: int) -> StoredPages:
        store = self._stores.pop(key)
        if store.parent is not None:
            siblings = self._keys_by_parent[store.parent]
            siblings.remove(key)
            if not siblings:
                del self._keys_by_parent[store.parent]
        for handle in set(store.handles):
            keys = self._keys_by_handle[handle]
            keys.discard(key)
            if not keys:
                del self._keys_by_handle[handle]
        self.pages -= len(store.handles)
        return store
