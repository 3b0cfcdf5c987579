"""What one replica holds in one tier, in the order in which it came: a journal beside the index.

The journal is what makes eviction and the end of a replica cheap: both take blocks from its old end
without a search through the index. Sealed portions are packed, 16 bytes a block, and hold no
objects that the garbage collector would look at. A removed block stays in the journal, noted as
gone, until its portion is rewritten; so every block is in the journal once, however often it came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from state.schema import BLOCK_ID_BYTES, unpack_blocks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from state.model import BlockId, Tier

PORTION_BLOCKS: Final = 512
"""Of 8 KiB: such a portion fits into what the parts of a table leave free when they grow."""
_GONE_FLOOR_BLOCKS: Final = 2 * PORTION_BLOCKS
_GONE_DIVISOR: Final = 8
"""An eighth of the journal may be gone before portions are rewritten."""
_REWRITES_PER_REMOVED: Final = 16


class Holding:
    """The blocks that carry ``bit`` in the index of ``tier``; the index itself is the caller's."""

    __slots__ = ("_gone", "_hand", "_open", "_sealed", "bit", "blocks", "journal_blocks", "tier")

    def __init__(self, bit: int, tier: Tier) -> None:
        self.bit = bit
        self.tier = tier
        self.blocks = 0
        """How many are held."""
        self.journal_blocks = 0
        """How many the journal names: those held, and some that are gone."""
        self._sealed: list[bytes] = []
        self._open: list[BlockId] = []
        self._gone: set[BlockId] = set()
        self._hand = 0

    def add(self, fresh: list[BlockId]) -> None:
        """Note blocks, none of them twice, that were not held before."""
        self.blocks += len(fresh)
        gone = self._gone
        if gone:
            back = gone.intersection(fresh)
            if back:
                gone -= back
                fresh = [block for block in fresh if block not in back]
        self.journal_blocks += len(fresh)
        self._open += fresh
        while len(self._open) >= PORTION_BLOCKS:
            self._sealed.append(b"".join(self._open[:PORTION_BLOCKS]))
            del self._open[:PORTION_BLOCKS]

    def remove(self, lost: Collection[BlockId]) -> None:
        """Note that blocks, all of them held, are gone."""
        self.blocks -= len(lost)
        self._gone.update(lost)
        rewrites = 2 + _REWRITES_PER_REMOVED * len(lost) // PORTION_BLOCKS
        while rewrites and self._sealed and self._is_outlived(self._sealed[0]):
            self._hand = 0
            self._rewrite_portion()
            rewrites -= 1
        while rewrites and len(self._gone) > _GONE_FLOOR_BLOCKS + self.blocks // _GONE_DIVISOR:
            self._rewrite_portion()
            rewrites -= 1

    def take(self, limit_blocks: int) -> list[BlockId]:
        """Take out at most ``limit_blocks`` of the oldest and return those that were held."""
        if self._sealed:
            limit_bytes = limit_blocks * BLOCK_ID_BYTES
            oldest = self._sealed[0]
            taken = unpack_blocks(oldest[:limit_bytes])
            if len(oldest) > limit_bytes:
                self._sealed[0] = oldest[limit_bytes:]
            else:
                del self._sealed[0]
                self._hand = max(0, self._hand - 1)
        else:
            taken = self._open[:limit_blocks]
            del self._open[:limit_blocks]
        self.journal_blocks -= len(taken)
        held = self._without_gone(taken)
        self.blocks -= len(held)
        return held

    def __iter__(self) -> Iterator[BlockId]:
        """Yield the blocks held, oldest first."""
        for packed in self._sealed:
            yield from (block for block in unpack_blocks(packed) if block not in self._gone)
        yield from (block for block in self._open if block not in self._gone)

    def _is_outlived(self, packed: bytes) -> bool:
        """Whether both ends of a portion are gone: most likely all of it, the oldest first."""
        gone = self._gone
        return packed[:BLOCK_ID_BYTES] in gone and packed[-BLOCK_ID_BYTES:] in gone

    def _without_gone(self, taken: list[BlockId]) -> list[BlockId]:
        """Return what of ``taken`` is held; the journal no longer names it."""
        gone = self._gone
        if gone.isdisjoint(taken):
            return taken
        held = [block for block in taken if block not in gone]
        gone.difference_update(taken)
        return held

    def _rewrite_portion(self) -> None:
        """Rewrite the next portion without what is gone; a small rest joins the one before."""
        if self._hand >= len(self._sealed):
            self._hand = 0
            before = len(self._open)
            self._open = self._without_gone(self._open)
            self.journal_blocks -= before - len(self._open)
            return
        hand = self._hand
        packed = self._sealed[hand]
        kept = b"".join(self._without_gone(unpack_blocks(packed)))
        self.journal_blocks -= (len(packed) - len(kept)) // BLOCK_ID_BYTES
        room_bytes = PORTION_BLOCKS * BLOCK_ID_BYTES - len(kept)
        if hand and len(self._sealed[hand - 1]) <= room_bytes:
            self._sealed[hand - 1] += kept
            del self._sealed[hand]
        elif kept:
            self._sealed[hand] = kept
            self._hand += 1
        else:
            del self._sealed[hand]
