"""The learned limits of all replicas: what requests tell of them goes in, a number comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.limit import LearnedLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from router.admission_setting import AdmissionSettings, LearnSettings
    from state.lease import LeaseBook
    from state.model import ReplicaId
    from state.store import FleetReader


def learned_limits(
    settings: AdmissionSettings, leases: LeaseBook, reader: FleetReader
) -> ReplicaLimits | None:
    """Return the limits, where they are to be learned."""
    if not settings.learned:
        return None

    def inflight(replica: ReplicaId) -> int:
        elsewhere = reader.foreign_leases().get(replica)
        return leases.inflight(replica) + (elsewhere.inflight if elsewhere is not None else 0)

    return ReplicaLimits(settings.learning, settings.max_inflight_per_replica, inflight)


class ReplicaLimits:
    """Estimates only: who may be sent a request is ``router.admission``'s to say.

    ``inflight`` returns the open leases of all routers on a replica. ``maximum`` is the hard cap.
    """

    def __init__(
        self,
        settings: LearnSettings,
        maximum: int | None,
        inflight: Callable[[ReplicaId], int],
    ) -> None:
        self._settings = settings
        self._maximum = maximum
        self._inflight = inflight
        self._limits: dict[ReplicaId, LearnedLimit] = {}
        self._first = self._new().requests
        """What a replica begins with."""

    def limit(self, replica: ReplicaId) -> int:
        """Return how many requests ``replica`` may have in flight."""
        learned = self._limits.get(replica)
        return self._first if learned is None else learned.requests

    def ratios(self) -> Mapping[ReplicaId, float]:
        """Return how slow first tokens were of late, against an idle replica's, where known."""
        return {
            replica: learned.ratio
            for replica, learned in self._limits.items()
            if learned.ratio is not None
        }

    def began(self, replica: ReplicaId) -> int:
        """Return how many requests are in flight there, with the one whose lease was just taken."""
        return self._inflight(replica)

    def first_byte(
        self, replica: ReplicaId, *, work_ms: float, ttft_ms: float, inflight: int, now_s: float
    ) -> None:
        """Note the first token of a streamed answer; others say nothing of it."""
        self._of(replica).succeed(work_ms, ttft_ms, inflight, now_s)

    def dropped(self, replica: ReplicaId, now_s: float) -> None:
        """Note that ``replica`` refused a request because it is busy."""
        self._of(replica).drop(now_s)

    def forget(self, replica: ReplicaId) -> None:
        """Forget a replica that left."""
        self._limits.pop(replica, None)

    def _of(self, replica: ReplicaId) -> LearnedLimit:
        learned = self._limits.get(replica)
        if learned is None:
            learned = self._limits[replica] = self._new()
        return learned

    def _new(self) -> LearnedLimit:
        settings = self._settings
        return LearnedLimit(
            initial=settings.initial,
            minimum=settings.minimum,
            maximum=self._maximum,
            tolerance=settings.tolerance,
        )
