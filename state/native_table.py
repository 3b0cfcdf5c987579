"""The compact form of the table below the index: 27 to 40 bytes a block, by a compiled helper.

The helper (``block_table.c``) keeps a number of 32 bits for each id, which is compared whole; what
bitmap a number stands for is known here (``holder_sets``). Whole batches go over in one call, ids
joined, and a chain's holders come back as runs.
"""

from __future__ import annotations

import secrets
import weakref
from array import array
from collections import Counter
from itertools import chain as flatten
from itertools import compress
from typing import TYPE_CHECKING, ClassVar, Final

from state.block_table import ASKED
from state.holder_sets import HolderSets

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from state.model import BlockId
    from state.native import Library

_FIRST_BLOCKS: Final = 32
"""Looked at before the rest of a chain is joined: most chains are known not at all, or on."""
_PORTION_BLOCKS: Final = 2048
_PIECES: Final = 512


class NativeTable:
    """``BlockTable`` in memory of the compiled helper; freed with the object."""

    __slots__ = ("__weakref__", "_ends", "_library", "_numbers", "_replace", "_sets", "_table")

    entry_bytes: ClassVar[int] = 44
    """A slot of 20 bytes in a table that is half full at least, and what allocation leaves."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._replace = library.replace
        self._sets = HolderSets()
        self._table = library.new(secrets.randbits(64) | 1, secrets.randbits(64) | 1)
        if not self._table:
            raise MemoryError
        weakref.finalize(self, library.free, self._table)
        self._ends = array("q", bytes(8 * _PIECES))
        self._numbers = array("I", bytes(4 * _PIECES))

    def __len__(self) -> int:
        """Return how many blocks have holders."""
        return self._library.blocks(self._table)

    @property
    def table_bytes(self) -> int:
        """What the helper has allocated."""
        return self._library.bytes(self._table)

    def add(self, blocks: Sequence[BlockId], bit: int) -> list[BlockId]:
        """Set ``bit`` of all ``blocks``; return those that did not have it, each once."""
        fresh = list(blocks)
        count = len(fresh)
        if not count:
            return fresh
        sets = self._sets
        number = sets.take(bit, count)  # as for nearly all: nobody held them
        done = self._replace(self._table, b"".join(fresh), count, 0, number)
        if done == count:
            return fresh
        if done < 0:
            raise MemoryError
        sets.give(number, count - done)
        rest = self._change(fresh[done:], bit, lambda mask: mask | bit, has_bit=False)
        return fresh[:done] + rest

    def discard(self, blocks: Collection[BlockId], bit: int) -> Collection[BlockId]:
        """Take ``bit`` from all ``blocks``; return those that had it, each once."""
        lost = list(blocks)
        sets = self._sets
        number = sets.number(bit)
        done = 0
        if number is not None:  # as for most: nobody else held them
            done = self._replace(self._table, b"".join(lost), len(lost), number, 0)
            sets.give(number, done)
        if done == len(lost):
            return lost

        def without(mask: int) -> int:
            rest = mask & ~bit
            return rest if rest > ASKED else 0

        return lost[:done] + self._change(lost[done:], bit, without, has_bit=True)

    def masks(self, blocks: Sequence[BlockId]) -> list[int]:
        """Return the bitmap of each block, 0 where it is unknown."""
        return list(map(self._sets.masks.__getitem__, self._get(b"".join(blocks), len(blocks))))

    def walk(self, chain: Sequence[BlockId], *, until_unknown: bool) -> Iterator[tuple[int, int]]:
        """Yield ``(depth, bitmap)``: so it is from the depth before up to this one."""
        return flatten.from_iterable(self._portions(chain, until_unknown=until_unknown))

    def _portions(
        self, chain: Sequence[BlockId], *, until_unknown: bool
    ) -> Iterator[Iterator[tuple[int, int]]]:
        """Yield what ``walk`` does, a portion of the chain at a time."""
        mask_of = self._sets.masks.__getitem__
        ends, numbers = self._ends, self._numbers
        places = ends.buffer_info()[0], numbers.buffer_info()[0]
        depth, portion = 0, _FIRST_BLOCKS
        while depth < len(chain):
            part = chain[depth : depth + portion]
            joined = b"".join(part)
            pieces = self._library.walk(
                self._table, joined, len(part), depth, until_unknown, _PIECES, *places
            )
            depth, last = ends[pieces - 1], numbers[pieces - 1]
            yield zip(ends[:pieces], map(mask_of, numbers[:pieces]), strict=True)
            if until_unknown and not last:
                return
            portion = _PORTION_BLOCKS

    def _get(self, joined: bytes, count: int) -> array[int]:
        numbers = array("I", bytes(4 * count))
        self._library.get(self._table, joined, count, numbers.buffer_info()[0])
        return numbers

    def _change(
        self, blocks: list[BlockId], bit: int, changed: Callable[[int], int], *, has_bit: bool
    ) -> list[BlockId]:
        """Change the bitmaps of those ``blocks`` that have the bit, or have not; return them."""
        if not blocks:
            return blocks
        joined = b"".join(blocks)
        numbers = self._get(joined, len(blocks))
        masks = self._sets.masks
        first = numbers[0]
        if len(blocks) == 1 or numbers.tobytes() == numbers[:1].tobytes() * len(blocks):
            if bool(masks[first] & bit) is not has_bit:
                return []
            uses = {first: len(blocks)}
        else:
            uses = {
                number: count
                for number, count in Counter(numbers).items()
                if bool(masks[number] & bit) is has_bit
            }
            if sum(uses.values()) < len(blocks):
                blocks = list(compress(blocks, map(uses.__contains__, numbers)))
                if not blocks:
                    return blocks
                joined = b"".join(blocks)
                numbers = array("I", filter(uses.__contains__, numbers))
        if len(blocks) > 1 and len(set(blocks)) < len(blocks):
            return self._change(list(dict.fromkeys(blocks)), bit, changed, has_bit=has_bit)
        self._put(blocks, joined, numbers, uses, changed)
        return blocks

    def _put(
        self,
        blocks: list[BlockId],
        joined: bytes,
        numbers: array[int],
        uses: dict[int, int],
        changed: Callable[[int], int],
    ) -> None:
        sets = self._sets
        after = {}
        for number, count in uses.items():
            mask = changed(sets.masks[number])
            after[number] = sets.take(mask, count) if mask else 0
        if len(after) == 1:
            [number] = after.values()
            numbers = array("I", (number,)) * len(blocks)
        else:
            numbers = array("I", map(after.__getitem__, numbers))
        done = self._library.put(self._table, joined, len(blocks), numbers.buffer_info()[0])
        if done < 0:
            raise MemoryError
        for number, count in uses.items():
            if number:
                sets.give(number, count)
