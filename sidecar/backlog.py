"""What waits to be written while the state store is slow, within a bound.

A folder knows all that it holds, so nothing is lost when its latest changes are given up: then
everything is announced again, once the store takes something.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sidecar.change import Fold

MAX_BLOCKS: Final = 200_000
"""Changes that wait; some 40 MB."""


class Backlog:
    """Folds in order, of ``most_blocks`` stored and removed blocks at most."""

    __slots__ = ("_blocks", "_folds", "_most_blocks")

    def __init__(self, most_blocks: int = MAX_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._folds: list[Fold] = []
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._folds)

    @property
    def blocks(self) -> int:
        """Changes of blocks that wait; a fold without any counts as one."""
        return self._blocks

    def add(self, fold: Fold) -> bool:
        """Append ``fold``; False, with nothing left, when that is too much."""
        if fold.is_clear:
            self.clear()  # what was before is of no interest to anyone
        blocks = sum(len(change.stored) + len(change.removed) for change in fold.changes)
        self._blocks += max(1, blocks)
        if self._blocks > self._most_blocks:
            self.clear()
            return False
        self._folds.append(fold)
        return True

    def take(self) -> list[Fold]:
        """Return all folds; none is left."""
        folds = self._folds
        self.clear()
        return folds

    def clear(self) -> None:
        """Forget all."""
        self._folds = []
        self._blocks = 0
