"""Remembers which pages an engine evicted, so that those that come back are seen.

A page that is computed again after it was evicted is one that a larger cache would still have had:
the plainest sign of a cache that is too small for its working set (the ghost list of ARC, Megiddo
and Modha, FAST 2003). Only handles are kept, in two halves: when the newer one is full, it takes
the place of the older.
"""

from __future__ import annotations

from typing import Final

MOST_GHOSTS: Final = 1 << 16
"""Some 6 MB; a page that comes back later is not seen as one."""


class Ghosts:
    """Handles of evicted pages, at most ``most`` of them."""

    __slots__ = ("_half", "_newer", "_older")

    def __init__(self, most: int = MOST_GHOSTS) -> None:
        self._half = most // 2
        self._newer: set[int] = set()
        self._older: set[int] = set()

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def leave(self, handle: int) -> None:
        """Note that the page called ``handle`` is gone."""
        if len(self._newer) >= self._half:
            self._older, self._newer = self._newer, set()
        self._newer.add(handle)

    def is_back(self, handle: int) -> bool:
        """Return whether ``handle`` was gone, and forget that it was."""
        is_known = handle in self._newer or handle in self._older
        if is_known:
            self._newer.discard(handle)
            self._older.discard(handle)
        return is_known

    def clear(self) -> None:
        """Forget all: the cache was emptied on purpose."""
        self._newer.clear()
        self._older.clear()
