"""The ladder: how good a mirror's knowledge is, by its age, without flapping.

Down at once, up only after the view has been fresh for a while without any failure: a server that
answers every other command must not be reported live and stale by turns.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from state.model import Rung

if TYPE_CHECKING:
    from state.timing import MirrorTiming

_LIVE: Final = Rung.LIVE
"""By a name of its own: an enumeration's members are slow to reach."""


class Ladder:
    """The present rung and how often each was entered. Clock values are passed in, in seconds."""

    __slots__ = (
        "_clean_since_s",
        "_timing",
        "_was_live",
        "entered",
        "is_outdated",
        "live_below_s",
        "rung",
    )

    def __init__(self, timing: MirrorTiming) -> None:
        self._timing = timing
        self._clean_since_s: float | None = None
        self._was_live = False
        self.live_below_s = min(timing.stale_after_s, timing.local_after_s)
        """A view of less age is live: observing one changes nothing while the rung is."""
        self.rung = Rung.LOCAL
        self.is_outdated = False
        """The copy is too old to be believed; before the first view there is none that is old."""
        self.entered: Counter[Rung] = Counter()
        """Transitions into each rung."""

    def note_failure(self) -> None:
        """Start the wait for the next rise again."""
        self._clean_since_s = None

    def observe(self, age_s: float | None, now_s: float) -> bool:
        """Take in the age of the view, None before the first whole one; True when it moved."""
        before, seen = self.rung, self._seen(age_s)
        if seen is not Rung.LIVE:
            self._clean_since_s = None
            self.rung = seen
        elif before is not Rung.LIVE:
            if self._clean_since_s is None:
                self._clean_since_s = now_s
            is_steady = now_s - self._clean_since_s >= self._timing.live_after_s
            if is_steady or not self._was_live:
                self.rung, self._was_live = Rung.LIVE, True
        if self.rung is before:
            return False
        self.is_outdated = self.rung is Rung.LOCAL
        self.entered[self.rung] += 1
        return True

    def _seen(self, age_s: float | None) -> Rung:
        if age_s is None or age_s >= self._timing.local_after_s:
            return Rung.LOCAL
        return Rung.STALE if age_s >= self._timing.stale_after_s else _LIVE
