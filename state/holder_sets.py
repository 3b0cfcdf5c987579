"""Bitmaps of holders, numbered: blocks with the same holders name one number of 4 bytes.

Chains are held whole, so a million blocks have few different holders. A number is given out again
once nothing uses it; number 0 is the empty set.
"""

from __future__ import annotations


class HolderSets:
    """Bitmap <-> number, with a count of the uses of each."""

    __slots__ = ("_free", "_numbers", "_uses", "masks")

    def __init__(self) -> None:
        self.masks: list[int] = [0]
        """The bitmap of each number."""
        self._numbers: dict[int, int] = {0: 0}
        self._uses: list[int] = [0]
        self._free: list[int] = []

    def __len__(self) -> int:
        """Return how many different sets are in use, the empty one included."""
        return len(self._numbers)

    def number(self, mask: int) -> int | None:
        """Return the number of ``mask``, None where nothing uses it."""
        return self._numbers.get(mask)

    def take(self, mask: int, uses: int) -> int:
        """Return the number of ``mask``, used so many times more."""
        number = self._numbers.get(mask)
        if number is not None:
            self._uses[number] += uses
            return number
        if self._free:
            number = self._free.pop()
            self.masks[number], self._uses[number] = mask, uses
        else:
            number = len(self.masks)
            self.masks.append(mask)
            self._uses.append(uses)
        self._numbers[mask] = number
        return number

    def give(self, number: int, uses: int) -> None:
        """Count so many uses of ``number`` less."""
        left = self._uses[number] - uses
        self._uses[number] = left
        if not left and number:
            del self._numbers[self.masks[number]]
            self.masks[number] = 0
            self._free.append(number)
