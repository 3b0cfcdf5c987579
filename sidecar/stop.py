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
    """Lets text through up to the first stop string; the stop string itself is not shown."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> Passed:
        """Take more text."""
        if not self._stops:
            return Passed(text)
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            shown, self._held = self._held[:at], ""
            return Passed(shown, stop)
        keep = max(self._longest_begun(stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return Passed(shown)

    def flush(self) -> str:
        """Return what is still held back: the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _longest_begun(self, stop: str) -> int:
        """Return how many characters at the end of the held text begin ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
