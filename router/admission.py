"""Which requests may go on: each is admitted, waits for a place, or is shed before it costs much.

A request meets, in this order: the overload ladder of the process, the bound on open requests, its
tenant's rate (all on its headers alone, before a body byte is read); then, once its prompt is
known, the places. A place is an open lease: ``max_inflight`` bounds those of this router, the limit
of a replica those of all routers there. Counts are sizes of sets of leases, so nothing is given
back here and nothing can drift. Where no replica that has the model has a place, a request waits in
the queue (``router.hold``), which gives places to the highest priority first, within it to tenants
in turn by uncached tokens, and within a tenant to the shortest prefill.

By default only the bound on open requests and the places of the router are there, far beyond what
engines run at a time: an engine has a queue of its own, knows its memory, and batches best what it
has. Shedding earlier than it would have to wait serves nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from policies.hold import Blocked
from router.admission_setting import Priority
from router.overload import LoadRung
from router.shed import (
    InflightCapError,
    LowPriorityShedError,
    QueueFullError,
    RouterOverloadError,
    Sheds,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from router.account import Call
    from router.admission_setting import AdmissionSettings
    from router.chooser import Routed
    from router.concurrency import ReplicaLimits
    from router.fleet import FleetTable, Member, Pulse
    from router.overload import Overload
    from router.rate import Rates
    from router.request import Request
    from state.lease import LeaseBook
    from state.model import LeaseTotals, ReplicaId
    from state.store import FleetReader

ASSUMED_PLACES: Final = 4_096
"""Of a replica that nobody set a bound for: several times what engines run at once (vLLM's
``max_num_seqs`` is 256 or 1,024), so that beyond it all would only wait there."""
ROUTER: Final = "*"
"""What is waited for where all places of the router are taken; no replica's name begins so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionParts:
    """What the rules look at. ``candidates`` are the replicas that a model may be sent to."""

    leases: LeaseBook
    reader: FleetReader
    fleet: FleetTable
    pulse: Pulse
    candidates: Callable[[str | None], Sequence[Member]]
    overload: Overload
    limits: ReplicaLimits | None = None


class Admission:
    """The rules of one router. ``Hold`` asks it for places; it asks nobody to wait itself."""

    def __init__(self, settings: AdmissionSettings, parts: AdmissionParts) -> None:
        self._settings = settings
        self._parts = parts
        self._cap_per_replica = settings.max_inflight_per_replica
        self.rates: Rates | None = None
        self.sheds = Sheds()
        self.gives_way: Callable[[int, str], bool] = lambda *_: False
        """Whether one who waits would give way to a newcomer of such a class and tenant."""
        self.has_replica_limits = self._cap_per_replica is not None or parts.limits is not None
        self.pending = settings.pending
        self.queue_timeout_s = settings.queue_timeout_s
        self.cap = 0
        """Most open leases of this router."""
        self.most_open = 0
        """Most open requests: those with a place and those that may wait for one."""
        self.refresh()

    def adopt(self, settings: AdmissionSettings) -> None:
        """Go by other settings from now on; what has a place keeps it."""
        self._settings = settings
        self._cap_per_replica = settings.max_inflight_per_replica
        limits = self._parts.limits
        self.has_replica_limits = self._cap_per_replica is not None or limits is not None
        self.pending = settings.pending
        self.queue_timeout_s = settings.queue_timeout_s
        self.refresh()

    # Before the body is read.

    def enter(self, request: Request, call: Call, open_requests: int) -> None:
        """Admit a request by its headers, with itself among ``open_requests``; raises ShedError."""
        priority = Priority.NORMAL if call.tenant is None else call.tenant.priority
        if self._settings.client_priority and request.headers.priority is not None:
            priority = max(priority, request.headers.priority, key=_rank)
        call.priority = priority
        if self._parts.overload.rung:
            self._refuse_overload(request, priority)
        if open_requests > self.most_open:
            self._refuse_full(call, open_requests)
        if self.rates is not None and call.tenant is not None:
            call.rate = self.rates.enter(call.tenant.name)

    def _refuse_overload(self, request: Request, priority: Priority) -> None:
        rung = self._parts.overload.rung
        if rung >= LoadRung.CLOSE:
            request.keep_alive = False
        if rung >= LoadRung.REFUSE:
            message = "the router is overloaded"
            raise RouterOverloadError(message)
        if priority is Priority.LOW:
            message = "the router is overloaded; requests of low priority are refused"
            raise LowPriorityShedError(message)

    def _refuse_full(self, call: Call, open_requests: int) -> None:
        """Refuse a request, unless one who waits would give way to it."""
        if not self.pending:
            message = f"{self.cap} requests are in flight"
            raise InflightCapError(message)
        tenant = "" if call.tenant is None else call.tenant.name
        is_bounded = open_requests <= self.most_open + self.pending
        if not (is_bounded and self.gives_way(call.priority.rank, tenant)):
            message = f"{self.cap} requests are in flight and {self.pending} wait"
            raise QueueFullError(message)

    # Places.

    @property
    def is_full(self) -> bool:
        """Whether all places of this router are taken."""
        return self._parts.leases.open_count >= self.cap

    def limit(self, replica: ReplicaId) -> int | None:
        """Return how many leases of all routers ``replica`` may have; None for no limit."""
        limits = self._parts.limits
        if limits is None:
            return self._cap_per_replica
        learned = limits.limit(replica)
        return learned if self._cap_per_replica is None else min(learned, self._cap_per_replica)

    def with_place(self, candidates: Sequence[Member]) -> list[Member]:
        """Return the candidates that may have one more request."""
        if not self.has_replica_limits:
            return list(candidates)
        foreign = self._parts.reader.foreign_leases()
        found = []
        for member in candidates:
            limit = self.limit(member.replica)
            if limit is None or self._inflight(member.replica, foreign) < limit:
                found.append(member)
        return found

    def blocked(self, routed: Routed) -> Blocked | None:
        """Return what ``routed`` has to wait for; None where there is a place, or no replica."""
        is_full = self.is_full
        if not is_full and not self.has_replica_limits:
            return None
        candidates = self._parts.candidates(routed.prompt.model or None)
        if not candidates:
            return None
        if is_full:
            return Blocked(ROUTER)
        return None if self.with_place(candidates) else Blocked(_of_model(routed))

    def awaited(self, routed: Routed) -> tuple[str, ...]:
        """Return all that ``routed`` may have to wait for."""
        return (ROUTER, _of_model(routed))

    def check(self, routed: Routed) -> None:
        """Raise InflightCapError where there is no place, for whoever cannot wait for one."""
        if self.blocked(routed) is not None:
            message = "all places are taken, and requests do not wait here"
            raise InflightCapError(message)

    def refresh(self) -> None:
        """Follow the fleet: what it has places for changes with its replicas and their limits."""
        members, pulse = self._parts.fleet.members().values(), self._parts.pulse
        live = [m for m in members if pulse.is_up(m.replica) and not m.is_draining] or members
        places = 0
        for member in live:
            limit = self.limit(member.replica)
            places += ASSUMED_PLACES if limit is None else limit
        most = self._settings.max_inflight
        places = max(places, 1) if live else ASSUMED_PLACES
        self.cap = places if most is None else min(most, places)
        self.most_open = self.cap + self.pending

    def inflight(self, replica: ReplicaId) -> int:
        """Return the open leases of all routers on ``replica``."""
        return self._inflight(replica, self._parts.reader.foreign_leases())

    def _inflight(self, replica: ReplicaId, foreign: Mapping[ReplicaId, LeaseTotals]) -> int:
        elsewhere = foreign.get(replica)
        return self._parts.leases.inflight(replica) + (elsewhere.inflight if elsewhere else 0)


def _rank(priority: Priority) -> int:
    return priority.rank


def _of_model(routed: Routed) -> str:
    return f"{ROUTER}{routed.prompt.model}"
