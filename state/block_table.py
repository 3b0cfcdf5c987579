"""The table below the index: block id -> bitmap of its holders, in one of two forms.

``DictTable`` is a dict, everywhere. ``NativeTable`` (``native_table``) takes a third of its memory
and needs a compiled helper, see ``native``. Both answer alike; the index is the same on either.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from state.model import BlockId

ASKED = 1
"""The lowest bit of a bitmap is no holder: a block with no other bit is not in the table."""


class BlockTable(Protocol):
    """Block -> bitmap. ``entry_bytes`` is what a block takes at most after much change."""

    entry_bytes: ClassVar[int]

    def __len__(self) -> int:
        """Return how many blocks have holders."""
        ...

    def add(self, blocks: Sequence[BlockId], bit: int) -> list[BlockId]:
        """Set ``bit`` of all ``blocks``; return those that did not have it, each once."""
        ...

    def discard(self, blocks: Collection[BlockId], bit: int) -> Collection[BlockId]:
        """Take ``bit`` from all ``blocks``; return those that had it, each once."""
        ...

    def masks(self, blocks: Sequence[BlockId]) -> list[int]:
        """Return the bitmap of each block, 0 where it is unknown."""
        ...

    def walk(self, chain: Sequence[BlockId], *, until_unknown: bool) -> Iterator[tuple[int, int]]:
        """Yield ``(depth, bitmap)``: so it is from the depth before up to this one.

        With ``until_unknown`` nothing follows the first block that is not in the table.
        """
        ...


class DictTable:
    """The form that needs nothing: a dict of ids and ints."""

    __slots__ = ("_bitmaps",)

    entry_bytes: ClassVar[int] = 200
    """Its id 64, a table slot 30 to 120, fragmentation."""

    def __init__(self) -> None:
        self._bitmaps: dict[BlockId, int] = {}

    def __len__(self) -> int:
        """Return how many blocks have holders."""
        return len(self._bitmaps)

    def add(self, blocks: Sequence[BlockId], bit: int) -> list[BlockId]:
        """Set ``bit`` of all ``blocks``; return those that did not have it, each once."""
        bitmaps = self._bitmaps
        get = bitmaps.get
        old, new = 0, bit
        fresh = []
        for block in blocks:
            known = get(block, 0)
            if known & bit:
                continue
            if known is not old:
                old, new = known, known | bit
            bitmaps[block] = new  # one int object for a run of blocks with the same holders
            fresh.append(block)
        return fresh

    def discard(self, blocks: Collection[BlockId], bit: int) -> Collection[BlockId]:
        """Take ``bit`` from all ``blocks``; return those that had it, each once."""
        bitmaps = self._bitmaps
        get = bitmaps.get
        lost = {block for block in blocks if get(block, 0) & bit}
        old = new = 0
        for block in lost:
            known = bitmaps[block]
            if known is not old:
                old, new = known, known & ~bit
            if new > ASKED:
                bitmaps[block] = new
            else:
                del bitmaps[block]
        return lost

    def masks(self, blocks: Sequence[BlockId]) -> list[int]:
        """Return the bitmap of each block, 0 where it is unknown."""
        return list(map(self._bitmaps.get, blocks, repeat(0)))

    def walk(self, chain: Sequence[BlockId], *, until_unknown: bool) -> Iterator[tuple[int, int]]:
        """Yield ``(depth, bitmap)``: so it is from the depth before up to this one."""
        last, depth = -1, 0
        for depth, mask in enumerate(map(self._bitmaps.get, chain, repeat(0))):
            if mask is last:  # most neighbours share one int object: see ``add``
                continue
            if depth:
                yield depth, last
            last = mask
            if until_unknown and not mask:
                yield depth + 1, mask
                return
        if chain:
            yield depth + 1, last
