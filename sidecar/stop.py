"""Stop strings: ends a text where one of them begins, and holds back what may become one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence


class Passed(Struct, frozen=True):
    """Text that may be shown now, and the stop string that ended it, if one did."""

    text: str
    stopped_by: str | None = None


class StopFilter:
    """Lets text through up to the first stop string; the stop string itself is not shown.

    First is the one that is complete first, and of those that end together the longest: however
    the text is cut into pieces, the outcome is the same.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._searches = [_Search(stop) for stop in stops]
        self._held = ""

    def feed(self, text: str) -> Passed:
        """Take more text."""
        if not self._searches:
            return Passed(text)
        for end, char in enumerate(text, start=1):
            found = [search.stop for search in self._searches if search.is_found(char)]
            if found:
                stop = max(found, key=len)
                shown, self._held = (self._held + text[:end]).removesuffix(stop), ""
                return Passed(shown, stop)
        held = self._held + text
        cut = len(held) - max(search.begun_chars for search in self._searches)
        self._held = held[cut:]
        return Passed(held[:cut])

    def flush(self) -> str:
        """Return what is still held back: the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _Search:
    """Looks for one string in a text that comes character by character (Knuth, Morris, Pratt).

    ``begun_chars`` is how many characters at the end of the text begin the string. Constant work
    per character on average, whatever string and text are. The table of borders grows with the
    longest beginning that was found: a request may have many answers and long stop strings, and
    tables for all of it at its start would hold up everybody else.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.begun_chars = 0
        self._shorter = [0]

    def is_found(self, char: str) -> bool:
        """Take one more character and tell whether it completes the string."""
        begun_chars = self.begun_chars
        if begun_chars == len(self.stop):
            begun_chars = self._shorter[-1]
        self.begun_chars = self._advanced(begun_chars, char)
        if self.begun_chars > len(self._shorter):
            self._shorter.append(self._advanced(self._shorter[-1], char))
        return self.begun_chars == len(self.stop)

    def _advanced(self, begun_chars: int, char: str) -> int:
        while begun_chars and self.stop[begun_chars] != char:
            begun_chars = self._shorter[begun_chars - 1]
        return begun_chars + (self.stop[begun_chars] == char)
