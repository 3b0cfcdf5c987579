"""What ids of blocks stand for: a whole prefix, or a block's own content.

An id of content may follow different parents; an id of a prefix cannot. Which of both a trace has
shows only as it is read, and no table may grow with the trace: all ids are watched up to a number
of them, then the multiples of 3, of 9, and so on.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_WATCHED: Final = 1 << 16
_THINNER: Final = 3
"""No power of two: ids that are multiples of one are thinned out like all others."""


class IdsKind(enum.StrEnum):
    """What the ids of a trace were found to name."""

    PREFIX = "prefix"
    """The block and all before it: no watched id had two parents."""
    CONTENT = "content"
    """The block alone: an id had two parents."""
    UNKNOWN = "unknown"
    """No watched id came twice."""


class IdsWatch:
    """Finds out what ids name, in bounded memory; certain where it says content."""

    def __init__(self, watched: int = _WATCHED) -> None:
        self._watched = watched
        self._parents: dict[int, int | None] = {}
        self._every = 1
        self.kind = IdsKind.UNKNOWN

    def observe(self, ids: Sequence[int]) -> None:
        """Take note of one prompt's ids."""
        if self.kind is IdsKind.CONTENT:
            return
        parents, every = self._parents, self._every
        parent: int | None = None
        for own in ids:
            if own % every == 0:
                if own not in parents:
                    parents[own] = parent
                elif parents[own] == parent:
                    self.kind = IdsKind.PREFIX
                else:
                    self.kind = IdsKind.CONTENT
                    parents.clear()
                    return
            parent = own
        while len(self._parents) > self._watched:
            self._thin_out()

    def _thin_out(self) -> None:
        self._every *= _THINNER
        self._parents = {
            own: parent for own, parent in self._parents.items() if own % self._every == 0
        }
