"""What this router has in flight: one lease per request, held until its stream has ended.

Counts are sizes of sets of live leases, never a pair of increments and decrements: they cannot
fall below zero, and a lease that ends twice ends once. Each life of a replica in the book has sets
of its own, so that a lease from before a removal never touches the counts after it.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from state.model import NO_WORK, LeaseTotals, ReplicaWork, Tip

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
                prefilling=so_far.prefilling + more.prefilling,
                backlog_ms=so_far.backlog_ms + more.backlog_ms,
                tips=so_far.tips + more.tips,
            )
    return summed


class Outcome(enum.StrEnum):
    """How a lease ended; only DONE says anything about the replica's speed."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


MAX_TIPS: Final = 64
"""So many of a replica's prompts, the newest, are told to other routers."""
LOAD_S: Final = 120.0
"""Time constant of ``prefill_load``: long enough to see who gets the work, not who is busy now."""
_NEWEST_WEIGHT: Final = 0.05
"""How much the last request counts in the mean time that one stays."""


@dataclass(slots=True)
class _Account:
    """The leases of one life of a replica. ``prefilling`` is in the order of dispatch."""

    live: set[Lease] = field(default_factory=set)
    prefilling: dict[Lease, None] = field(default_factory=dict)
    uncached_tokens: int = 0
    prefill_ms: float = 0.0
    head_since_s: float = 0.0
    recent: float = 0.0
    recent_at_s: float = 0.0
    work_ms: float = 0.0
    work_at_s: float = 0.0
    hold_s: float | None = None


class Lease:
    """One request's claim on a replica. ``outcome`` is None while the lease is open."""

    __slots__ = (
        "_account",
        "_book",
        "outcome",
        "prefill_ms",
        "replica",
        "started_s",
        "tells_first",
        "tip",
        "uncached_tokens",
    )

    def __init__(
        self,
        book: LeaseBook,
        account: _Account,
        replica: ReplicaId,
        uncached_tokens: int,
        *,
        prefill_ms: float,
        started_s: float,
        tells_first: bool,
    ) -> None:
        self._book = book
        self._account = account
        self.replica = replica
        self.uncached_tokens = uncached_tokens
        self.prefill_ms = prefill_ms
        self.started_s = started_s
        self.tells_first = tells_first
        self.tip: Tip | None = None
        self.outcome: Outcome | None = None

    def first_byte(self, now_s: float | None = None) -> bool:
        """Note that the prompt is computed; False when that was known or the lease is over."""
        if self not in self._account.prefilling:
            return False
        self._end_prefill(now_s)
        self._book.note_change()
        return True

    def finish(self, outcome: Outcome, now_s: float | None = None) -> bool:
        """End the lease; False, and no effect, when it has ended before."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        account = self._account
        if self in account.prefilling:
            self._end_prefill(now_s)
        account.live.discard(self)
        if now_s is not None and outcome is Outcome.DONE:
            stayed_s = max(0.0, now_s - self.started_s)
            mean_s = stayed_s if account.hold_s is None else account.hold_s
            account.hold_s = mean_s + _NEWEST_WEIGHT * (stayed_s - mean_s)
        self._book.note_end(self)
        return True

    def _end_prefill(self, now_s: float | None) -> None:
        account = self._account
        if now_s is not None and self is next(iter(account.prefilling)):
            account.head_since_s = now_s
        del account.prefilling[self]
        account.uncached_tokens -= self.uncached_tokens
        account.prefill_ms = account.prefill_ms - self.prefill_ms if account.prefilling else 0.0


class LeaseBook:
    """All leases of one router. ``version`` changes with every change of the totals."""

    __slots__ = ("_accounts", "_half_life_s", "_open", "version")

    def __init__(self, half_life_s: float = 10.0) -> None:
        self._half_life_s = half_life_s
        self._accounts: dict[ReplicaId, _Account] = {}
        self._open: set[Lease] = set()
        self.version = 0

    def acquire(
        self,
        replica: ReplicaId,
        uncached_tokens: int,
        now_s: float,
        *,
        prefill_ms: float = 0.0,
        tells_first: bool = True,
        tip: Tip | None = None,
    ) -> Lease:
        """Open a lease for a request whose ``uncached_tokens`` the replica is to compute.

        ``prefill_ms`` is what that takes at speed 1. ``tells_first``: its first byte will come as
        soon as that is done, and not with the end of the answer. ``tip`` ends the prompt's chain.
        """
        account = self._accounts.get(replica)
        if account is None:
            account = self._accounts[replica] = _Account(recent_at_s=now_s, work_at_s=now_s)
        lease = Lease(
            self,
            account,
            replica,
            uncached_tokens,
            prefill_ms=prefill_ms,
            started_s=now_s,
            tells_first=tells_first,
        )
        lease.tip = tip
        account.live.add(lease)
        if not account.prefilling:
            account.head_since_s = now_s
        account.prefilling[lease] = None
        account.uncached_tokens += uncached_tokens
        account.prefill_ms += prefill_ms
        account.recent = self._decayed(account, now_s) + 1.0
        account.recent_at_s = max(account.recent_at_s, now_s)
        account.work_ms = _faded(account, now_s) + prefill_ms
        account.work_at_s = max(account.work_at_s, now_s)
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

    def load(self, replica: ReplicaId, now_s: float, speed: float = 1.0) -> ReplicaWork:
        """Return the work that our leases put on ``replica``, which computes at ``speed``."""
        account = self._accounts.get(replica)
        if account is None:
            return NO_WORK
        recent, work_ms, prefilling = account.recent, account.work_ms, account.prefilling
        age_s = now_s - account.recent_at_s
        if age_s > 0.0:  # as ``_decayed`` has it, without a call
            recent *= math.exp2(-age_s / self._half_life_s)
        age_s = now_s - account.work_at_s
        if age_s > 0.0:  # and ``_faded``
            work_ms *= math.exp(-age_s / LOAD_S)
        return ReplicaWork(
            len(account.live),
            recent,
            len(prefilling),
            account.uncached_tokens,
            _backlog_ms(account, now_s, speed) if prefilling else 0.0,
            work_ms / LOAD_S,
            account.hold_s,
        )

    def totals(self, now_s: float | None = None) -> dict[ReplicaId, LeaseTotals]:
        """Return what is in flight per replica, where anything is."""
        return {
            replica: LeaseTotals(
                inflight=len(account.live),
                uncached_tokens=account.uncached_tokens,
                prefilling=len(account.prefilling),
                backlog_ms=(
                    account.prefill_ms if now_s is None else _backlog_ms(account, now_s, 1.0)
                ),
                tips=tuple([one.tip for one in account.prefilling if one.tip][-MAX_TIPS:]),
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
        age_s = now_s - account.recent_at_s
        if age_s <= 0.0:
            return account.recent
        return account.recent * math.exp2(-age_s / self._half_life_s)


def _faded(account: _Account, now_s: float) -> float:
    age_s = now_s - account.work_at_s
    return account.work_ms * math.exp(-age_s / LOAD_S) if age_s > 0.0 else account.work_ms


def _backlog_ms(account: _Account, now_s: float, speed: float) -> float:
    """Return the prefill ahead, at speed 1, less what was done of it.

    Prompts are computed in the order of dispatch. One that will tell is not done before it does.
    """
    left_ms, had_ms = account.prefill_ms, 1e3 * max(0.0, now_s - account.head_since_s) * speed
    for lease in account.prefilling:
        done_ms = min(had_ms, lease.prefill_ms)
        left_ms -= done_ms
        had_ms -= done_ms
        if lease.tells_first or had_ms <= 0.0:
            break
    return max(0.0, left_ms)
