"""The paged KV cache: pool and prefix tree together, and the record of what changed.

A sequence gets pages for its whole prompt at once and more as it decodes. A page is indexed in the
step that fills it, at the moment that step is composed: a step runs as a whole, so sequences of the
same step already share it. Pages are released last page first, so that the LRU gives up children
before their parents and the tree never holds a prefix with a hole.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct

from sidecar.pool import PagePool
from sidecar.tree import PrefixTree
from state.model import BlockId
from state.prefix import TOKEN_BYTES, chain_of, next_block

if TYPE_CHECKING:
    from sidecar.pool import PageId


class PagesStored(Struct, frozen=True, tag=True):
    """A run of consecutive pages got content; ``parent`` is None where the run starts a prompt.

    ``token_ids`` covers all pages of the run. ``salt`` is set where a salted prompt starts.
    """

    keys: tuple[BlockId, ...]
    parent: BlockId | None
    token_ids: list[int]
    salt: str | None = None


class PagesRemoved(Struct, frozen=True, tag=True):
    """One physical copy of each of ``keys`` is gone."""

    keys: tuple[BlockId, ...]


class PagesCleared(Struct, frozen=True, tag=True):
    """All content is gone."""


PageChange = PagesStored | PagesRemoved | PagesCleared


@dataclass(slots=True)
class BlockTable:
    """A sequence's tokens and the pages that hold their KV.

    ``packed`` is u32 little-endian (``state.prefix.pack_tokens``). ``chain`` has the keys of the
    leading full pages; it grows with the tokens. ``epoch`` names the cache content it belongs to.
    """

    packed: bytearray
    root: BlockId
    salt: str | None = None
    chain: list[BlockId] = field(default_factory=list)
    pages: list[PageId] = field(default_factory=list)
    indexed_pages: int = 0
    epoch: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.packed) // TOKEN_BYTES


class PagedCache:
    """Gives pages to sequences, reuses those with equal prefixes, and records every change."""

    def __init__(self, total_pages: int, page_tokens: int, hash_seed: int = 0) -> None:
        if page_tokens < 1:
            message = f"page_tokens: expected at least 1, got {page_tokens}"
            raise ValueError(message)
        self.pool = PagePool(total_pages)
        self.tree = PrefixTree()
        self.page_tokens = page_tokens
        self.hash_seed = hash_seed
        self._epoch = 0
        self._changes: list[PageChange] = []

    def pages_for(self, tokens: int) -> int:
        """Return the pages that hold ``tokens``, the last one perhaps in part."""
        return -(-tokens // self.page_tokens)

    def open_table(self, packed: bytes, root: BlockId, salt: str | None = None) -> BlockTable:
        """Return a table without pages for the prompt ``packed``."""
        chain = chain_of(root, packed, self.page_tokens, self.hash_seed)
        return BlockTable(packed=bytearray(packed), root=root, salt=salt, chain=list(chain))

    def acquire(self, table: BlockTable) -> int | None:
        """Give ``table`` pages for all its tokens; return the tokens whose KV is reused.

        None, and no change, when the pages do not suffice. The last token is always computed.
        """
        self._extend_chain(table, table.total_tokens // self.page_tokens)
        shared = self.tree.match(table.chain, (table.total_tokens - 1) // self.page_tokens)
        wanted_pages = self.pages_for(table.total_tokens) - len(shared)
        if wanted_pages > self.pool.available_pages - self.pool.count_cached(shared):
            return None
        self.pool.share(shared)
        table.pages = shared
        table.indexed_pages = len(shared)
        table.epoch = self._epoch
        self._take(table, wanted_pages)
        return table.indexed_pages * self.page_tokens

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Make room for ``tokens`` in ``table``; False, and no change, when there is none."""
        wanted_pages = self.pages_for(tokens) - len(table.pages)
        if wanted_pages > self.pool.available_pages:
            return False
        if wanted_pages > 0:
            self._take(table, wanted_pages)
        return True

    def index(self, table: BlockTable, computed_tokens: int) -> None:
        """Index the pages that are full once ``computed_tokens`` are computed.

        After a reset a running sequence indexes nothing more: its parents are unknown.
        """
        first, end = table.indexed_pages, computed_tokens // self.page_tokens
        if end <= first or table.epoch != self._epoch:
            return
        self._extend_chain(table, end)
        keys = tuple(table.chain[first:end])
        for page, key in zip(table.pages[first:end], keys, strict=True):
            self.tree.insert(page, key)
            self.pool.mark_reusable(page)
        table.indexed_pages = end
        parent = table.chain[first - 1] if first else None
        token_ids = self._token_ids(table, first, end)
        self._changes.append(PagesStored(keys, parent, token_ids, None if first else table.salt))

    def release(self, table: BlockTable) -> None:
        """Take all pages of ``table`` back."""
        pages, table.pages = table.pages, []
        table.indexed_pages = 0
        self.pool.release(reversed(pages))

    def reset(self) -> None:
        """Forget all content; running sequences keep their pages until they end."""
        self._epoch += 1
        self.tree.clear()
        self.pool.forget_content()
        self._changes.append(PagesCleared())

    def drain_changes(self) -> list[PageChange]:
        """Return the changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def _take(self, table: BlockTable, wanted_pages: int) -> None:
        taken = self.pool.take(wanted_pages)
        table.pages += taken.pages
        if taken.evicted:
            keys = tuple(self.tree.remove(page) for page in taken.evicted)
            self._changes.append(PagesRemoved(keys))

    def _extend_chain(self, table: BlockTable, pages: int) -> None:
        page_bytes = self.page_tokens * TOKEN_BYTES
        for page in range(len(table.chain), pages):
            parent = table.chain[-1] if table.chain else table.root
            block = bytes(table.packed[page * page_bytes : (page + 1) * page_bytes])
            table.chain.append(next_block(parent, block, self.hash_seed))

    def _token_ids(self, table: BlockTable, first_page: int, end_page: int) -> list[int]:
        page_bytes = self.page_tokens * TOKEN_BYTES
        return unpack_tokens(table.packed[first_page * page_bytes : end_page * page_bytes])


def unpack_tokens(packed: bytes | bytearray) -> list[int]:
    """Return the token ids of ``packed``: the inverse of ``state.prefix.pack_tokens``."""
    values = array("I")
    values.frombytes(packed)
    if sys.byteorder == "big":  # pragma: no cover - exercised on big-endian machines only
        values.byteswap()
    return values.tolist()
