"""A heap that can be read in order without taking anything out, and of which anything can go."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    Item = TypeVar("Item", bound=Hashable)
else:
    Item = TypeVar("Item")

Key: TypeAlias = tuple[float, ...]

_SPARE: Final = 16
"""Entries that went and may stay in the heap beside as many as live in it."""


class OrderedHeap(Generic[Item]):
    """Items by key, equal keys by arrival. A change costs O(log n), reading k items O(k log k)."""

    __slots__ = ("_entries", "_heap", "_ordinal")

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Item]] = []
        self._entries: dict[Item, tuple[Key, int, Item]] = {}
        self._ordinal = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    def key_of(self, item: Item) -> Key:
        """Return the key of ``item``; raises KeyError when it is not here."""
        return self._entries[item][0]

    def put(self, item: Item, key: Key) -> None:
        """Place ``item`` at ``key``; one that is here moves."""
        entry = (key, self._ordinal, item)
        self._ordinal += 1
        self._entries[item] = entry
        heappush(self._heap, entry)
        self._tidy()

    def discard(self, item: Item) -> None:
        """Take ``item`` out, where it is in."""
        if self._entries.pop(item, None) is not None:
            self._tidy()

    def first(self) -> Item | None:
        """Return the item with the lowest key; None when there is none."""
        heap = self._heap
        return heap[0][2] if heap else None

    def __iter__(self) -> Iterator[Item]:
        """Yield the items in order; they must not change meanwhile."""
        heap = self._heap
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            entry, index = heappop(frontier)
            if self._entries.get(entry[2]) is entry:
                yield entry[2]
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heappush(frontier, (heap[child], child))

    def _tidy(self) -> None:
        """Keep a live entry on top, and most entries alive."""
        heap, entries = self._heap, self._entries
        if len(heap) > 2 * len(entries) + _SPARE:
            self._heap = list(entries.values())
            heapify(self._heap)
            return
        while heap and entries.get(heap[0][2]) is not heap[0]:
            heappop(heap)
