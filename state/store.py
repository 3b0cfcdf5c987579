"""The two seams of shared state: what a sidecar writes and what a router reads.

Every backend passes ``tests/contract``. Errors of a backend are ``StateError``; a reader never
raises one: it answers from what it knows and says how good that is (``Rung``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from state.model import (
        BlockId,
        ChangeBatch,
        Fence,
        Generation,
        LeaseTotals,
        Overlap,
        ReplicaId,
        ReplicaLoad,
        ReplicaRecord,
        ReplicaState,
        Rung,
    )


class StateError(Exception):
    """The state backend failed or did not answer in time; never reaches a client."""


class ReplicaWriter(Protocol):
    """What a sidecar tells about its replica. Every method raises StateError when not stored."""

    async def register(self, record: ReplicaRecord) -> None:
        """Make ``record`` the replica's entry; a new generation starts with nothing resident."""
        ...

    async def heartbeat(self, record: ReplicaRecord, load: ReplicaLoad | None) -> Fence:
        """Keep the replica and its residency alive and publish ``load``, if still ours.

        Also stores a changed ``is_draining``. FENCED when another sidecar registered the replica.
        """
        ...

    async def apply(self, changes: Sequence[ChangeBatch]) -> None:
        """Store residency changes, in order; those of a dead generation have no effect."""
        ...

    async def deregister(self, replica: ReplicaId, generation: Generation) -> None:
        """Remove the replica and all that is known of it, if the generation is still current."""
        ...


class FleetReader(Protocol):
    """What a router knows of the fleet. All but ``settle`` are synchronous and do no I/O."""

    def replicas(self) -> Mapping[ReplicaId, ReplicaState]:
        """Return the registered replicas; the mapping is a snapshot and does not change."""
        ...

    def overlap(self, chain: Sequence[BlockId]) -> Mapping[ReplicaId, Overlap]:
        """Return the leading resident run of ``chain`` per replica; absent means none."""
        ...

    def publish_leases(self, totals: Mapping[ReplicaId, LeaseTotals]) -> None:
        """Set this router's own leases; they reach the other routers in the background."""
        ...

    def foreign_leases(self) -> Mapping[ReplicaId, LeaseTotals]:
        """Return the leases of all other live routers, summed per replica."""
        ...

    def freshness(self) -> tuple[Rung, float]:
        """Return the rung and the age of the view in seconds."""
        ...

    async def settle(self, timeout_s: float) -> bool:
        """Wait until every change stored before the call is visible; False when it is not."""
        ...
