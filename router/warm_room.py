"""When a replica has room for a request that nobody waits for, and when such a one has to go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from router.availability import Standing
from router.overload import LoadRung

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.availability import StandingView
    from router.entrance import Entrance
    from router.fleet import FleetTable, Member
    from state.lease import LeaseBook
    from state.model import ReplicaId
    from state.store import FleetReader

FULL_FRACTION: Final = 0.9
"""With so much of its KV memory in use a replica would evict what runs, or what was asked for."""
_OPEN: Final = frozenset({Standing.UP, Standing.SLOW_START})


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmRoom:
    """Looks at clients' requests, of all routers. ``own`` are the warm-ups on a replica."""

    fleet: FleetTable
    reader: FleetReader
    leases: LeaseBook
    standing: Callable[[ReplicaId], StandingView]
    entrance: Entrance
    own: Callable[[ReplicaId], int]
    clock: Callable[[], float]

    def is_open(self, replica: ReplicaId) -> bool:
        """Return whether ``replica`` takes requests at all: up, and neither held nor drained."""
        member = self.fleet.members().get(replica)
        if member is None or member.is_draining:
            return False
        return self.standing(replica).standing in _OPEN

    def has_room(self, member: Member) -> bool:
        """Return whether one more request there is in nobody's way.

        No client waits in a router or in the engine, none is about to get its first token from the
        replica, and a place is left for the next one.
        """
        replica, entrance = member.replica, self.entrance
        if not self.is_open(replica) or self._is_prefilling(replica):
            return False
        if entrance.overload.rung is not LoadRung.NORMAL or entrance.waiting():
            return False
        load = member.load
        if load is not None and (load.queued or (load.kv_used_fraction or 0.0) >= FULL_FRACTION):
            return False
        admission = entrance.admission
        limit = admission.limit(replica)
        if limit is not None and admission.inflight(replica) + 1 >= limit:
            return False
        return self.leases.open_count + 1 < admission.cap

    def must_yield(self, replica: ReplicaId, before: int) -> bool:
        """Return whether a warm-up that runs there is in a client's way, or of no use any more.

        So many clients wait with their prompts computed as were there ``before``, when it began.
        """
        is_open = self.is_open(replica)
        if not is_open or self.clients(replica) > before or self.entrance.waiting():
            return True
        admission = self.entrance.admission
        limit = admission.limit(replica)
        is_full = limit is not None and admission.inflight(replica) >= limit
        return is_full or self.leases.open_count >= admission.cap

    def clients(self, replica: ReplicaId) -> int:
        """Return how many clients have nothing of their answers from ``replica`` yet."""
        ours = self.leases.load(replica, self.clock()).prefilling - self.own(replica)
        others = self.reader.foreign_leases().get(replica)
        return ours + (others.prefilling if others is not None else 0)

    def _is_prefilling(self, replica: ReplicaId) -> bool:
        """Return whether some client's prompt is still being computed, as far as can be told.

        An answer that comes as a whole says nothing before: then it follows from the time.
        """
        ours = self.leases.load(replica, self.clock())
        others = self.reader.foreign_leases().get(replica)
        return (ours.prefilling > 0 and ours.backlog_ms > 0.0) or (
            others is not None and others.prefilling > 0 and others.backlog_ms > 0.0
        )
