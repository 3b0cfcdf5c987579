"""A burst of errors on the candidate's side alone: seen with the request that makes it one.

Of the last ``LAST`` requests of the candidate at least ``FAILED`` failed, while of the control's
since the first of them hardly any did. A fleet that fails on both sides is no burst.

Nor is one client whose requests fail, however many it sends. Of the ``LAST`` places a conversation
has ``PER_GROUP`` at most. In a split by tenant a tenant has its even share of them, and never as
many as make a burst, unless it is the only one that the candidate had: then nobody else can tell.
The control's share is the mean of those of its conversations, or tenants, without the worst.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import Final, NamedTuple, TypeAlias

LAST: Final = 20
FAILED: Final = 10
PER_GROUP: Final = 2
CONTROL_LEAST: Final = 10
"""Of the control's requests in that time. With fewer, all of the candidate's have to fail."""
CONTROL_SHARE: Final = 0.1
"""So large a share of the control's may have failed."""
CONTROL_KEPT: Final = 32
"""Of each group."""


class _Seen(NamedTuple):
    """The request of that number among all; numbers grow with time."""

    number: int
    has_failed: bool


_Groups: TypeAlias = dict[int, deque[_Seen]]


class Burst:
    """Watches the requests of one router in the order they end."""

    def __init__(self, *, by_tenant: bool = False) -> None:
        self._by_tenant = by_tenant
        self._number = 0
        self._candidate: _Groups = {}
        self._control: _Groups = {}
        self.words = ""
        """What was seen; empty before."""

    def add(self, group: int, *, is_candidate: bool, has_failed: bool) -> bool:
        """Take one request of a group of conversations, or of tenants (``router.split``).

        Return whether it makes a burst, of which there is one at most.
        """
        self._number += 1
        side, kept = (self._candidate, LAST) if is_candidate else (self._control, CONTROL_KEPT)
        side.setdefault(group, deque(maxlen=kept)).append(_Seen(self._number, has_failed))
        if self.words or not is_candidate or not has_failed:
            return False
        most, places = self._places()
        rows = [one for seen in self._candidate.values() for one in list(seen)[-most:]]
        last = sorted(rows)[-LAST:]
        if sum(one.has_failed for one in last) < FAILED:
            return False
        return self._is_alone(last, places)

    def _places(self) -> tuple[int, int]:
        """Return how many places a group has at most, and how many there are in all."""
        groups = len(self._candidate)
        if not self._by_tenant:
            return PER_GROUP, LAST
        if groups == 1:
            return LAST, LAST
        most = min(FAILED - 1, max(PER_GROUP, ceil(LAST / groups)))
        return most, min(LAST, groups * most)

    def _is_alone(self, last: list[_Seen], places: int) -> bool:
        since = next(one.number for one in last if one.has_failed)
        failed = sum(one.has_failed for one in last)
        shares: list[float] = []
        told = control_failed = 0
        for seen in self._control.values():
            fates = [one.has_failed for one in seen if one.number > since]
            if fates:
                told, control_failed = told + len(fates), control_failed + sum(fates)
                shares.append(sum(fates) / len(fates))
        if told < CONTROL_LEAST and failed < places:
            return False
        others = sorted(shares)[:-1] or shares
        if sum(others) > CONTROL_SHARE * len(others):
            return False
        self.words = (
            f"{failed} of the last {len(last)} requests of the candidate failed, "
            f"and {control_failed} of {told} of the control meanwhile"
        )
        return True
