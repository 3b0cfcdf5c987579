"""When to stop asking a server that does not answer in time, and when to try it again."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from state.rhythm import Backoff


class Admission(enum.Enum):
    """What a breaker says to somebody who wants to ask."""

    ASK = enum.auto()
    PROBE = enum.auto()
    """The one question whose outcome decides whether others may ask again."""
    REFUSED = enum.auto()


class Breaker:
    """Opens after some errors in a row or a while without an answer in time. No I/O, no clock.

    Open, it lets one probe through after a backoff; an answer in time closes it, anything else
    begins the next backoff. Whoever was admitted reports exactly once.
    """

    __slots__ = (
        "_backoff",
        "_errors",
        "_is_probing",
        "_max_errors",
        "_max_silence_s",
        "_retry_s",
        "_silent_since_s",
    )

    def __init__(
        self, backoff: Backoff, *, max_errors: int = 3, max_silence_s: float = 1.0
    ) -> None:
        self._backoff = backoff
        self._max_errors = max_errors
        self._max_silence_s = max_silence_s
        self._errors = 0
        self._silent_since_s: float | None = None
        self._retry_s: float | None = None
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        """Whether questions are refused, the occasional probe apart."""
        return self._retry_s is not None

    def admit(self, now_s: float) -> Admission:
        """Return whether to ask now."""
        if self._retry_s is None:
            return Admission.ASK
        if self._is_probing or now_s < self._retry_s:
            return Admission.REFUSED
        self._is_probing = True
        return Admission.PROBE

    def answered(self, admission: Admission) -> None:
        """Note an answer in time. Late answers to questions from before it opened say nothing."""
        if self.is_open and admission is not Admission.PROBE:
            return
        self._errors = 0
        self._silent_since_s = None
        self._retry_s = None
        self._is_probing = False
        self._backoff.reset()

    def failed(self, admission: Admission, now_s: float) -> None:
        """Note an error."""
        self._errors += 1
        self._miss(admission, now_s)

    def late(self, admission: Admission, now_s: float) -> None:
        """Note an answer that came too late to be of use."""
        self._miss(admission, now_s)

    def _miss(self, admission: Admission, now_s: float) -> None:
        if admission is Admission.PROBE:
            self._is_probing = False
            self._retry_s = now_s + self._backoff.next_s()
        elif not self.is_open:
            since_s = now_s if self._silent_since_s is None else self._silent_since_s
            if self._errors >= self._max_errors or now_s - since_s >= self._max_silence_s:
                self._retry_s = now_s + self._backoff.next_s()
            else:
                self._silent_since_s = since_s
