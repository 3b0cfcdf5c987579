"""The index of one lower tier: which slot holds the page of which key.

Slots are a ``PagePool`` of their own, so they have the same states and the same accounting. A slot
is reserved while content is on its way into it, used while it is read, evictable otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from sidecar.pool import PageId, PagePool
from sidecar.tree import PageFacts
from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sidecar.journal import TierName, Transition


class Dropped(Struct, frozen=True):
    """A key that a tier gave up. ``facts`` None: it was never announced."""

    key: BlockId
    slot: PageId
    facts: PageFacts | None


class Put(Struct, frozen=True):
    """A slot for a new key, and what was given up for it."""

    slot: PageId
    dropped: tuple[Dropped, ...]


class LowerTier:
    """Slots by key, least recently used first out. Pure: the bytes are in ``sidecar.store``."""

    def __init__(
        self,
        name: TierName,
        slots: int,
        journal: Callable[[Transition], None] | None = None,
    ) -> None:
        self.name: Final = name
        self.pool = PagePool(slots, tier=name, journal=journal)
        self._slots: dict[BlockId, PageId] = {}
        self._keys: dict[PageId, BlockId] = {}
        self._facts: dict[BlockId, PageFacts] = {}
        self.dropped = 0
        """Pages that found no slot."""

    def __contains__(self, key: BlockId) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def holds_at(self, slot: PageId, key: BlockId) -> bool:
        """Return whether ``slot`` holds ``key``."""
        return self._keys.get(slot) == key

    def leading(self, keys: Sequence[BlockId]) -> int:
        """Return how many of the first ``keys`` are held without a gap."""
        for count, key in enumerate(keys):
            if key not in self._slots:
                return count
        return len(keys)

    def reserve(self, holder: str, tenant: str = "") -> Put | None:
        """Claim a slot for content on its way; None (and counted) when all are in use."""
        if not self.pool.available_pages():
            self.dropped += 1
            return None
        taken = self.pool.take(1, tenant, holder=holder, how="reserve")
        dropped = tuple(self._forget(slot) for slot in taken.evicted)
        return Put(taken.pages[0], dropped)

    def commit(self, slot: PageId, key: BlockId, facts: PageFacts | None, holder: str) -> None:
        """Note that the content of ``key`` is in the reserved ``slot``."""
        self._slots[key] = slot
        self._keys[slot] = key
        if facts is not None:
            self._facts[key] = facts
        self.pool.fill((slot,))
        self.pool.index((slot,))
        self.pool.release((slot,), holder, "moved")

    def abandon(self, slot: PageId, holder: str) -> None:
        """Give a reserved slot back: its content never came."""
        self.pool.release((slot,), holder, "failed")

    def lease(self, keys: Sequence[BlockId], holder: str) -> list[PageId]:
        """Return the slots of held ``keys``; they stay until ``give_back``."""
        slots = [self._slots[key] for key in keys]
        self.pool.share(slots, holder)
        return slots

    def give_back(self, slots: Sequence[PageId], holder: str) -> None:
        """End a lease."""
        self.pool.release(reversed(slots), holder, "read")

    def announce(self, key: BlockId, facts: PageFacts) -> bool:
        """Learn the facts of a held key found at start; True when they were not known."""
        if key not in self._slots or key in self._facts:
            return False
        self._facts[key] = facts
        return True

    def drop(self, keys: Sequence[BlockId]) -> list[Dropped]:
        """Forget ``keys``: their content is gone or wrong."""
        slots = [self._slots[key] for key in keys if key in self._slots]
        dropped = [self._forget(slot) for slot in slots]
        self.pool.unindex(slots)
        return dropped

    def restore(self, keys: Sequence[BlockId], discard: Callable[[BlockId], None]) -> None:
        """Take over ``keys`` that were there before, least recently used first.

        They are used, and announced once what is behind them is known (``announce``). ``discard``
        gets those for which there is no slot.
        """
        for key in keys[: -self.pool.total_pages] if len(keys) > self.pool.total_pages else ():
            discard(key)
        for key in keys[-self.pool.total_pages :]:
            put = self.reserve("restore")
            if put is not None:
                self.commit(put.slot, key, None, "restore")

    def clear(self) -> list[Dropped]:
        """Forget everything; slots in use become free when they are given back."""
        dropped = [self._forget(slot) for slot in list(self._keys)]
        self.pool.forget_content()
        return dropped

    def _forget(self, slot: PageId) -> Dropped:
        key = self._keys.pop(slot)
        del self._slots[key]
        return Dropped(key, slot, self._facts.pop(key, None))
