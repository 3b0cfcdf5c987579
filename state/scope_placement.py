"""Placements kept apart by scope: what one tenant sends displaces nothing that another one sent.

Each scope has a book of its own, so that all of it can go at once when the scope's epoch ends. A
book has its own bound over all replicas; all books together hold no more of a replica than its
cache does, and where they would, the largest gives way, its oldest first.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

from state.placement import DEFAULT_CAPACITY_BLOCKS, Placements, fair_share

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from state.model import BlockId, ReplicaId

SCOPES_PER_TICK: Final = 16
REPLICAS_PER_TICK: Final = 1
"""So many have their turn each time, so that many of them take no longer than few."""
Key = TypeVar("Key")
Value = TypeVar("Value")


class ScopedPlacements:
    """As ``Placements``, for all scopes; ``of`` gives the book of one.

    ``bounds`` are the blocks that a scope may have over all replicas, None for no bound of its own.
    """

    __slots__ = ("_books", "_bounds", "_limits", "_ttl_s")

    def __init__(self, ttl_s: float, bounds: Mapping[str, int | None]) -> None:
        self._ttl_s = ttl_s
        self._bounds = dict(bounds)
        self._books: dict[str, Placements] = {}
        self._limits: dict[ReplicaId, tuple[float, int]] = {}

    def of(self, scope: str) -> Placements:
        """Return the book of ``scope``."""
        book = self._books.get(scope)
        if book is None:
            bound = self._bounds.get(scope)
            most = DEFAULT_CAPACITY_BLOCKS if bound is None else min(bound, DEFAULT_CAPACITY_BLOCKS)
            book = self._books[scope] = Placements(self._ttl_s, most)
            for replica, (ttl_s, capacity_blocks) in self._limits.items():
                book.limit(replica, ttl_s, self._within(scope, capacity_blocks))
        return book

    def end(self, scope: str) -> int:
        """Drop all that was placed for ``scope``; return how many blocks that were."""
        book = self._books.pop(scope, None)
        return 0 if book is None else book.blocks

    def limit(self, replica: ReplicaId, ttl_s: float, capacity_blocks: int) -> None:
        """Give ``replica`` its own time to live and capacity, in every book."""
        self._limits[replica] = (ttl_s, capacity_blocks)
        for scope, book in self._books.items():
            book.limit(replica, ttl_s, self._within(scope, capacity_blocks))

    def resident(self, replica: ReplicaId) -> int:
        """Return the number of blocks on record for ``replica``, over all scopes."""
        return sum(book.resident(replica) for book in self._books.values())

    def settle(self, holds: Callable[[ReplicaId, BlockId], bool], now_s: float) -> None:
        """End what the engines tell of by now; keep the bounds of some scopes and replicas."""
        for book in self._books.values():
            book.settle(holds, now_s)
        for scope in self._next(self._books, SCOPES_PER_TICK):
            self._tend(scope, self._books[scope], now_s)
        for replica in self._next(self._limits, REPLICAS_PER_TICK):
            self._share(replica, self._limits[replica][1])

    def forget(self, replica: ReplicaId) -> None:
        """Drop all that was sent to ``replica``, and its limits: its cache is a new one."""
        self._limits.pop(replica, None)
        for book in self._books.values():
            book.forget(replica)

    def _within(self, scope: str, capacity_blocks: int) -> int:
        bound = self._bounds.get(scope)
        return capacity_blocks if bound is None else max(1, min(bound, capacity_blocks))

    @staticmethod
    def _next(kept: dict[Key, Value], most: int) -> list[Key]:
        """Return the keys whose turn it is, and let them wait for the next one."""
        keys = list(islice(kept, most))
        for key in keys:
            kept[key] = kept.pop(key)
        return keys

    def _tend(self, scope: str, book: Placements, now_s: float) -> None:
        """Let go of what is too old, where nobody looks, too, and of what is beyond the bound."""
        book.expire(now_s)
        bound = self._bounds.get(scope)
        if bound is not None and book.blocks > bound:
            book.shrink_to(bound)

    def _share(self, replica: ReplicaId, capacity_blocks: int) -> None:
        """Let the largest books give way where all of them hold more than the replica can."""
        sizes = [book.resident(replica) for book in self._books.values()]
        if sum(sizes) > capacity_blocks:
            share = fair_share(sizes, capacity_blocks)
            for book in self._books.values():
                book.shrink(replica, share)
