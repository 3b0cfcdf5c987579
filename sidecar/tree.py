"""The prefix tree: which page holds which prefix.

A page's key is a chained hash (``state.prefix``): it covers the page's own tokens, its parent's key
and, through the root, everything else that decides whether KV may be shared. Equal keys therefore
mean equal prefixes, and the tree needs no links: walking down is looking up the next key.

Two sequences may compute the same page. Both copies are kept, as in vLLM: a block table cannot
change under a running sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.pool import PoolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sidecar.pool import PageId
    from state.model import BlockId


class PrefixTree:
    """Full pages by key, every physical copy of them."""

    def __init__(self) -> None:
        self._copies: dict[BlockId, list[PageId]] = {}
        self._keys: dict[PageId, BlockId] = {}

    def match(self, chain: Sequence[BlockId], limit_pages: int) -> list[PageId]:
        """Return pages for the longest indexed prefix of ``chain``, ``limit_pages`` at most."""
        pages = []
        for key in chain[:limit_pages]:
            copies = self._copies.get(key)
            if copies is None:
                break
            pages.append(copies[0])
        return pages

    def insert(self, page: PageId, key: BlockId) -> None:
        """Index ``page`` under ``key``; raises PoolError when the page has a key already."""
        if page in self._keys:
            message = f"page {page} is already indexed"
            raise PoolError(message)
        self._keys[page] = key
        copies = self._copies.get(key)
        if copies is None:
            self._copies[key] = [page]
        else:
            copies.append(page)

    def remove(self, page: PageId) -> BlockId:
        """Forget ``page`` and return the key that it had."""
        key = self._keys.pop(page)
        copies = self._copies[key]
        if len(copies) == 1:
            del self._copies[key]
        else:
            copies.remove(page)
        return key

    def clear(self) -> None:
        """Forget everything."""
        self._copies.clear()
        self._keys.clear()

    def copies(self) -> Mapping[BlockId, int]:
        """Return how many physical copies each key has. Costs O(pages): for tests."""
        return {key: len(pages) for key, pages in self._copies.items()}
