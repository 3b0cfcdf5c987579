"""Forms that the table below the index could have in Python alone: measured, and not taken.

Each is a ``BlockTable`` as far as ``index_bench`` needs one: blocks of few holders, no marks.
"""

from __future__ import annotations

from array import array
from itertools import repeat
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from state.model import BlockId

_SHORT: Final = 4
"""Bits that a 64-bit part of an id is shortened by, so that it is an int of 32 bytes."""
_BUCKET_BLOCKS: Final = 8
_ENTRY_BYTES: Final = 20
_GONE: Final = 1


def halves(blocks: Collection[BlockId]) -> list[int]:
    """Return the first 64 bits of each id."""
    return memoryview(b"".join(blocks)).cast("Q")[::2].tolist()


def runs_of(masks: Iterator[int], *, until_unknown: bool) -> Iterator[tuple[int, int]]:
    """Yield ``(depth, bitmap)`` as ``BlockTable.walk`` does, of one bitmap per block."""
    last, depth = -1, 0
    for depth, mask in enumerate(masks, 1):
        if mask != last:
            if depth > 1:
                yield depth - 1, last
            last = mask
            if until_unknown and not mask:
                yield depth, mask
                return
    if depth:
        yield depth, last


class IntTable:
    """A dict of ints of 60 bits: of N blocks, one that is not held is found with N / 2**60."""

    entry_bytes: ClassVar[int] = 160

    def __init__(self) -> None:
        self._bitmaps: dict[int, int] = {}

    def __len__(self) -> int:
        """Return how many blocks have holders."""
        return len(self._bitmaps)

    def add(self, blocks: Sequence[BlockId], bit: int) -> list[BlockId]:
        """Set ``bit``; return what did not have it."""
        bitmaps, fresh = self._bitmaps, []
        get = bitmaps.get
        old, new = 0, bit
        for block, half in zip(blocks, halves(blocks), strict=True):
            key = half >> _SHORT
            known = get(key, 0)
            if known & bit:
                continue
            if known is not old:
                old, new = known, known | bit
            bitmaps[key] = new
            fresh.append(block)
        return fresh

    def discard(self, blocks: Collection[BlockId], bit: int) -> list[BlockId]:
        """Take ``bit``; return what had it."""
        bitmaps, lost = self._bitmaps, []
        for block, half in zip(blocks, halves(blocks), strict=True):
            key = half >> _SHORT
            known = bitmaps.get(key, 0)
            if known & bit:
                lost.append(block)
                if known ^ bit:
                    bitmaps[key] = known ^ bit
                else:
                    del bitmaps[key]
        return lost

    def masks(self, blocks: Sequence[BlockId]) -> list[int]:
        """Return the bitmap of each block."""
        get = self._bitmaps.get
        return [get(half >> _SHORT, 0) for half in halves(blocks)]

    def walk(self, chain: Sequence[BlockId], *, until_unknown: bool) -> Iterator[tuple[int, int]]:
        """Yield runs of equal bitmaps."""
        keys = [half >> _SHORT for half in halves(chain)]
        return runs_of(map(self._bitmaps.get, keys, repeat(0)), until_unknown=until_unknown)


class ArrayTable:
    """Open addressing in two arrays, 12 bytes a slot; a block is its first 64 bits."""

    entry_bytes: ClassVar[int] = 60

    def __init__(self) -> None:
        self._blocks = self._filled = 0
        self._mask = 0
        self._keys = array("Q", bytes(8))
        self._bitmaps = array("I", bytes(4))
        self._resize(64)

    def __len__(self) -> int:
        """Return how many blocks have holders."""
        return self._blocks

    def _resize(self, slots: int) -> None:
        old = zip(self._keys, self._bitmaps, strict=True)
        self._mask = slots - 1
        self._keys = array("Q", bytes(8 * slots))
        self._bitmaps = array("I", bytes(4 * slots))
        self._filled = self._blocks
        for key, bitmap in old:
            if bitmap > _GONE:
                at = self._slot(key)
                self._keys[at], self._bitmaps[at] = key, bitmap

    def _slot(self, key: int) -> int:
        keys, mask = self._keys, self._mask
        at = key & mask
        while (there := keys[at]) and there != key:
            at = (at + 1) & mask
        return at

    def add(self, blocks: Sequence[BlockId], bit: int) -> list[BlockId]:
        """Set ``bit``; return what did not have it."""
        fresh = []
        for block, key in zip(blocks, halves(blocks), strict=True):
            at = self._slot(key)
            known = self._bitmaps[at]
            if known & bit:
                continue
            fresh.append(block)
            if known <= _GONE:
                self._filled += not known
                self._blocks += 1
            self._keys[at], self._bitmaps[at] = key, known & ~_GONE | bit
            if self._filled * 3 > self._mask * 2:
                self._resize(1 << (self._blocks * 2).bit_length())
        return fresh

    def discard(self, blocks: Collection[BlockId], bit: int) -> list[BlockId]:
        """Take ``bit``; return what had it."""
        lost = []
        for block, key in zip(blocks, halves(blocks), strict=True):
            at = self._slot(key)
            known = self._bitmaps[at]
            if known & bit:
                lost.append(block)
                self._bitmaps[at] = known ^ bit or _GONE
                self._blocks -= known == bit
        return lost

    def masks(self, blocks: Sequence[BlockId]) -> list[int]:
        """Return the bitmap of each block."""
        return [self._bitmaps[self._slot(key)] & ~_GONE for key in halves(blocks)]

    def walk(self, chain: Sequence[BlockId], *, until_unknown: bool) -> Iterator[tuple[int, int]]:
        """Yield runs of equal bitmaps."""
        slot, bitmaps = self._slot, self._bitmaps
        masks = (bitmaps[slot(key)] & ~_GONE for key in halves(chain))
        return runs_of(masks, until_unknown=until_unknown)


class BucketTable:
    """Whole ids in ``bytes`` of some eight blocks each, searched with ``find``."""

    entry_bytes: ClassVar[int] = 40

    def __init__(self) -> None:
        self._blocks = 0
        self._buckets = [b""] * 64

    def __len__(self) -> int:
        """Return how many blocks have holders."""
        return self._blocks

    def _grow(self) -> None:
        old = self._buckets
        self._buckets = [b""] * (2 * len(old))
        mask = len(self._buckets) - 1
        for bucket in old:
            for at in range(0, len(bucket), _ENTRY_BYTES):
                entry = bucket[at : at + _ENTRY_BYTES]
                self._buckets[int.from_bytes(entry[:8], "little") & mask] += entry

    def _at(self, bucket: bytes, block: BlockId) -> int:
        at = bucket.find(block)
        while at > 0 and at % _ENTRY_BYTES:
            at = bucket.find(block, at + 1)
        return at

    def add(self, blocks: Sequence[BlockId], bit: int) -> list[BlockId]:
        """Set ``bit``; return what did not have it."""
        fresh = []
        packed = bit.to_bytes(4, "little")
        buckets, mask = self._buckets, len(self._buckets) - 1
        for block, half in zip(blocks, halves(blocks), strict=True):
            home = half & mask
            bucket = buckets[home]
            at = self._at(bucket, block)
            if at < 0:
                buckets[home] = bucket + block + packed
                self._blocks += 1
                fresh.append(block)
                continue
            known = int.from_bytes(bucket[at + 16 : at + 20], "little")
            if not known & bit:
                both = (known | bit).to_bytes(4, "little")
                buckets[home] = bucket[: at + 16] + both + bucket[at + 20 :]
                fresh.append(block)
        while self._blocks > _BUCKET_BLOCKS * len(self._buckets):
            self._grow()
        return fresh

    def discard(self, blocks: Collection[BlockId], bit: int) -> list[BlockId]:
        """Take ``bit``; return what had it."""
        lost = []
        buckets, mask = self._buckets, len(self._buckets) - 1
        for block, half in zip(blocks, halves(blocks), strict=True):
            bucket = buckets[half & mask]
            at = self._at(bucket, block)
            known = int.from_bytes(bucket[at + 16 : at + 20], "little") if at >= 0 else 0
            if known & bit:
                left = bucket[at : at + 16] + (known ^ bit).to_bytes(4, "little")
                kept = left if known ^ bit else b""
                buckets[half & mask] = bucket[:at] + kept + bucket[at + _ENTRY_BYTES :]
                self._blocks -= known == bit
                lost.append(block)
        return lost

    def masks(self, blocks: Sequence[BlockId]) -> list[int]:
        """Return the bitmap of each block."""
        buckets, mask = self._buckets, len(self._buckets) - 1
        found = []
        for block, half in zip(blocks, halves(blocks), strict=True):
            bucket = buckets[half & mask]
            at = self._at(bucket, block)
            found.append(int.from_bytes(bucket[at + 16 : at + 20], "little") if at >= 0 else 0)
        return found

    def walk(self, chain: Sequence[BlockId], *, until_unknown: bool) -> Iterator[tuple[int, int]]:
        """Yield runs of equal bitmaps."""
        return runs_of(iter(self.masks(chain)), until_unknown=until_unknown)
