"""The prefix tree: which page holds which prefix.

A page's key is a chained hash (``state.prefix``): it covers the page's own tokens, its parent's key
and, through the root, everything else that decides whether KV may be shared. Equal keys therefore
mean equal prefixes, and the tree needs no links: walking down is looking up the next key.

Two sequences may compute the same page. Both copies are kept, as in vLLM: a block table cannot
change under a running sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from sidecar.pool import PoolError
from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sidecar.pool import PageId


class PageFacts(Struct, frozen=True):
    """What is behind a key: enough to announce the page again when it moves to another tier.

    ``parent`` is None on the first page of a prompt. ``salt`` is set on the page where the salted
    part of a prompt starts. ``depth`` counts the pages before it.
    """

    parent: BlockId | None
    packed_tokens: bytes
    depth: int
    tenant: str = ""
    salt: str | None = None


class PrefixTree:
    """Full pages by key, every physical copy of them."""

    def __init__(self) -> None:
        self._copies: dict[BlockId, list[PageId]] = {}
        self._keys: dict[PageId, BlockId] = {}
        self._facts: dict[BlockId, PageFacts] = {}

    def match(self, chain: Sequence[BlockId], limit_pages: int) -> list[PageId]:
        """Return pages for the longest indexed prefix of ``chain``, ``limit_pages`` at most."""
        pages = []
        for key in chain[:limit_pages]:
            copies = self._copies.get(key)
            if copies is None:
                break
            pages.append(copies[0])
        return pages

    def insert(self, page: PageId, key: BlockId, facts: PageFacts) -> None:
        """Index ``page`` under ``key``; raises PoolError when the page has a key already."""
        if page in self._keys:
            message = f"page {page} is already indexed"
            raise PoolError(message)
        self._keys[page] = key
        copies = self._copies.get(key)
        if copies is None:
            self._copies[key] = [page]
            self._facts[key] = facts
        else:
            copies.append(page)

    def key(self, page: PageId) -> BlockId | None:
        """Return the key of ``page``, None when it has none."""
        return self._keys.get(page)

    def facts(self, key: BlockId) -> PageFacts | None:
        """Return what is behind ``key``, None when no page has it."""
        return self._facts.get(key)

    def remove(self, page: PageId) -> tuple[BlockId, PageFacts, int]:
        """Forget ``page``; return the key and facts that it had and how many copies are left."""
        key = self._keys.pop(page)
        copies = self._copies[key]
        if len(copies) == 1:
            del self._copies[key]
            return key, self._facts.pop(key), 0
        copies.remove(page)
        return key, self._facts[key], len(copies)

    def clear(self) -> None:
        """Forget everything."""
        self._copies.clear()
        self._keys.clear()
        self._facts.clear()

    def copies(self) -> Mapping[BlockId, int]:
        """Return how many physical copies each key has. Costs O(pages): for tests."""
        return {key: len(pages) for key, pages in self._copies.items()}
