"""How many second tries there may be. No clock of its own, no I/O.

Two kinds draw on it. A try after a replica was *lost* (nobody listens there any more) follows a
load that is gone: a replica is lost once, so these are only paced. A try after an *answer* (no
room, none in time, a connection closed by a replica that lives, also a pooled one) adds load to a
fleet that may be failing because of it: over any time there are at most ``reserve`` and ``ratio``
of the requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.retry_setting import RetrySettings

BALANCE_MOST = 100.0
"""What a long good time saves up for a bad one."""


class Claim:
    """One second try in progress; ended once, when its answer begins or it fails."""

    __slots__ = ("_budget", "_is_lost")

    def __init__(self, budget: RetryBudget, *, is_lost: bool) -> None:
        self._budget: RetryBudget | None = budget
        self._is_lost = is_lost

    def end(self) -> None:
        """Make room for another one."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget.in_progress -= 1

    def give_back(self) -> None:
        """End one that was not used after all: another request may have it."""
        budget = self._budget
        self.end()
        if budget is not None:
            budget.put_back(is_lost=self._is_lost)


class RetryBudget:
    """The budget of one router."""

    def __init__(self, settings: RetrySettings, now_s: float) -> None:
        self._settings = settings
        self._balance = float(settings.reserve)
        self._tokens = settings.per_s
        self._tokens_s = now_s
        self.in_progress = 0

    def deposit(self) -> None:
        """Note a request: a part of them may be tried again."""
        balance = self._balance + self._settings.ratio
        self._balance = min(BALANCE_MOST, balance)

    def replay(self) -> bool:
        """Return whether a request may be sent once more that a pooled connection took and lost.

        Mostly that connection was just closing; but a replica that lives may close each one.
        """
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True

    def take(self, open_requests: int, now_s: float, *, is_lost: bool) -> Claim | None:
        """Return the leave for one second try; None where there is none now."""
        settings = self._settings
        room = max(settings.reserve, settings.ratio * open_requests)
        elapsed_s = max(0.0, now_s - self._tokens_s)
        self._tokens = min(settings.per_s, self._tokens + elapsed_s * settings.per_s)
        self._tokens_s = max(self._tokens_s, now_s)
        if self.in_progress + 1 > room or self._tokens < 1.0:
            return None
        if not is_lost:
            if self._balance < 1.0:
                return None
            self._balance -= 1.0
        self._tokens -= 1.0
        self.in_progress += 1
        return Claim(self, is_lost=is_lost)

    def put_back(self, *, is_lost: bool) -> None:
        """Take back what a claim cost that was not used."""
        self._tokens = min(self._settings.per_s, self._tokens + 1.0)
        if not is_lost:
            self._balance = min(BALANCE_MOST, self._balance + 1.0)
