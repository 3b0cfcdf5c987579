"""Slow start: a replica that came back gets its share of the requests in flight little by little.

The limit acts on who is offered to the policy, before it decides, so that a decision stays a pure
function of what is recorded with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from router.fleet import Member
    from state.model import ReplicaId


class Ramp:
    """Who is warming up, and since when. ``ramp_s`` 0 turns it off."""

    def __init__(self, ramp_s: float) -> None:
        self._ramp_s = ramp_s
        self.since_s: dict[ReplicaId, float] = {}

    def adopt(self, ramp_s: float) -> None:
        """Let those that are warming up be warm after ``ramp_s``, too."""
        self._ramp_s = ramp_s
        if ramp_s == 0:
            self.since_s.clear()

    def begin(self, replica: ReplicaId, now_s: float) -> None:
        """Let ``replica`` begin with little."""
        if self._ramp_s > 0:
            self.since_s[replica] = now_s

    def end_s(self, replica: ReplicaId) -> float | None:
        """Return when it is warm; None when it is."""
        since_s = self.since_s.get(replica)
        return None if since_s is None else since_s + self._ramp_s

    def tick(self, now_s: float) -> list[ReplicaId]:
        """Forget, and return, those that are warm."""
        warm = [each for each, since_s in self.since_s.items() if now_s - since_s >= self._ramp_s]
        for replica in warm:
            del self.since_s[replica]
        return warm

    def sifted(
        self, members: Sequence[Member], inflight: Callable[[ReplicaId], int], now_s: float
    ) -> list[Member]:
        """Return ``members`` without those that have as much as they may.

        That is the elapsed part of the ramp times what a warm one has in the mean, and one request
        at least. Where nobody is warm all are returned.
        """
        since_s = self.since_s
        warm = [inflight(each.replica) for each in members if each.replica not in since_s]
        if not warm or len(warm) == len(members):
            return list(members)
        mean = sum(warm) / len(warm) + 1.0

        def has_room(member: Member) -> bool:
            began_s = since_s.get(member.replica)
            if began_s is None:
                return True
            part = min(1.0, max(0.0, (now_s - began_s) / self._ramp_s))
            return inflight(member.replica) < max(1.0, part * mean)

        return [each for each in members if has_room(each)]
