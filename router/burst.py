"""A burst of errors on the candidate's side alone: seen with the request that makes it one.

Of the last ``LAST`` requests of the candidate at least ``FAILED`` failed, while of the control's
since the first of them hardly any did. A fleet that fails on both sides is no burst.
"""

from __future__ import annotations

from collections import deque
from typing import Final

LAST: Final = 20
FAILED: Final = 10
CONTROL_LEAST: Final = 10
"""Of the control's requests in that time. With fewer, all of ``LAST`` have to fail."""
CONTROL_SHARE: Final = 0.1
"""So large a share of the control's may have failed."""
CONTROL_KEPT: Final = 1_024


class Burst:
    """Watches the requests of one router in the order they end."""

    def __init__(self) -> None:
        self._number = 0
        self._candidate: deque[tuple[int, bool]] = deque(maxlen=LAST)
        self._failed = 0
        self._control: deque[tuple[int, bool]] = deque(maxlen=CONTROL_KEPT)
        self.words = ""
        """What was seen; empty before."""

    def add(self, *, is_candidate: bool, has_failed: bool) -> bool:
        """Take one request; return whether it makes a burst, of which there is one at most."""
        self._number += 1
        seen = (self._number, has_failed)
        if not is_candidate:
            self._control.append(seen)
            return False
        last = self._candidate
        if len(last) == LAST:
            self._failed -= last[0][1]
        last.append(seen)
        self._failed += has_failed
        if self.words or not has_failed or self._failed < FAILED:
            return False
        return self._is_alone()

    def _is_alone(self) -> bool:
        since = next(number for number, failed in self._candidate if failed)
        control = [failed for number, failed in self._control if number > since]
        failed, told = sum(control), len(control)
        if told < CONTROL_LEAST and self._failed < LAST:
            return False
        if failed > CONTROL_SHARE * told:
            return False
        self.words = (
            f"{self._failed} of the last {len(self._candidate)} requests of the candidate failed, "
            f"and {failed} of {told} of the control meanwhile"
        )
        return True
