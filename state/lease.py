"""What this router has in flight: one lease per request, held until its stream has ended.

Counts are sizes of sets of live leases, never a pair of increments and decrements: they cannot
fall below zero, and a lease that ends twice ends once. Each life of a replica in the book has sets
of its own, so that a lease from before a removal never touches the counts after it.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from state.model import LeaseTotals

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from state.model import ReplicaId


def sum_leases(
    many_totals: Iterable[Mapping[ReplicaId, LeaseTotals]],
) -> dict[ReplicaId, LeaseTotals]:
    """Return the totals of several routers, summed per replica."""
    summed: dict[ReplicaId, LeaseTotals] = {}
    for totals in many_totals:
        for replica, more in totals.items():
            so_far = summed.get(replica, LeaseTotals())
            summed[replica] = LeaseTotals(
                inflight=so_far.inflight + more.inflight,
                uncached_tokens=so_far.uncached_tokens + more.uncached_tokens,
            )
    return summed


class Outcome(enum.StrEnum):
    """How a lease ended; only DONE says anything about the replica's speed."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class _Account:
    """The leases of one life of a replica."""

    live: set[Lease] = field(default_factory=set)
    prefilling: set[Lease] = field(default_factory=set)
    uncached_tokens: int = 0
    recent: float = 0.0
    recent_at_s: float = 0.0


class Lease:
    """One request's claim on a replica. ``outcome`` is None while the lease is open."""

    __slots__ = ("_account", "_book", "outcome", "replica", "uncached_tokens")

    def __init__(
        self, book: LeaseBook, account: _Account, replica: ReplicaId, uncached_tokens: int
    ) -> None:
        self._book = book
        self._account = account
        self.replica = replica
        self.uncached_tokens = uncached_tokens
        self.outcome: Outcome | None = None

    def first_byte(self) -> bool:
        """Note that the prompt is computed; False when that was known or the lease is over."""
        if self not in self._account.prefilling:
            return False
        self._end_prefill()
        self._book.note_change()
        return True

    def finish(self, outcome: Outcome) -> bool:
        """End the lease; False, and no effect, when it has ended before."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        if self in self._account.prefilling:
            self._end_prefill()
        self._account.live.discard(self)
        self._book.note_end(self)
        return True

    def _end_prefill(self) -> None:
        self._account.prefilling.discard(self)
        self._account.uncached_tokens -= self.uncached_tokens


class LeaseBook:
    """All leases of one router. ``version`` changes with every change of the totals."""

    __slots__ = ("_accounts", "_half_life_s", "_open", "version")

    def __init__(self, half_life_s: float = 10.0) -> None:
        self._half_life_s = half_life_s
        self._accounts: dict[ReplicaId, _Account] = {}
        self._open: set[Lease] = set()
        self.version = 0

    def acquire(self, replica: ReplicaId, uncached_tokens: int, now_s: float) -> Lease:
        """Open a lease for a request whose ``uncached_tokens`` the replica is to compute."""
        account = self._accounts.get(replica)
        if account is None:
            account = self._accounts[replica] = _Account(recent_at_s=now_s)
        lease = Lease(self, account, replica, uncached_tokens)
        account.live.add(lease)
        account.prefilling.add(lease)
        account.uncached_tokens += uncached_tokens
        account.recent = self._decayed(account, now_s) + 1.0
        account.recent_at_s = max(account.recent_at_s, now_s)
        self._open.add(lease)
        self.version += 1
        return lease

    def inflight(self, replica: ReplicaId) -> int:
        """Return the number of open leases on ``replica`` in its present life."""
        account = self._accounts.get(replica)
        return len(account.live) if account else 0

    def uncached_tokens(self, replica: ReplicaId) -> int:
        """Return the prompt tokens that ``replica`` is still to compute for our leases."""
        account = self._accounts.get(replica)
        return account.uncached_tokens if account else 0

    def recent(self, replica: ReplicaId, now_s: float) -> float:
        """Return the number of leases taken on ``replica``, each halved per half-life of age."""
        account = self._accounts.get(replica)
        return self._decayed(account, now_s) if account else 0.0

    def totals(self) -> dict[ReplicaId, LeaseTotals]:
        """Return what is in flight per replica, where anything is."""
        return {
            replica: LeaseTotals(
                inflight=len(account.live), uncached_tokens=account.uncached_tokens
            )
            for replica, account in self._accounts.items()
            if account.live
        }

    @property
    def open_count(self) -> int:
        """Open leases, those on forgotten replicas included: 0 when no request is running."""
        return len(self._open)

    def forget(self, replica: ReplicaId) -> None:
        """Begin a new life of ``replica``: its open leases count on nothing from now on."""
        if self._accounts.pop(replica, None) is not None:
            self.version += 1

    def note_change(self) -> None:
        """Count a change of the totals; called by leases."""
        self.version += 1

    def note_end(self, lease: Lease) -> None:
        """Take an ended lease off the book; called by leases."""
        self._open.discard(lease)
        self.version += 1

    def _decayed(self, account: _Account, now_s: float) -> float:
        age_s = max(0.0, now_s - account.recent_at_s)
        return account.recent * math.exp2(-age_s / self._half_life_s)
